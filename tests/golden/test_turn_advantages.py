"""If these fail, a critic of turns judges other turns than those that were played.

Expected numbers are worked out by hand or by plain Python loops over lists, written apart from the code under test.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from imagination.learning.advantages.gae import bilevel_gae, masked_gae, turn_gae
from imagination.learning.advantages.turns import broadcast_over_turns, turn_bounds
from imagination.settings.algorithm_parts import BilevelGae, TokenGae, TurnGae

NAN = math.nan
INDEX = torch.tensor([[-1, 0, 0, -1, -1, 1, -1, 2, 2, 2, -1]])


def t64(x):
    return torch.tensor(x, dtype=torch.float64)


def plain_turns(row):
    """Positions of each turn's tokens: {turn: [positions]}, in order."""
    found = {}
    for t, turn in enumerate(row):
        if turn >= 0:
            found.setdefault(turn, []).append(t)
    return dict(sorted(found.items()))


def plain_turn_gae(rewards, values, row, gamma, lam, bootstrap=0.0):
    """{turn: (advantage, return)}: sums over the future, on the list of turns that have tokens."""
    turns = plain_turns(row)
    v = [values[tokens[0]] for tokens in turns.values()] + [bootstrap]
    delta = [rewards[k] + gamma * v[i + 1] - v[i] for i, k in enumerate(turns)]
    found = {}
    for i, k in enumerate(turns):
        advantage = sum((gamma * lam) ** n * d for n, d in enumerate(delta[i:]))
        found[k] = (advantage, advantage + v[i])
    return found


def plain_bilevel(rewards, values, row, turn_gamma, turn_lam, token_gamma, token_lam, bootstrap):
    out = [0.0] * len(row)
    for k, (_, target) in plain_turn_gae(rewards, values, row, turn_gamma, turn_lam, bootstrap).items():
        tokens = plain_turns(row)[k]
        v = [values[t] for t in tokens] + [0.0]
        earned = [0.0] * (len(tokens) - 1) + [target]
        delta = [earned[i] + token_gamma * v[i + 1] - v[i] for i in range(len(tokens))]
        for i, t in enumerate(tokens):
            out[t] = sum((token_gamma * token_lam) ** n * d for n, d in enumerate(delta[i:]))
    return out


def episodes(seed, rows=5, turns=4):
    """Turns of 1 to 3 tokens with 0 to 2 other tokens between; some turns have no token; rewards often zero."""
    rng = random.Random(seed)
    index, rewards = [], []
    for _ in range(rows):
        row, earned = [], []
        for k in range(turns):
            if rng.random() < 0.2:
                earned.append(0.0)
                continue
            row += [-1] * rng.randrange(3) + [k] * rng.randrange(1, 4)
            earned.append(rng.choice([0.0, 0.0, rng.gauss(0, 1)]))
        index.append(row)
        rewards.append(earned)
    time = max(map(len, index)) + 1
    index = [row + [-1] * (time - len(row)) for row in index]
    values = [[rng.gauss(0, 1) for _ in row] for row in index]
    return rewards, values, index, [rng.gauss(0, 1) for _ in range(rows)]


# --- where turns are ---


def test_bounds_by_hand():
    first, last = turn_bounds(INDEX, 4)
    assert first.tolist() == [[1, 5, 7, -1]]
    assert last.tolist() == [[2, 5, 9, -1]]


def test_turns_without_time():
    first, last = turn_bounds(torch.zeros(2, 0, dtype=torch.long), 3)
    assert first.tolist() == last.tolist() == [[-1] * 3] * 2


def test_broadcast_over_turns_reaches_their_tokens_only():
    got = broadcast_over_turns(torch.tensor([[2.0, 3.0, 4.0, NAN]]), INDEX)
    assert got.tolist() == [[0, 2, 2, 0, 0, 3, 0, 4, 4, 4, 0]]
    assert broadcast_over_turns(torch.zeros(1, 0), torch.tensor([[-1, -1]])).tolist() == [[0, 0]]
    with pytest.raises(ValueError, match=r"must lie in \[-1, 2\)"):
        broadcast_over_turns(torch.zeros(1, 2), INDEX)


# --- turn_gae ---


def test_two_turns_by_hand():
    """Values 0.5 and 0.6 before the turns, the end pays 1: the second gains 0.4, the first 0.1 + 0.5 * 0.4."""
    advantages, returns, learned = turn_gae(
        t64([[0.0, 1.0]]), t64([[0.5, 9.0, 9.0, 0.6]]), torch.tensor([[0, 0, -1, 1]]), TurnGae(1.0, 0.5)
    )
    torch.testing.assert_close(advantages, t64([[0.3, 0.3, 0.0, 0.4]]))
    torch.testing.assert_close(returns, t64([[0.8, 0.0, 0.0, 1.0]]))
    assert learned.tolist() == [[True, False, False, True]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.95, 0.0), (0.5, 1.0)])
def test_turn_gae_equals_the_plain_sum(gamma, lam):
    rewards, values, index, bootstrap = episodes(0)
    advantages, returns, learned = turn_gae(
        t64(rewards), t64(values), torch.tensor(index), TurnGae(gamma, lam), bootstrap_value=t64(bootstrap)
    )
    for b, row in enumerate(index):
        turns = plain_turns(row)
        expected = plain_turn_gae(rewards[b], values[b], row, gamma, lam, bootstrap[b])
        for t, k in enumerate(row):
            assert float(advantages[b, t]) == pytest.approx(expected[k][0] if k >= 0 else 0.0)
            starts = k >= 0 and turns[k][0] == t
            assert bool(learned[b, t]) is starts
            assert float(returns[b, t]) == pytest.approx(expected[k][1] if starts else 0.0)


def test_zero_reward_turns_do_not_vanish():
    """Three turns of which only the last is paid. Each is a step of discount; found by reward, there would be one."""
    rewards, index = t64([[0.0, 0.0, 1.0]]), torch.tensor([[0, -1, 1, -1, 2]])
    advantages, _, learned = turn_gae(rewards, torch.zeros(1, 5).double(), index, TurnGae(0.5, 1.0))
    assert advantages.tolist() == [[0.25, 0.0, 0.5, 0.0, 1.0]]
    assert learned.sum() == 3


def test_turns_of_one_token_are_tokens():
    """Where each turn has one token, GAE over turns is GAE over tokens, and so are the two levels together."""
    index = torch.tensor([[0, -1, 1, -1, -1, 2]])
    mask, rewards, values = index >= 0, t64([[0.3, 0.0, 1.0]]), t64([[0.1, 7.0, 0.5, 7.0, 7.0, -0.2]])
    tokens = t64([[0.3, 0.0, 0.0, 0.0, 0.0, 1.0]])
    expected, targets = masked_gae(tokens, values, mask, TokenGae(0.9, 0.8))
    advantages, returns, _ = turn_gae(rewards, values, index, TurnGae(0.9, 0.8))
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, targets)
    both = bilevel_gae(rewards, values, index, BilevelGae(0.9, 0.8, 0.7, 0.6))
    torch.testing.assert_close(both[0], expected)


def test_a_reward_without_an_action_is_refused():
    with pytest.raises(ValueError, match=r"turn 1 in row 0 earned 2\.0"):
        turn_gae(torch.tensor([[0.0, 2.0]]), torch.zeros(1, 2), torch.tensor([[0, -1]]), TurnGae(1.0, 1.0))
    with pytest.raises(ValueError, match="turn_gae needs values"):
        turn_gae(torch.zeros(1, 1), torch.zeros(1, 3), torch.tensor([[0, -1]]), TurnGae(1.0, 1.0))


# --- bilevel_gae ---


def test_bilevel_by_hand():
    """The first turn's return is 0.8 (see above): its last token gains 0.8 - 0.7, its first 0.2 + 0.5 * 0.1."""
    advantages, returns = bilevel_gae(
        t64([[0.0, 1.0]]), t64([[0.5, 0.7, 9.0, 0.6]]), torch.tensor([[0, 0, -1, 1]]),
        BilevelGae(turn_gamma=1.0, turn_lam=0.5, token_gamma=1.0, token_lam=0.5),
    )  # fmt: skip
    torch.testing.assert_close(advantages, t64([[0.25, 0.1, 0.0, 0.4]]))
    torch.testing.assert_close(returns, t64([[0.75, 0.8, 0.0, 1.0]]))


@pytest.mark.parametrize("numbers", [(0.95, 0.9, 1.0, 1.0), (0.9, 0.8, 0.7, 0.6), (1.0, 0.0, 0.9, 0.95)])
def test_bilevel_equals_the_plain_sum(numbers):
    rewards, values, index, bootstrap = episodes(1)
    advantages, returns = bilevel_gae(
        t64(rewards), t64(values), torch.tensor(index), BilevelGae(*numbers), bootstrap_value=t64(bootstrap)
    )
    for b, row in enumerate(index):
        expected = plain_bilevel(rewards[b], values[b], row, *numbers, bootstrap[b])
        assert advantages[b].tolist() == pytest.approx(expected)
        back = [a + v if k >= 0 else 0.0 for a, v, k in zip(expected, values[b], row, strict=True)]
        assert returns[b].tolist() == pytest.approx(back)


def test_a_turn_of_zero_return_ends_where_its_index_says():
    """Two adjacent turns, nothing earned: found by reward, they would be one, and 0.4 would leak into the first."""
    advantages, _ = bilevel_gae(
        torch.zeros(1, 2), torch.tensor([[0.0, 0.0, 0.4]]), torch.tensor([[0, 0, 1]]),
        BilevelGae(turn_gamma=0.0, turn_lam=0.0, token_gamma=1.0, token_lam=1.0),
    )  # fmt: skip
    assert advantages.tolist() == [[0.0, 0.0, pytest.approx(-0.4)]]


def test_bilevel_refuses():
    with pytest.raises(ValueError, match="token_gamma and token_lam must lie in"):
        BilevelGae(turn_gamma=1.0, turn_lam=1.0, token_gamma=1.1, token_lam=1.0)
