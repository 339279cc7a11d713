"""If these fail, something that is no difference between actions becomes an advantage: rounding, sources, turns."""

from __future__ import annotations

import random

import pytest
import torch

from imagination.learning.advantages.group import differ, gigpo, group_relative, informative
from imagination.learning.advantages.reinforce import whiten, whiten_by
from imagination.learning.algorithms import ALGORITHMS, Episodes
from imagination.settings.algorithm_parts import GiGpo

# Sums that are 1, but not in fp32: 1.00000012 and 1.0.
TENTHS = [[0.1] * 10, [0.4, 0.3, 0.2, 0.1, *[0.0] * 6]]


def episodes(rewards, *, groups=None, sources=None, values=None, anchors=None):
    """One token a turn, as many turns as rewards; rows may differ in length."""
    turns = max(map(len, rewards))
    index = torch.tensor([[t if t < len(row) else -1 for t in range(turns)] for row in rewards])
    return Episodes(
        turn_rewards=torch.tensor([[*row, *[0.0] * (turns - len(row))] for row in rewards]),
        action_turn_index=index,
        group_ids=torch.tensor(groups or [0] * len(rewards)),
        valid=torch.ones(len(rewards), dtype=torch.bool),
        anchors=torch.where(index >= 0, torch.arange(turns) if anchors is None else torch.tensor(anchors), -1),
        values=torch.zeros(index.shape) if values is None else torch.tensor(values),
        bootstrap_value=torch.zeros(len(rewards)),
        sources=None if sources is None else torch.tensor(sources),
    )


# --- rounding ---


def test_the_sums_do_differ_in_fp32():
    ten, four = torch.tensor(TENTHS).sum(1)
    assert ten != four


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "dr_grpo", "reinforce_pp_baseline", "gspo", "cispo", "epo"])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
def test_returns_that_differ_by_rounding_are_equal(name, scale):
    rewards = [[scale * r for r in row] for row in [*TENTHS, *TENTHS]]
    limit = {"max_tokens": 10} if "max_tokens" in ALGORITHMS[name].settings else {}
    judged = ALGORITHMS[name].with_settings(**limit).judge(episodes(rewards, groups=[0, 0, 1, 1]))
    assert (judged.advantages == 0).all()
    assert not (ALGORITHMS[name].sampling.drop_equal_groups and judged.trained.any())


def test_a_small_difference_is_still_one():
    """A thousandth of the return, with ten terms' rounding in it."""
    returns = torch.tensor([1.00000012, 1.0, 1.001])
    one_group = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    assert informative(returns, *one_group).all()
    low, also_low, high = group_relative(returns, *one_group)[0].tolist()
    assert low == also_low < 0 < high
    assert differ([1.00000012, 1.001])
    assert not differ([1.00000012, 1.0])
    assert not differ([])


def test_whitening_has_no_say_where_there_is_only_rounding():
    everywhere = torch.ones(4, dtype=torch.bool)
    assert (whiten(torch.tensor([1.0, 1.0000001, 1.0, 0.9999999]), everywhere) == 0).all()
    residuals = torch.tensor([1e-8, -1e-8, 2e-8, 0.0])  # returns of 1 less a critic that is right
    assert (whiten(residuals, everywhere, size=1.0) == 0).all()
    assert whiten(residuals, everywhere).abs().max() > 0.5  # by themselves they are numbers like any others


@pytest.mark.parametrize("name", ["ppo", "turn_ppo", "bilevel_ppo", "st_ppo"])
def test_a_critic_that_is_right_leaves_nothing_to_whiten(name):
    settings = {k: 1.0 for k in ("gamma", "lam", "turn_gamma", "turn_lam") if k in ALGORITHMS[name].settings}
    values = torch.tensor(TENTHS).flip(1).cumsum(1).flip(1).tolist()
    judged = ALGORITHMS[name].with_settings(**settings).judge(episodes(TENTHS, values=values))
    assert (judged.advantages == 0).all()


# --- sources ---


def test_each_source_is_whitened_by_itself():
    gains, ones = torch.tensor([[1.0, 3.0], [10.0, 14.0], [5.0, 5.0]]), torch.ones(3, 2, dtype=torch.bool)
    half = 2**-0.5
    found = whiten_by(gains, ones, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(found, torch.tensor([[-half, half], [-half, half], [0.0, 0.0]]))
    assert torch.equal(whiten_by(gains, ones, None), whiten(gains, ones))


@pytest.mark.parametrize("name", ["ppo", "turn_ppo", "bilevel_ppo", "st_ppo", "reinforce_pp", "reinforce_pp_baseline"])
def test_what_dreams_pay_more_is_no_advantage_of_dreamed_actions(name):
    """Dreams pay 1 more than the real world for the same two behaviours: by what they earn there, nothing differs."""
    rewards, groups = [[0.0], [1.0], [1.0], [2.0]], [0, 0, 1, 1]
    judged = ALGORITHMS[name].judge(episodes(rewards, groups=groups, sources=[0, 0, 1, 1]))
    assert judged.advantages[:2].tolist() == judged.advantages[2:].tolist()
    assert float(judged.advantages[1]) > 0 > float(judged.advantages[0])


# --- turns ---


def lengthened(seed, gamma_of_rewards=None):
    """A group of equal returns and unequal numbers of turns; the same observations come again and again."""
    rng = random.Random(seed)
    rows = [[*[0.0] * rng.randrange(0, 9), 1.0] for _ in range(4)]
    turns = max(map(len, rows))
    return rows, [[rng.randrange(3) if t else 0 for t in range(turns)] for _ in rows]


@pytest.mark.parametrize("name", ["gigpo", "turn_ppo", "bilevel_ppo"])
def test_more_turns_for_the_same_return_are_no_gain(name):
    """The sum of an episode's advantages is what its turns gain together: the longest must not have the highest."""
    for seed in range(40):
        rows, anchors = lengthened(seed)
        lengths = [len(row) for row in rows]
        if len(set(lengths)) == 1:
            continue
        judged = ALGORITHMS[name].judge(episodes(rows, anchors=anchors))
        sums = judged.advantages.sum(1).tolist()
        longest, shortest = lengths.index(max(lengths)), lengths.index(min(lengths))
        assert sums[longest] <= sums[shortest] + 1e-5, (seed, lengths, sums)


def test_undiscounted_step_advantages_of_equal_returns_are_zero():
    """Without a discount nothing tells the episodes apart, however often a place is visited."""
    rows, anchors = lengthened(1)
    e = episodes(rows, anchors=anchors)
    found, _ = gigpo(e.turn_rewards, e.action_turn_index, e.anchors, e.group_ids, e.valid, GiGpo(gamma=1.0))
    assert (found == 0).all()
