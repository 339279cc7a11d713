"""If these fail, rewards pay for something else than was declared.

Expected numbers are worked out by hand or by plain Python loops over lists, written apart from the code under test.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from imagination.learning.advantages.shaping import (
    ProgressEstimator,
    attribution_error,
    overlong_penalty,
    progress_rewards,
    tiered_rewards,
    with_kl_penalty,
    with_process_rewards,
)
from imagination.settings.algorithm_parts import DynamicSampling, Kl

NAN, INF = math.nan, math.inf


def t64(x):
    return torch.tensor(x, dtype=torch.float64)


# --- tiers, process rewards, potentials ---


def test_tiers_equal_the_plain_loop():
    rng = random.Random(0)
    scores = [rng.random() for _ in range(30)] + [0.25, 0.5, 1.0, 0.0]
    tiers = [(0.25, 0.1), (0.5, 0.4), (1.0, 1.0)]
    expected = [max([r for t, r in tiers if s >= t], default=0.0) for s in scores]
    assert tiered_rewards(t64(scores), tiers).tolist() == expected


@pytest.mark.parametrize("tiers", [[], [(0.5, 1.0), (0.4, 2.0)], [(0.4, 1.0), (0.5, 1.0)]])
def test_tiers_must_rise(tiers):
    with pytest.raises(ValueError, match="both rise"):
        tiered_rewards(torch.zeros(1), tiers)
    with pytest.raises(ValueError, match="not finite"):
        tiered_rewards(torch.tensor([NAN]), [(0.5, 1.0)])


def test_process_rewards_by_hand():
    exists = torch.tensor([[True, True, False]])
    got = with_process_rewards(t64([[0.0, 1.0, 9.0]]), t64([[0.5, -1.0, NAN]]), exists, 0.1)
    assert got.tolist() == [[pytest.approx(0.05), pytest.approx(0.9), 0.0]]
    with pytest.raises(ValueError, match=r"turn 1 in row 0 .*process reward"):
        with_process_rewards(t64([[0.0, 1.0]]), t64([[0.5, NAN]]), exists[:, :2], 0.1)


# --- lengths ---


def test_overlong_equals_the_plain_formula():
    limit, buffer, penalty = 100, 20, 0.5
    settings = DynamicSampling(max_tokens=limit, overlong_buffer=buffer, overlong_penalty=penalty)
    lengths = [*range(0, 101, 5), 140]  # the last one of an expert, whom nobody cut
    expected = [max(min(-(n - (limit - buffer)) / buffer * penalty, 0.0), -penalty) for n in lengths]
    assert overlong_penalty(torch.tensor(lengths), settings).tolist() == pytest.approx(expected)
    assert expected[-2] == expected[-1] == -0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overlong_buffer": -1}, "buffer .*at least 0"),
        ({"overlong_buffer": 101}, "at most max_tokens = 100"),
        ({"overlong_penalty": 0.0}, "penalty positive"),
        ({"max_tokens": None}, "needs max_tokens"),
    ],
)
def test_overlong_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([101]), DynamicSampling(**{"max_tokens": 100, "overlong_buffer": 20, **change}))


# --- KL as a reward ---


def test_kl_is_taken_from_agent_tokens_only():
    mask = torch.tensor([[True, False, True]])
    got = with_kl_penalty(t64([[0.0, 0.0, 1.0]]), t64([[0.5, NAN, 0.25]]), mask, Kl(kl_coef=0.1))
    assert got.tolist() == [[pytest.approx(-0.05), 0.0, pytest.approx(0.975)]]
    with pytest.raises(ValueError, match="at least 0"):
        Kl(kl_coef=-1.0)


# --- stepwise progress attribution ---


def test_attribution_error_by_hand():
    """Sums 0.5 and 3 against 1 and 1, the third episode failed: (0.25 + 4) / 2, slope 2 (sum - R) / 2 on every turn."""
    contributions = t64([[0.25, 0.25], [1.0, 2.0], [NAN, 5.0]]).requires_grad_()
    error = attribution_error(contributions, t64([1.0, 1.0, NAN]), torch.tensor([True, True, False]), denominator=2)
    error.backward()
    assert float(error.detach()) == pytest.approx(2.125)
    assert contributions.grad.tolist() == [[-0.5, -0.5], [2.0, 2.0], [0.0, 0.0]]


def test_progress_rewards_are_the_predictions():
    """Not the outcome less the others' predictions, and not scaled by how many turns were left."""
    contributions = t64([[0.2, 0.7, 0.1, NAN]])
    grounded, exists = torch.tensor([[True, False, True, True]]), torch.tensor([[True, True, True, False]])
    got = progress_rewards(contributions, grounded, exists)
    assert got.tolist() == [[pytest.approx(0.7), pytest.approx(0.7), pytest.approx(0.6), 0.0]]
    shifted = progress_rewards(contributions.roll(1, 1), grounded.roll(1, 1), exists.roll(1, 1))
    torch.testing.assert_close(shifted, got.roll(1, 1))  # the same turn one later is worth the same
    assert progress_rewards(contributions, grounded, exists, 0.0)[0, 0].item() == pytest.approx(0.2)


def test_the_estimator_finds_the_turns_that_matter():
    """Each turn is of one of four kinds with a worth of its own: only sums are told, yet turns are told apart."""
    rng = torch.Generator().manual_seed(0)
    kinds = torch.randint(4, (64, 5), generator=rng)
    exists = torch.arange(5) < torch.randint(1, 6, (64, 1), generator=rng)
    features = torch.nn.functional.one_hot(kinds, 4).float()
    features[~exists] = NAN
    worth = torch.tensor([1.0, 0.5, 0.0, -0.25])
    rewards = (worth[kinds] * exists).sum(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        estimator = ProgressEstimator(4, hidden=16)
    optimizer = torch.optim.Adam(estimator.parameters(), lr=0.02)
    valid = torch.ones(64).bool()
    for _ in range(300):
        optimizer.zero_grad()
        attribution_error(estimator(features, exists), rewards, valid, denominator=64).backward()
        optimizer.step()
    found = estimator(torch.eye(4)[None], torch.ones(1, 4).bool())[0]
    torch.testing.assert_close(found.detach(), worth, atol=0.05, rtol=0)
    assert (estimator(features, exists)[~exists] == 0).all()


def test_progress_refuses():
    turns, episodes, flags = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match="attribution_error needs"):
        attribution_error(turns, torch.zeros(3), torch.ones(2).bool(), denominator=1)
    with pytest.raises(ValueError, match=r"valid .*bool"):
        attribution_error(turns, episodes, episodes, denominator=1)
    with pytest.raises(ValueError, match="valid episodes"):
        attribution_error(turns, episodes, torch.ones(2).bool(), denominator=0)
    with pytest.raises(ValueError, match="progress_rewards needs"):
        progress_rewards(turns, flags[:, :2], flags)
    with pytest.raises(ValueError, match=r"exists must be bool"):
        progress_rewards(turns, turns, flags)
