"""Checks of synthetic transitions, by hand. If these fail, a broken model of transitions is called a good one."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("diffusers", reason="pip install 'imagination[diffusion]'")

import torch

from worldmodel.synther.checks import correlation_similarity, dynamics_error, marginal_similarity, similarity
from worldmodel.synther.denoiser import TransitionDenoiser
from worldmodel.synther.transitions import Transitions


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
    with pytest.raises(ValueError, match="two columns that vary, there is 1"):
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
