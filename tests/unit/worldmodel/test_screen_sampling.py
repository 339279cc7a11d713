"""From noise to pictures. If these fail, dreams go another way than the one that was learned."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="pip install 'imagination[diffusion]'")

import torch
from torch import Tensor

from worldmodel.screen.sampling import make_scheduler, sample

WIDE = (slice(None), None, None, None)


@pytest.mark.parametrize("steps", [1, 2, 4, 16])
def test_the_scheduler_takes_equal_steps_from_noise_to_picture(steps: int) -> None:
    seen: list[tuple[float, float]] = []

    def velocity(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
        seen.append((float(t[0]), float(d[0])))
        return torch.cos(x) - t[WIDE]

    start = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    scheduler = make_scheduler()
    found = sample(velocity, start, steps, scheduler)
    x = start.double()
    for k in range(steps):
        x = x + (torch.cos(x) - k / steps) / steps
    torch.testing.assert_close(found.double(), x, atol=1e-5, rtol=1e-5)
    assert seen == [(k / steps, 1 / steps) for k in range(steps)]
    again = sample(velocity, start, steps, scheduler)
    assert torch.equal(found, again), "a scheduler counts its steps, and must begin anew"
    scheduler.set_timesteps(sigmas=[1 - k / steps for k in range(steps)])
    assert scheduler.timesteps.tolist() == pytest.approx([1000 * (steps - k) / steps for k in range(steps)])


def test_the_velocity_of_a_known_gaussian_gives_its_mean_and_variance() -> None:
    """x1 ~ N(m, s²): the best guess of x1 - x0 from x_t = (1 - t) x0 + t x1, by the formula for joint Gaussians."""
    m, s = 0.7, 0.3

    def velocity(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
        t = t[WIDE]
        spread = (1 - t) ** 2 + t**2 * s**2
        return m + (t * s**2 - (1 - t)) / spread * (x - t * m)

    noise = torch.randn(4, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    found = sample(velocity, noise, 128, make_scheduler())
    assert float(found.mean()) == pytest.approx(m, abs=0.01)
    assert float(found.std()) == pytest.approx(s, abs=0.01)
    assert float(torch.corrcoef(torch.stack([found.flatten(), noise.flatten()]))[0, 1]) > 0.999, "a map, no new chance"
