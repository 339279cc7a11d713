"""If these fail, the critic and the groups judge actions by numbers nobody meant.

Expected numbers are worked out by hand or by plain Python loops over lists, written apart from the code under test.
"""

from __future__ import annotations

import math
import random
from statistics import mean, stdev

import pytest
import torch

from imagination.learning.advantages.gae import masked_gae
from imagination.learning.advantages.group import group_relative
from imagination.learning.advantages.turns import broadcast_over_tokens, place_turn_rewards
from imagination.settings.algorithm_parts import GroupRelative, TokenGae

NAN, INF = math.nan, math.inf

# The worked example of formulas.md: two turns of two agent tokens, an observation of two tokens between them.
MASK = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
VALUES = torch.tensor([[0.1, 0.2, 9.0, 9.0, 0.3, 0.4]])
REWARDS = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
RETURNS = torch.tensor([[0.899675, 0.9365, 0.0, 0.0, 0.97, 1.0]])


def t64(x):
    return torch.tensor(x, dtype=torch.float64)


def plain_gae(rewards, values, mask, gamma, lam, bootstrap=0.0):
    """GAE as a sum over the future, on the list of agent tokens: A_i = sum_k (gamma lam)^k delta_{i+k}."""
    agent = [t for t, m in enumerate(mask) if m]
    v = [values[t] for t in agent] + [bootstrap]
    delta = [rewards[t] + gamma * v[i + 1] - v[i] for i, t in enumerate(agent)]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(agent):
        advantages[t] = sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
    return advantages, [a + values[t] if mask[t] else 0.0 for t, a in enumerate(advantages)]


def plain_grpo(returns, groups, valid, eps=1e-4):
    out, counts = [], []
    for r, g, ok in zip(returns, groups, valid, strict=True):
        peers = [r2 for r2, g2, ok2 in zip(returns, groups, valid, strict=True) if g2 == g and ok2]
        counts.append(ok and len(peers) > 1)
        out.append((r - mean(peers)) / (stdev(peers) + eps) if counts[-1] else 0.0)
    return out, counts


# --- masked_gae ---


def test_worked_example():
    advantages, returns = masked_gae(REWARDS, VALUES, MASK, TokenGae(gamma=1.0, lam=0.95))
    torch.testing.assert_close(returns, RETURNS, rtol=0, atol=1e-6)
    torch.testing.assert_close(advantages, RETURNS - VALUES.masked_fill(~MASK, 0.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_gae_equals_the_plain_sum(gamma, lam):
    rng = random.Random(0)
    mask = [[rng.random() < 0.6 for _ in range(12)] for _ in range(5)]
    values = [[rng.gauss(0, 1) for _ in range(12)] for _ in range(5)]
    rewards = [[rng.gauss(0, 1) if m else 0.0 for m in row] for row in mask]
    bootstrap = [0.0, 1.5, -2.0, 0.0, 0.3]
    expected = [
        plain_gae(*row, gamma, lam, b)
        for row, b in zip(zip(rewards, values, mask, strict=True), bootstrap, strict=True)
    ]
    advantages, returns = masked_gae(
        t64(rewards), t64(values), torch.tensor(mask), TokenGae(gamma, lam), bootstrap_value=t64(bootstrap)
    )
    torch.testing.assert_close(advantages, t64([a for a, _ in expected]))
    torch.testing.assert_close(returns, t64([r for _, r in expected]))


def test_terminated_row_does_not_bootstrap_and_truncated_row_does():
    """lam=1, gamma=1/2, one agent token and a trailing observation: the return is r + V_last / 2, or r alone."""
    mask = torch.tensor([[True, False], [True, False]])
    rewards, values = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.3, 7.0], [0.3, 7.0]])
    _, returns = masked_gae(rewards, values, mask, TokenGae(0.5, 1.0), bootstrap_value=torch.tensor([0.0, 4.0]))
    assert returns.tolist() == [[1.0, 0.0], [3.0, 0.0]]
    _, returns = masked_gae(rewards, values, mask, TokenGae(0.5, 1.0))
    assert returns.tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_returns_are_carried_across_observations():
    """A reward of the last turn reaches the first turn as if the observation between had no length."""
    _, with_observation = masked_gae(REWARDS, VALUES, MASK, TokenGae(0.9, 0.95))
    _, without = masked_gae(
        REWARDS[MASK][None], VALUES[MASK][None], torch.ones(1, 4, dtype=torch.bool), TokenGae(0.9, 0.95)
    )
    assert torch.equal(with_observation[MASK], without[0])
    assert with_observation[0, 0] > 0.5


def test_reward_on_trailing_observation():
    """The reward came with the last observation (tokens 6, 7): it must reach every action; left there it is refused."""
    turn_of_token = torch.tensor([[0, 0, -1, -1, 1, 1, -1, -1]])
    mask = turn_of_token >= 0
    values = torch.zeros(1, 8)
    rewards = place_turn_rewards(torch.tensor([[0.0, 1.0]]), turn_of_token)
    assert rewards.tolist() == [[0, 0, 0, 0, 0, 1.0, 0, 0]]
    _, returns = masked_gae(rewards, values, mask, TokenGae(1.0, 1.0))
    assert returns.tolist() == [[1.0, 1.0, 0, 0, 1.0, 1.0, 0, 0]]

    left_on_the_observation = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1.0]])
    with pytest.raises(ValueError, match=r"row 0 has the reward 1\.0 on token 7.*would be lost"):
        masked_gae(left_on_the_observation, values, mask, TokenGae(1.0, 1.0))


def test_row_without_agent_tokens_is_left_out():
    mask = torch.tensor([[True, True], [False, False]])
    rewards, values = torch.tensor([[0.0, 1.0], [NAN, 5.0]]), torch.tensor([[0.1, 0.2], [NAN, INF]])
    advantages, returns = masked_gae(
        rewards, values, mask, TokenGae(1.0, 0.95), bootstrap_value=torch.tensor([0.0, NAN])
    )
    alone, _ = masked_gae(rewards[:1], values[:1], mask[:1], TokenGae(1.0, 0.95))
    assert torch.equal(advantages, torch.cat([alone, torch.zeros(1, 2)]))
    assert returns[1].tolist() == [0.0, 0.0]


def test_advantages_are_constants():
    values = VALUES.clone().requires_grad_()
    advantages, returns = masked_gae(REWARDS, values, MASK, TokenGae(1.0, 0.95))
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": VALUES[:, :5]}, "one shape"),
        ({"mask": MASK.float()}, "bool mask"),
        ({"bootstrap_value": torch.zeros(1, 1)}, r"bootstrap_value must be \[batch\]"),
    ],
)
def test_gae_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        masked_gae(**{"rewards": REWARDS, "values": VALUES, "mask": MASK, "gae": TokenGae(), **change})


@pytest.mark.parametrize("numbers", [{"gamma": 1.5}, {"lam": -0.1}])
def test_discounts_lie_between_0_and_1(numbers):
    with pytest.raises(ValueError, match=r"lam .* \[0, 1\]"):
        TokenGae(**numbers)


# --- place_turn_rewards ---


def test_every_turn_keeps_its_reward():
    """Rows with different numbers of turns; a turn of zero reward and a one-token turn are turns like the others."""
    rewards = place_turn_rewards(
        torch.tensor([[0.5, 0.0, -1.0], [2.0, 0.0, 0.0]]),
        torch.tensor([[-1, 0, 0, -1, 1, -1, 2, 2, -1], [-1, -1, 0, -1, -1, -1, -1, -1, -1]]),
    )
    assert rewards.tolist() == [[0, 0, 0.5, 0, 0, 0, 0, -1.0, 0], [0, 0, 2.0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("rewards", "index", "message"),
    [
        ([[1.0, 1.0]], [[0, 0, -1]], r"turn 1 in row 0 earned 1\.0"),
        ([[NAN, 0.0]], [[0, 1, -1]], "turn 0 in row 0 is nan"),
        ([[1.0]], [[0, 1, -1]], r"must lie in \[-1, 1\)"),
        ([[1.0]], [[0, -2, -1]], r"must lie in \[-1, 1\)"),
        ([[1.0], [1.0]], [[0, 0]], "got"),
        ([[1.0]], [[0.0, 0.0]], "must hold integers"),
    ],
)
def test_place_turn_rewards_refuses(rewards, index, message):
    with pytest.raises(ValueError, match=message):
        place_turn_rewards(torch.tensor(rewards), torch.tensor(index))


# --- group_relative ---


def test_two_episodes_by_hand():
    """Returns 1 and 0: mean 1/2, unbiased deviation sqrt(1/2)."""
    advantages, counts = group_relative(torch.tensor([1.0, 0.0]), torch.tensor([4, 4]), torch.tensor([True, True]))
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([expected, -expected]))
    assert counts.tolist() == [True, True]


def test_interleaved_groups_equal_the_plain_loop():
    rng = random.Random(1)
    groups = [rng.choice([3, 11, -2, 700]) for _ in range(24)]
    returns = [rng.gauss(0, 2) for _ in groups]
    valid = [rng.random() < 0.8 for _ in groups]
    expected, expected_counts = plain_grpo(returns, groups, valid)
    advantages, counts = group_relative(
        torch.tensor(returns, dtype=torch.float64), torch.tensor(groups), torch.tensor(valid)
    )
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    assert counts.tolist() == expected_counts


@pytest.mark.parametrize("junk", [NAN, INF, 1e30, 0.0])
def test_failed_rollout_is_excluded_and_its_group_still_normalises(junk):
    ids = torch.zeros(4, dtype=torch.long)
    advantages, counts = group_relative(
        torch.tensor([1.0, junk, 0.0, 0.5]), ids, torch.tensor([True, False, True, True])
    )
    without, _ = group_relative(torch.tensor([1.0, 0.0, 0.5]), ids[:3], torch.ones(3, dtype=torch.bool))
    assert torch.equal(advantages[[0, 2, 3]], without)
    assert advantages[1] == 0.0
    assert counts.tolist() == [True, False, True, True]


def test_group_of_one_does_not_count():
    """Alone from the start, or because its only peer failed: there is nothing to compare with, so no advantage."""
    advantages, counts = group_relative(
        torch.tensor([5.0, 1.0, 0.0]), torch.tensor([1, 2, 2]), torch.tensor([True, True, False])
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    assert counts.tolist() == [False, False, False]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -1e6 + 0.3])
def test_equal_rewards_give_exactly_zero(reward):
    """Seven times 0.1 has a rounded mean; divided by 1e-4 its rounding error would look like an advantage."""
    advantages, counts = group_relative(
        torch.full((7,), reward), torch.zeros(7, dtype=torch.long), torch.ones(7, dtype=torch.bool)
    )
    assert advantages.tolist() == [0.0] * 7
    assert counts.all()


def test_without_std_the_advantage_stays_in_units_of_reward():
    advantages, _ = group_relative(
        torch.tensor([3.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool),
        GroupRelative(normalise_std=False),
    )  # fmt: skip
    assert advantages.tolist() == [2.0, -1.0, -1.0]


def test_group_with_stragglers():
    """Episodes of 2, 5 and 1 agent tokens, and a fourth that never came back: length changes no episode's advantage,
    every agent token of an episode has it, and no other token does."""
    mask = torch.tensor([[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    advantages, counts = group_relative(
        torch.tensor([1.0, 0.0, 0.5, NAN]), torch.zeros(4, dtype=torch.long), torch.tensor([True, True, True, False])
    )
    expected = 0.5 / (0.5 + 1e-4)  # mean 1/2, deviation 1/2
    tokens = broadcast_over_tokens(advantages, mask & counts[:, None])
    assert tokens.tolist() == [
        pytest.approx([0, expected, expected, 0, 0, 0]),
        pytest.approx([0, -expected, -expected, -expected, -expected, -expected]),
        [0.0] * 6,
        [0.0] * 6,
    ]


def test_broadcast_ignores_junk_of_rows_without_tokens():
    got = broadcast_over_tokens(torch.tensor([NAN, 2.0]), torch.tensor([[False, False], [False, True]]))
    assert got.tolist() == [[0.0, 0.0], [0.0, 2.0]]


def test_no_episodes_at_all():
    advantages, counts = group_relative(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).bool())
    assert advantages.shape == counts.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": torch.ones(2).bool()}, "one shape"),
        ({"valid": torch.ones(3)}, "valid .*bool"),
        ({"group_ids": torch.zeros(3)}, "group_ids must hold integers"),
        ({"returns": torch.tensor([0.0, NAN, 1.0])}, "row 1 .* nan"),
    ],
)
def test_group_relative_refuses(change, message):
    good = {"returns": torch.zeros(3), "group_ids": torch.zeros(3).long(), "valid": torch.ones(3).bool()}
    with pytest.raises(ValueError, match=message):
        group_relative(**{**good, **change})
    with pytest.raises(ValueError, match="std_eps must be positive"):
        GroupRelative(std_eps=0.0)


def test_broadcast_refuses():
    with pytest.raises(ValueError, match="per_row must be"):
        broadcast_over_tokens(torch.zeros(3), MASK)
    with pytest.raises(ValueError, match="bool mask"):
        broadcast_over_tokens(torch.zeros(1), MASK.float())
