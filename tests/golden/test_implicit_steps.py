"""If these fail, iStar's reward model learns another order of episodes, or turns are judged by another's reward.

Expected numbers come from plain loops over lists.
"""

from __future__ import annotations

import math
import random
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.advantages.group import istar, preferences
from imagination.learning.advantages.shaping import implicit_step_rewards
from imagination.learning.losses.auxiliary import trajectory_preference_loss
from imagination.settings.algorithm_parts import ImplicitSteps

TURNS = 4


def t64(x):
    return torch.tensor(x, dtype=torch.float64)


def episodes(seed, n=12):
    """Turn of each token, log-probs under both models, paid, group and validity of each episode, as lists."""
    rng = random.Random(seed)
    index = [[-1, *sorted(rng.choices(range(-1, TURNS), k=9))] for _ in range(n)]
    index = [[-1, *rng.sample(row[1:], 9)] if rng.random() < 0.3 else row for row in index]
    new, old = ([[-rng.random() for _ in row] for row in index] for _ in range(2))
    paid = [[rng.choice([0.0, 0.5]) if k in row else 0.0 for k in range(TURNS)] for row in index]
    return index, new, old, paid, [rng.choice([5, -3]) for _ in index], [rng.random() < 0.8 for _ in index]


def plain_rewards(index, new, old, beta):
    """None for a turn without a token."""
    return [
        [
            beta * sum(a - b for a, b, turn in zip(x, y, row, strict=True) if turn == k) if k in row else None
            for k in range(TURNS)
        ]
        for row, x, y in zip(index, new, old, strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_turn_is_worth_the_log_ratios_of_its_tokens(seed):
    index, new, old, *_ = episodes(seed)
    found = implicit_step_rewards(t64(new), t64(old), torch.tensor(index), TURNS, 0.05).tolist()
    for got, expected in zip(found, plain_rewards(index, new, old, 0.05), strict=True):
        assert [math.isnan(x) for x in got] == [x is None for x in expected]
        assert [x for x in got if not math.isnan(x)] == pytest.approx([x for x in expected if x is not None])


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_the_mean_over_all_pairs_of_a_group_that_differ(seed):
    index, new, old, paid, groups, _ = episodes(seed)
    returns = [sum(row) for row in paid]
    leaf = t64(new).requires_grad_()
    scores = implicit_step_rewards(leaf, t64(old), torch.tensor(index), TURNS, 0.7).nansum(1)
    better, worse = preferences(t64(returns), torch.tensor(groups))
    terms = trajectory_preference_loss(scores, better, worse)
    plain = [sum(x or 0.0 for x in row) for row in plain_rewards(index, new, old, 0.7)]
    n = range(len(plain))
    pairs = [(i, j) for i in n for j in n if groups[i] == groups[j] and returns[i] > returns[j]]
    assert list(zip(better.tolist(), worse.tolist(), strict=True)) == pairs
    assert float(terms.loss.detach()) == pytest.approx(
        mean(math.log1p(math.exp(plain[j] - plain[i])) for i, j in pairs)
    )
    assert float(terms.means()["preferred"]) == pytest.approx(mean(plain[i] > plain[j] for i, j in pairs))
    terms.loss.backward()
    assert (leaf.grad[torch.tensor(index) < 0] == 0).all()
    assert leaf.grad.abs().sum() > 0
    assert preferences(t64([0.1 * 3, 0.3]), torch.tensor([0, 0]))[0].numel() == 0, "they differ by rounding"


@pytest.mark.parametrize("seed", range(6))
def test_advantages_add_the_step_among_all_steps_of_the_group(seed):
    index, new, old, paid, groups, valid = episodes(seed)
    steps = plain_rewards(index, new, old, 0.05)
    steps[3] = [None] * TURNS  # an expert, whom no model judges
    part = ImplicitSteps(step_weight=0.5, std_eps=0.01)
    as_tensor = t64([[math.nan if x is None else x for x in row] for row in steps])
    found, counts = istar(t64(paid), torch.tensor(index), as_tensor, torch.tensor(groups), torch.tensor(valid), part)
    for r, row in enumerate(index):
        peers = [i for i in range(len(index)) if groups[i] == groups[r] and valid[i]]
        counted = valid[r] and len(peers) > 1
        assert bool(counts[r]) is counted
        if not counted:
            assert found[r].tolist() == [0.0] * len(row)
            continue
        returns = [sum(paid[i]) for i in peers]
        episode = (sum(paid[r]) - mean(returns)) / (stdev(returns) + 0.01)
        of_group = [x for i in peers for x in steps[i] if x is not None]
        for t, turn in enumerate(row):
            own = steps[r][turn] if turn >= 0 else None
            step = 0.0 if own is None else (own - mean(of_group)) / (stdev(of_group) + 0.01)
            expected = episode + 0.5 * step if turn >= 0 else 0.0
            assert float(found[r, t]) == pytest.approx(expected)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([math.nan, math.inf, -math.inf, 1e300]), st.integers(0, 3))
def test_what_no_turn_says_changes_nothing(seed, junk, more):
    """Junk off the turns, in failed episodes and behind the last token: not in rewards, advantages or gradient."""
    index, new, old, paid, groups, valid = episodes(seed)
    at, ok = torch.tensor(index), torch.tensor(valid)
    groups, part = torch.tensor(groups), ImplicitSteps()

    def judged(new, old, at, paid, hide):
        leaf = new.clone().requires_grad_()
        steps = implicit_step_rewards(leaf, old, at, TURNS, 0.05)
        (slope,) = torch.autograd.grad(steps[ok].nansum(1).square().sum(), leaf)
        steps = steps.detach().masked_fill(~ok[:, None], hide)
        return istar(paid.masked_fill(~ok[:, None], hide), at, steps, groups, ok, part)[0], slope

    clean, slope = judged(t64(new), t64(old), at, t64(paid), 0.0)
    wide = torch.nn.functional.pad
    dirty = judged(
        wide(t64(new).masked_fill(at < 0, junk), (0, more), value=junk),
        wide(t64(old).masked_fill(at < 0, junk), (0, more), value=junk),
        wide(at, (0, more), value=-1), t64(paid), junk,
    )  # fmt: skip
    width = at.shape[1]
    assert torch.equal(dirty[0][:, :width], clean)
    assert torch.equal(dirty[1][:, :width], slope)
    assert (dirty[1][:, :width][at < 0] == 0).all()
    assert (dirty[0][~ok] == 0).all()
    assert (dirty[0][:, width:] == 0).all()
