"""Flow matching and its shortcuts. If these fail, the model of screens learns another thing than to draw them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from worldmodel.extras.screen.model import Noise, draw_noise, shortcut_forcing_loss, shortcut_target

WIDE = (slice(None), None, None, None)


def odd_network(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
    """Nothing that a network could not be: it depends on place, time and step, and not linearly."""
    return torch.sin(2 * x) + t[WIDE] * x - 0.3 * d[WIDE]


def odd_number(x: float, t: float, d: float) -> float:
    return math.sin(2 * x) + t * x - 0.3 * d


def test_the_loss_is_that_of_a_plain_loop_over_rows_and_pixels() -> None:
    rng = torch.Generator().manual_seed(0)
    x1, x0 = (torch.randn(4, 2, 3, 2, generator=rng) for _ in range(2))
    t, d = torch.tensor([0.0, 0.5, 0.625, 0.0]), torch.tensor([1.0, 0.5, 0.125, 0.125])
    noise = Noise(x0, t, d, torch.tensor([True, True, False, False]))

    rows_loss, flow, short = [], [], []
    for b in range(4):
        errors = []
        for place in range(12):
            noisy, clean = float(x0[b].flatten()[place]), float(x1[b].flatten()[place])
            tb, db = float(t[b]), float(d[b])
            x = (1 - tb) * noisy + tb * clean
            guess = odd_number(x, tb, db)
            if b >= 2:  # learned from the data
                errors.append((guess - clean) ** 2)
                continue
            half = db / 2
            first = (odd_number(x, tb, half) - x) / (1 - tb)
            there = x + half * first
            second = (odd_number(there, tb + half, half) - there) / (1 - tb - half)
            velocity = (guess - x) / (1 - tb)
            errors.append((1 - tb) ** 2 * (velocity - (first + second) / 2) ** 2)
        (flow if b >= 2 else short).append(sum(errors) / 12)
        rows_loss.append(sum(errors) / 12)

    loss, found = shortcut_forcing_loss(lambda rows, x, at, step: odd_network(x, at, step), x1, noise)
    assert float(loss) == pytest.approx(sum(rows_loss) / 4, rel=1e-5)
    assert found["flow_error"] == pytest.approx(sum(flow) / 2, rel=1e-5)
    assert found["shortcut_error"] == pytest.approx(sum(short) / 2, rel=1e-5)


def test_a_shortcut_goes_where_two_steps_go() -> None:
    """Equation 5 of the paper, whose step of 2d is one jump along the target."""
    x = torch.tensor([[[[0.4]]], [[[-1.2]]]])
    t, d = torch.tensor([0.25, 0.0]), torch.tensor([0.125, 0.5])
    target = shortcut_target(odd_network, x, t, d)
    for b in range(2):
        at, time, step = float(x[b]), float(t[b]), float(d[b])
        for _ in range(2):
            at, time = at + step * odd_number(at, time, step), time + step
        assert float(x[b]) + 2 * step * float(target[b]) == pytest.approx(at, rel=1e-5)


def test_what_two_steps_say_is_a_goal_and_learns_nothing_itself() -> None:
    weight = torch.tensor(0.5, requires_grad=True)
    x1 = torch.ones(1, 1, 1, 1)
    noise = Noise(torch.zeros_like(x1), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([True]))
    loss, _ = shortcut_forcing_loss(lambda rows, x, t, d: weight * (1 + x), x1, noise)
    # x = 0: first = w, x' = w / 2, second = (w (1 + w/2) - w/2) / (1/2), target = their mean; (w - target)²
    target = (0.5 + (0.5 * 1.25 - 0.25) / 0.5) / 2
    assert float(loss.detach()) == pytest.approx((0.5 - target) ** 2)
    loss.backward()
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(2 * (0.5 - target)), "as if the target were a number"


def test_steps_are_drawn_from_the_grid_of_their_length() -> None:
    noise = draw_noise(torch.zeros(4000, 1, 1, 1), finest=8, share=0.5, generator=torch.Generator().manual_seed(1))
    assert int(noise.bootstrap.sum()) == 2000
    assert set(noise.d[~noise.bootstrap].tolist()) == {1 / 8}
    lengths = noise.d[noise.bootstrap]
    assert set(lengths.tolist()) == {1.0, 0.5, 0.25}, "the finest has no two halves"
    for length in (1.0, 0.5, 0.25):
        assert 550 < int((lengths == length).sum()) < 790  # 667 expected
    for length in (1.0, 0.5, 0.25, 0.125):
        at = noise.t[noise.d == length]
        assert set(at.tolist()) == {k * length for k in range(round(1 / length))}
    low = float((noise.t[~noise.bootstrap] < 1 / 4).float().mean())
    assert abs(low - 0.5) < 0.06, "of squares of uniform numbers, half are below a quarter"
    assert abs(float(noise.x0.mean())) < 0.06
    assert abs(float(noise.x0.std()) - 1) < 0.05
    alone = draw_noise(torch.zeros(4, 1, 1, 1), finest=1, share=0.5, generator=torch.Generator())
    assert not alone.bootstrap.any()
    assert (alone.d.tolist(), alone.t.tolist()) == ([1.0] * 4, [0.0] * 4)
