"""If these fail, episodes are compared with others than their papers say.

Expected numbers are worked out by hand or by plain Python loops over lists, written apart from the code under test.
"""

from __future__ import annotations

import math
import random
from statistics import mean, stdev

import pytest
import torch

from imagination.learning.advantages.group import best_of_groups, gigpo, informative, leave_one_out, step_returns
from imagination.learning.advantages.reinforce import reinforce, reinforce_pp_baseline, returns_to_go, whiten
from imagination.settings.algorithm_parts import BestOfGroups, GiGpo, ReturnsToGo

NAN, INF = math.nan, math.inf


def t64(x):
    return torch.tensor(x, dtype=torch.float64)


def random_groups(seed, n=24, values=None):
    rng = random.Random(seed)
    groups = [rng.choice([3, 11, -2, 700]) for _ in range(n)]
    returns = [rng.choice(values) if values else rng.gauss(0, 2) for _ in groups]
    return returns, groups, [rng.random() < 0.8 for _ in groups]


def peers_of(i, returns, groups, valid):
    return [r for r, g, ok in zip(returns, groups, valid, strict=True) if g == groups[i] and ok]


def tensors(returns, groups, valid):
    return t64(returns), torch.tensor(groups), torch.tensor(valid)


def plain_whiten(rows, mask):
    """(x - mean) / (unbiased deviation + 1e-8) of all chosen entries of nested lists."""
    flat = [x for row, chosen in zip(rows, mask, strict=True) for x, m in zip(row, chosen, strict=True) if m]
    centre, spread = mean(flat), stdev(flat) if len(flat) > 1 else 0.0
    return [
        [(x - centre) / (spread + 1e-8) if m else 0.0 for x, m in zip(row, chosen, strict=True)]
        for row, chosen in zip(rows, mask, strict=True)
    ]


# --- RLOO ---


def test_leave_one_out_is_the_mean_of_the_others():
    drawn = random_groups(0)
    advantages, counts = leave_one_out(*tensors(*drawn))
    returns, groups, valid = drawn
    for i, r in enumerate(returns):
        others = [x for j, x in enumerate(returns) if j != i and groups[j] == groups[i] and valid[j]]
        assert bool(counts[i]) is (valid[i] and bool(others))
        assert float(advantages[i]) == pytest.approx(r - mean(others) if counts[i] else 0.0)


def test_leave_one_out_by_hand():
    ones = torch.ones(3, dtype=torch.bool)
    assert leave_one_out(torch.tensor([3.0, 0.0, 0.0]), torch.zeros(3).long(), ones)[0].tolist() == [3.0, -1.5, -1.5]
    alone, counts = leave_one_out(torch.tensor([3.0]), torch.tensor([0]), ones[:1])
    assert (alone.tolist(), counts.tolist()) == ([0.0], [False])


# --- dynamic sampling ---


def test_informative_groups_equal_the_plain_loop():
    drawn = random_groups(1, values=[0.0, 1.0], n=9)
    found = informative(*tensors(*drawn))
    for i in range(9):
        assert bool(found[i]) is (drawn[2][i] and len(set(peers_of(i, *drawn))) > 1)
    assert 0 < int(found.sum()) < 9


def test_a_failed_episode_makes_no_group_informative():
    returns, ids = torch.tensor([1.0, NAN, 1.0]), torch.zeros(3).long()
    assert not informative(returns, ids, torch.tensor([True, False, True])).any()


# --- REINFORCE++ ---


def test_returns_are_carried_across_observations():
    """The second turn is paid: the first sees it through the observation, which costs no discount."""
    mask = torch.tensor([[True, True, False, False, True, True]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    assert returns_to_go(rewards, mask, 0.5).tolist() == [[0.125, 0.25, 0.0, 0.0, 0.5, 1.0]]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_equals_the_plain_loop(gamma):
    rng = random.Random(2)
    mask = [[rng.random() < 0.6 for _ in range(9)] for _ in range(5)]
    rewards = [[rng.gauss(0, 1) if m else 0.0 for m in row] for row in mask]
    valid = [True, True, False, True, True]
    used = [[m and ok for m in row] for row, ok in zip(mask, valid, strict=True)]
    expected = []
    for earned, row in zip(rewards, used, strict=True):
        places = [t for t, m in enumerate(row) if m]
        to_go = [0.0] * 9
        for i, t in enumerate(places):
            to_go[t] = sum(gamma**k * earned[u] for k, u in enumerate(places[i:]))
        expected.append(to_go)
    read = t64(rewards), torch.tensor(mask), torch.tensor(valid)
    torch.testing.assert_close(reinforce(*read, ReturnsToGo(gamma, whiten=True)), t64(plain_whiten(expected, used)))
    torch.testing.assert_close(reinforce(*read, ReturnsToGo(gamma)), t64(expected))


def test_reinforce_pp_baseline_equals_the_plain_loop():
    rng = random.Random(3)
    returns, groups, valid = random_groups(3, n=10)
    mask = [[rng.random() < 0.7 for _ in range(6)] for _ in range(10)]
    rows, used = [], []
    for i in range(10):
        peers = peers_of(i, returns, groups, valid)
        counted = valid[i] and len(peers) > 1
        rows.append([returns[i] - mean(peers) if counted else 0.0] * 6)
        used.append([m and counted for m in mask[i]])
    advantages, counts = reinforce_pp_baseline(*tensors(returns, groups, valid), torch.tensor(mask))
    torch.testing.assert_close(advantages, t64(plain_whiten(rows, used)))
    assert counts.tolist() == [valid[i] and len(peers_of(i, returns, groups, valid)) > 1 for i in range(10)]


def test_whitened_constants_are_zero():
    """Seven times 0.1 in fp32 has a rounded mean; divided by 1e-8 its rounding would look like an advantage."""
    assert (whiten(torch.full((7,), 0.1), torch.ones(7).bool()) == 0).all()
    assert whiten(torch.tensor([5.0, NAN]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([NAN]), torch.tensor([False])).tolist() == [0.0]


def test_reinforce_pp_refuses():
    mask = torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"be bool \[2\]"):
        reinforce(torch.zeros(2, 3), mask, torch.ones(3).bool(), ReturnsToGo())
    with pytest.raises(ValueError, match="bool mask"):
        whiten(torch.zeros(2), torch.zeros(2))


# --- GiGPO ---


def plain_gigpo(rewards, index, anchors, groups, valid, gamma, weight, normalise, eps=1e-4):
    n, out = len(rewards), [[0.0] * len(index[0]) for _ in rewards]
    totals = [sum(row) for row in rewards]
    acted = [{k for k in row if k >= 0} for row in index]

    def compare(x, among):
        if len(among) < 2:
            return 0.0
        return (x - mean(among)) / (stdev(among) + eps if normalise else 1.0)

    def discounted(i, k):
        return sum(gamma**d * r for d, r in enumerate(rewards[i][k:]))

    for i in range(n):
        episode_peers = [totals[j] for j in range(n) if groups[j] == groups[i] and valid[j]]
        if not valid[i] or len(episode_peers) < 2:
            continue
        for t, k in enumerate(index[i]):
            if k >= 0:
                step_peers = [
                    discounted(j, u)
                    for j in range(n)
                    if groups[j] == groups[i] and valid[j]
                    for u in sorted(acted[j])
                    if anchors[j][u] == anchors[i][k]
                ]
                out[i][t] = compare(totals[i], episode_peers) + weight * compare(discounted(i, k), step_peers)
    return out


@pytest.mark.parametrize(("gamma", "weight", "normalise"), [(0.95, 1.0, True), (0.5, 0.3, True), (1.0, 1.0, False)])
def test_gigpo_equals_the_plain_loop(gamma, weight, normalise):
    rng = random.Random(4)
    n, turns = 14, 4
    rewards, index, anchors = [], [], []
    for _ in range(n):
        played = rng.randrange(1, turns + 1)
        index.append([k for k in range(played) for _ in range(2)] + [-1] * (2 * (turns - played)))
        rewards.append([rng.choice([0.0, 0.5, 1.0]) if k < played else 0.0 for k in range(turns)])
        anchors.append([rng.randrange(3) if k < played else -1 for k in range(turns)])
    groups, valid = [rng.choice([5, 9, 2]) for _ in range(n)], [rng.random() < 0.85 for _ in range(n)]
    advantages, counts = gigpo(
        t64(rewards), torch.tensor(index), torch.tensor(anchors), torch.tensor(groups), torch.tensor(valid),
        GiGpo(gamma, weight, normalise),
    )  # fmt: skip
    expected = plain_gigpo(rewards, index, anchors, groups, valid, gamma, weight, normalise)
    torch.testing.assert_close(advantages, t64(expected))
    assert (advantages[~counts] == 0).all()


def test_gigpo_statistics_are_over_episodes():
    """Returns 1, 0, 0 of 1, 5 and 5 turns. Over episodes the mean is 1/3; over step rows it would be 1/11."""
    index = torch.tensor([[0, -1, -1, -1, -1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]])
    rewards = torch.zeros(3, 5).double()
    rewards[0, 0] = 1.0
    anchors = torch.arange(15).view(3, 5)  # no observation twice: only episodes are compared
    one_group = torch.zeros(3).long(), torch.ones(3).bool()
    advantages, _ = gigpo(rewards, index, anchors, *one_group, GiGpo(normalise_std=False))
    assert advantages[0, 0].item() == pytest.approx(2 / 3)
    assert advantages[1].tolist() == pytest.approx([-1 / 3] * 5)


def test_an_anchor_seen_once_says_nothing_about_the_step():
    """Where a lone step's own return stood in for a comparison, a paid step would gain it for nothing."""
    index, anchors = torch.tensor([[0, -1, 1], [0, -1, -1]]), torch.tensor([[5, 6], [5, -1]])
    rewards = t64([[0.0, 0.0], [1.0, 0.0]])
    ids, valid = torch.tensor([0, 0]), torch.tensor([True, True])
    advantages, _ = gigpo(rewards, index, anchors, ids, valid)
    one = 0.5 / (math.sqrt(0.5) + 1e-4)
    torch.testing.assert_close(advantages, t64([[-2 * one, 0.0, -one], [2 * one, 0.0, 0.0]]))


def test_same_observation_in_another_group_is_another_anchor():
    index, anchors = torch.zeros(4, 1).long(), torch.zeros(4, 1).long()
    rewards = t64([[1.0], [1.0], [0.0], [0.0]])
    advantages, _ = gigpo(rewards, index, anchors, torch.tensor([0, 0, 1, 1]), torch.ones(4).bool())
    assert (advantages == 0).all()


def test_step_returns():
    assert step_returns(torch.tensor([[0.0, 2.0, 1.0]]), 0.5).tolist() == [[1.25, 2.5, 1.0]]
    with pytest.raises(ValueError, match="gamma must lie"):
        step_returns(torch.zeros(1, 1), 1.5)
    with pytest.raises(ValueError, match="needs anchors"):
        gigpo(torch.zeros(1, 2), torch.tensor([[0]]), torch.zeros(1, 1).long(), torch.zeros(1).long(),
              torch.ones(1).bool())  # fmt: skip


# --- filtered behaviour cloning ---


@pytest.mark.parametrize(("fraction", "least"), [(0.25, 0.0), (0.5, -10.0), (1.0, 0.5), (0.01, -10.0)])
def test_best_of_groups_equals_the_plain_loop(fraction, least):
    returns, groups, valid = random_groups(5, values=[0.0, 0.25, 0.5, 0.75, 1.0])
    kept = best_of_groups(*tensors(returns, groups, valid), BestOfGroups(fraction, least))
    for i, r in enumerate(returns):
        peers = sorted(peers_of(i, returns, groups, valid), reverse=True)
        expected = valid[i] and r >= peers[math.ceil(fraction * len(peers)) - 1] and r >= least
        assert bool(kept[i]) is expected
    assert kept.any()


@pytest.mark.parametrize(("fraction", "of", "kept"), [(0.07, 100, 7), (0.28, 25, 7), (1e-9, 3, 1)])
def test_rounding_keeps_no_episode_more(fraction, of, kept):
    one_group = torch.zeros(of).long(), torch.ones(of).bool()
    assert best_of_groups(torch.arange(float(of)) + 1, *one_group, BestOfGroups(fraction, 0.0)).sum() == kept


def test_a_group_of_failures_is_not_cloned():
    kept = best_of_groups(torch.zeros(4), torch.zeros(4).long(), torch.ones(4).bool(), BestOfGroups(0.5, 0.5))
    assert not kept.any()
    with pytest.raises(ValueError, match="fraction must lie"):
        BestOfGroups(keep_fraction=0.0)
