"""Synthetic transitions. If these fail, they are drawn from another distribution than the one that was learned."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="pip install 'imagination[diffusion]'")

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from real_envs.errors import UserError
from worldmodel.extras.synther.model import TransitionDenoiser, Upsampler, denoising_loss, make_scheduler, sample
from worldmodel.extras.synther.settings import SyntherSettings
from worldmodel.extras.synther.transitions import (
    Transitions,
    correlation_similarity,
    dynamics_error,
    marginal_similarity,
    similarity,
)

SMALL = SyntherSettings(ratio=0.5, dims=2, hidden=16, layers=1, steps=3, batch=8)


def planted(n: int, seed: int = 0) -> Transitions:
    """States of 5 numbers on a plane; the next state is the state turned round, the reward its first number."""
    rng = torch.Generator().manual_seed(seed)
    plane = torch.tensor([[3.0, 0.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0]])
    z = torch.randn(n, 2, generator=rng)
    states = z @ plane + 7.0
    return Transitions(states, (z.flip(1) @ plane) + 7.0, states[:, 0], z[:, 0] > 1, 2 * z[:, 0] + 3)


def of_denoiser(denoised: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The network whose preconditioned output is ``denoised(x, sigma)``: Karras et al. 2022, table 1, solved for F."""

    def network(scaled: Tensor, noise: Tensor) -> Tensor:
        sigma = (4 * noise)[:, None].exp()
        x = scaled * (sigma**2 + 1).sqrt()
        return (denoised(x, sigma) - x / (sigma**2 + 1)) / (sigma / (sigma**2 + 1).sqrt())

    return network


def test_the_noise_levels_are_those_of_the_paper() -> None:
    """Karras et al. 2022, equation 5, in a plain loop; the last step goes to 0."""
    scheduler, steps = make_scheduler(), 128
    scheduler.set_timesteps(steps)
    low, high = 0.002 ** (1 / 7), 80 ** (1 / 7)
    expected = [(high + i / (steps - 1) * (low - high)) ** 7 for i in range(steps)]
    assert scheduler.sigmas.tolist() == pytest.approx([*expected, 0.0], rel=1e-4)
    assert scheduler.timesteps.tolist() == pytest.approx([math.log(sigma) / 4 for sigma in expected], abs=1e-5)
    assert expected[0] == pytest.approx(80.0)


def test_the_loss_by_hand() -> None:
    """y = 1, n = 1, sigma = 2: x = 3, c_in 1/sqrt 5, c_skip 1/5, c_out 2/sqrt 5; F = sqrt 5 makes D = 3/5 + 2 = 2.6.

    The weight is (4 + 1) / 4, so the loss is 1.25 * 1.6^2 = 3.2.
    """
    seen: list[tuple[float, float]] = []

    def network(x: Tensor, noise: Tensor) -> Tensor:
        seen.append((float(x), float(noise)))
        return torch.full_like(x, math.sqrt(5))

    loss = denoising_loss(network, make_scheduler(), torch.ones(1, 1), torch.tensor([2.0]), torch.ones(1, 1))
    assert float(loss) == pytest.approx(3.2)
    assert seen == [(pytest.approx(3 / math.sqrt(5)), pytest.approx(math.log(2) / 4))]


def test_a_known_gaussian_is_reached_along_its_own_flow() -> None:
    """The flow of N(m, s^2) has a closed form: x(0) = m + s (x(T) - m) / sqrt(s^2 + T^2)."""
    m, s = torch.tensor([0.5, -1.0]), torch.tensor([0.4, 1.3])
    network = of_denoiser(lambda x, sigma: (s**2 * x + sigma**2 * m) / (s**2 + sigma**2))
    found = sample(network, make_scheduler(), 2000, 2, 128, seed=3)
    start = torch.randn(2000, 2, generator=torch.Generator().manual_seed(3)) * math.sqrt(80**2 + 1)
    expected = m + s * (start - m) / (s**2 + 80**2).sqrt()
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


def test_a_known_mixture_is_drawn_in_its_proportions() -> None:
    """30 % N(-2, 0.2^2) and 70 % N(1, 0.5^2): of 6000 draws the share is off by 0.006 once in three times."""
    share, centre, spread = torch.tensor([0.3, 0.7]), torch.tensor([-2.0, 1.0]), torch.tensor([0.2, 0.5])

    def denoised(x: Tensor, sigma: Tensor) -> Tensor:
        total = spread**2 + sigma**2
        belongs = (share.log() - total.log() / 2 - (x - centre) ** 2 / (2 * total)).softmax(1)
        return (belongs * (spread**2 * x + sigma**2 * centre) / total).sum(1, keepdim=True)

    found = sample(of_denoiser(denoised), make_scheduler(), 6000, 1, 128, seed=0)[:, 0]
    left = found[found < -0.8]
    right = found[found >= -0.8]
    assert len(left) / 6000 == pytest.approx(0.3, abs=0.03)
    assert float(left.mean()) == pytest.approx(-2.0, abs=0.03)
    assert float(left.std()) == pytest.approx(0.2, abs=0.02)
    assert float(right.mean()) == pytest.approx(1.0, abs=0.04)
    assert float(right.std()) == pytest.approx(0.5, abs=0.03)
    assert torch.equal(found, sample(of_denoiser(denoised), make_scheduler(), 6000, 1, 128, seed=0)[:, 0])
    assert not torch.equal(found, sample(of_denoiser(denoised), make_scheduler(), 6000, 1, 128, seed=1)[:, 0])


def test_whitened_transitions_come_back_as_they_were() -> None:
    real = planted(200)
    model = TransitionDenoiser(state=5, dims=2)
    assert model.fit_whitening(real) == pytest.approx(1.0), "two components hold a plane"
    columns = model.encode(real)
    assert columns.shape == (200, 7)
    torch.testing.assert_close(columns.mean(0), torch.zeros(7), atol=1e-4, rtol=0)
    torch.testing.assert_close(columns.std(0, correction=0), torch.ones(7), atol=1e-4, rtol=0)
    back = model.decode(columns)
    torch.testing.assert_close(back.columns(), real.columns(), atol=1e-4, rtol=1e-4)
    one = TransitionDenoiser(state=5, dims=1)
    kept = one.fit_whitening(real)
    both = torch.cat([real.states, real.next_states])
    variances = torch.linalg.svdvals(both - both.mean(0)) ** 2
    assert kept == pytest.approx(float(variances[0] / variances.sum()), abs=1e-5)


def test_what_never_varies_stays_what_it_is() -> None:
    real = planted(50)
    never = Transitions(real.states, real.next_states, torch.full((50,), 3.0), torch.zeros(50).bool(), real.returns)
    model = TransitionDenoiser(state=5, dims=2)
    model.fit_whitening(never)
    assert torch.equal(model.encode(never)[:, 4:6], torch.zeros(50, 2))
    assert model.decode(model.encode(never)).rewards.tolist() == [3.0] * 50


def test_a_transition_ended_where_its_number_says_so_by_more_than_half() -> None:
    columns = torch.zeros(3, 7)
    columns[:, 5] = torch.tensor([-0.2, 0.4, 0.6])
    assert TransitionDenoiser(state=5, dims=2).decode(columns).dones.tolist() == [False, False, True]


def test_a_fit_is_decided_by_its_seed_and_learns_what_it_is_shown() -> None:
    real, before = planted(300), torch.random.get_rng_state()
    one, again, other = (Upsampler.fit(real, SMALL, seed).sample(4, 4, 0).columns() for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state()), "chance of others is left alone"

    longer = SyntherSettings(ratio=0.5, dims=2, hidden=48, layers=1, steps=200, batch=128, lr=3e-3)
    losses = []
    for settings in (SMALL, longer):  # all seven columns follow from two, so most of the noise can be told
        fitted = Upsampler.fit(real, settings, 0)
        rng = torch.Generator().manual_seed(0)
        clean = fitted.denoiser.encode(planted(300, seed=1))
        sigma = torch.full((300,), 0.5)
        with torch.no_grad():
            noise = torch.randn(clean.shape, generator=rng)
            losses.append(float(denoising_loss(fitted.denoiser, fitted.scheduler, clean, sigma, noise)))
    assert losses[1] < 0.7 * losses[0]


def test_a_checkpoint_is_configs_and_safetensors(tmp_path: Path) -> None:
    fitted = Upsampler.fit(planted(50), SMALL, 0)
    fitted.save(tmp_path / "synther")
    files = {str(path.relative_to(tmp_path / "synther")) for path in tmp_path.rglob("*") if path.is_file()}
    weights = "denoiser/diffusion_pytorch_model.safetensors"
    assert files == {"denoiser/config.json", weights, "scheduler/scheduler_config.json"}
    loaded = Upsampler.load(tmp_path / "synther")
    assert torch.equal(loaded.sample(5, 4, 1).columns(), fitted.sample(5, 4, 1).columns())

    (tmp_path / "synther" / weights).unlink()
    torch.save(fitted.denoiser.state_dict(), tmp_path / "synther/denoiser/diffusion_pytorch_model.bin")  # a pickle
    with pytest.raises(UserError, match="no model of transitions"):
        Upsampler.load(tmp_path / "synther")


def test_what_cannot_be_fitted_is_said() -> None:
    with pytest.raises(UserError, match="there are 1"):
        Upsampler.fit(planted(1), SMALL, 0)
    with pytest.raises(ValueError, match=r"dims .* \[1, 5\]"):
        TransitionDenoiser(state=5, dims=6)
    with pytest.raises(ValueError, match=r"synther\.ratio .* \[0, 1\)"):
        SyntherSettings(ratio=1.0)
    real = planted(2)
    with pytest.raises(ValueError, match=r"dones .*bool"):
        Transitions(real.states, real.next_states, real.rewards, real.rewards, real.returns)


def columns(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values).T


def test_marginals_by_hand() -> None:
    """First column: at 0 it is 1/2 against 0. Second: at 2 it is 1 against 1/4, ties counted on both sides."""
    assert marginal_similarity(columns([0.0, 1.0]), columns([1.0, 2.0])) == pytest.approx(0.5)
    real, other = columns([0.0, 1.0], [2.0, 2.0]), columns([1.0, 2.0, 1.0, 2.0], [2.0, 3.0, 3.0, 3.0])
    assert marginal_similarity(real, other) == pytest.approx(1 - (0.5 + 0.75) / 2)
    assert marginal_similarity(real, real) == 1.0


def test_correlations_by_hand() -> None:
    """Of three pairs, one turns from 1 to -1, and one each from 0 to 0; a column that never varies is left out."""
    real = columns([1.0, 1.0, -1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0], [5.0] * 4)
    other = real * torch.tensor([1.0, -3.0, 1.0, 1.0]) + 2
    assert correlation_similarity(real, other) == pytest.approx(1 - (2 / 2) / 3)
    assert correlation_similarity(real, 2 * real - 1) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="there is 1"):
        correlation_similarity(real[:, 2:], real[:, 2:])


def test_the_dynamics_error_by_hand() -> None:
    """x = -1, 1 and y = 1, 5: centred 2 and 3; slope (2 + 2) / (2 + 1) with the ridge of 1, intercept 3.

    At x = 3 that says 3 + 4 = 7, and at x = 0 it says 3; the others were 8 and 3.
    """
    error = dynamics_error(columns([-1.0, 1.0]), columns([1.0, 5.0]), columns([3.0, 0.0]), columns([8.0, 3.0]))
    assert error == pytest.approx(0.5)


def test_transitions_with_other_dynamics_are_told_apart() -> None:
    """Next states of other rows have the same marginals, and follow from nothing."""

    def drawn(n: int, seed: int) -> Transitions:
        rng = torch.Generator().manual_seed(seed)
        states = torch.randn(n, 4, generator=rng)
        return Transitions(states, states.roll(1, 1), states[:, 0], states[:, 1] > 0, states.sum(1))

    held, real = drawn(300, 0), drawn(300, 1)
    shuffled = replace(real, next_states=real.next_states.roll(1, 0))
    model = TransitionDenoiser(state=4, dims=4)
    model.fit_whitening(real)
    good, bad = similarity(model, held, real), similarity(model, held, shuffled)
    assert bad.marginal == good.marginal
    assert good.dynamics_error < 0.01
    assert bad.dynamics_error > 1.0
    assert bad.correlation < good.correlation - 0.02
