"""What a critic learns from a log. If these fail, it learns values of other states, or of what nobody earned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from imagination.learning.algorithms import ALGORITHMS, Algorithm
from imagination.learning.critic import critic_values, logged_rows, logged_transitions, with_returns
from imagination.learning.reward_shaping import RewardShaping
from policy.lm.batch import RowBatch
from policy.lm.forward import ValueHead
from policy.lm.render import ChatFormat, policy_prompt
from real_envs.trajectory import Owner, Source, StopReason, Trajectory, Turn
from tests.support.plain import TOKENIZER, make_model

CHAT = ChatFormat(TOKENIZER)
TURN_PPO = ALGORITHMS["turn_ppo"].with_settings(gamma=0.5)


def episode(number: int, *rewards: float, ended: bool) -> Trajectory:
    turns = [Turn(f"go {k}", f"room {k}", reward, False) for k, reward in enumerate(rewards)]
    stop = StopReason.TERMINATED if ended else StopReason.TURN_LIMIT
    return Trajectory(
        f"e{number}", "task", "group", Source.REAL, agent="noisy", seed=0, start="hall", turns=tuple(turns), stop=stop
    )


LOG = [episode(0, 0.0, 0.0, 1.0, ended=True), episode(1, 0.25, 0.5, ended=False)]


def logged(algorithm: Algorithm, pay: RewardShaping | None = None) -> RowBatch:
    return with_returns(logged_rows(CHAT, LOG, pay or RewardShaping(), 1000), algorithm)


def returns(algorithm: Algorithm, pay: RewardShaping | None = None) -> list[list[float]]:
    batch = logged(algorithm, pay)
    return [found[learned].tolist() for found, learned in zip(batch.returns, batch.learned, strict=True)]


def test_returns_by_hand_of_an_episode_that_ended_and_of_one_that_was_cut() -> None:
    """Turns discounted by 1/2: 1/4, 1/2, 1; and 1/4 + 1/2 * 1/2 = 1/2, then 1/2: what it earned, and no guess."""
    assert returns(TURN_PPO) == [pytest.approx([0.25, 0.5, 1.0]), pytest.approx([0.5, 0.5])]
    tiers = RewardShaping(tiers=((1.0, 4.0),))
    assert returns(TURN_PPO, tiers) == [pytest.approx([1.0, 2.0, 4.0]), pytest.approx([0.0, 0.0])]


def test_an_algorithm_of_tokens_has_a_return_before_each_token() -> None:
    """The reward stands on the last token of its turn, and each agent token before it halves it once more."""
    first, _ = returns(ALGORITHMS["ppo"].with_settings(gamma=0.5))
    tokens = sum(len(CHAT.encode(turn.action)) + 1 for turn in LOG[0].turns)
    assert first == pytest.approx([0.5**k for k in reversed(range(tokens))])


def test_logged_episodes_may_be_longer_than_a_policy_may_play() -> None:
    """They pay the whole fine of an overlong one, and no more."""
    first, second = returns(ALGORITHMS["turn_ppo"].with_settings(max_tokens=8, overlong_buffer=4))
    assert first == pytest.approx([0.0, 0.0, 0.0])
    assert second == pytest.approx([-0.25, -0.5])


def test_transitions_go_from_state_to_state_of_an_episode() -> None:
    """States by a plain forward pass over the prompt of each turn, which is what the policy had read then."""
    model = make_model()
    found, row = logged_transitions(logged(TURN_PPO), model, 10**6)
    expected = []
    for one in LOG:
        for k in range(len(one.turns) + 1):  # the last of them has read the whole episode
            ids = policy_prompt(CHAT, one.start, one.turns[:k], Owner.AGENT).ids
            with torch.no_grad():
                expected.append(model.model(torch.tensor([ids])).last_hidden_state[0, -1])
    states = torch.stack(expected)
    torch.testing.assert_close(found.states, states[[0, 1, 2, 4, 5]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.next_states, states[[1, 2, 3, 5, 6]], atol=1e-5, rtol=1e-5)
    assert found.rewards.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.25, 0.5])
    assert found.dones.tolist() == [False, False, True, False, False], "a limit of ours is no end of the world"
    assert found.returns.tolist() == pytest.approx([0.25, 0.5, 1.0, 0.5, 0.5])
    assert row.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("algorithm", [TURN_PPO, ALGORITHMS["ppo"]])
def test_a_state_is_where_ppo_reads_its_value(algorithm: Algorithm) -> None:
    model, head = make_model(), ValueHead(16)
    torch.nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    batch = logged(algorithm)
    found, row = logged_transitions(batch, model, 1)  # a row at a time
    critic_values(batch, model, head, 10**6, range(len(batch)))
    read = [values[learned] for values, learned in zip(batch.values, batch.learned, strict=True)]
    with torch.no_grad():
        torch.testing.assert_close(head(found.states), torch.cat(read), atol=1e-5, rtol=1e-5)
    assert row.bincount().tolist() == [len(part) for part in read]
    assert [float(found.rewards[row == r].sum()) for r in range(2)] == pytest.approx([1.0, 0.75]), "none is lost"


def test_an_episode_that_does_not_fit_is_left_out_whole() -> None:
    longest = max(len(row.ids) for row in logged_rows(CHAT, LOG, RewardShaping(), 1000))
    rows = logged_rows(CHAT, LOG, RewardShaping(), longest - 1)
    assert [row.truncated for row in rows] == [True]


def test_an_episode_whose_rewards_nobody_measured_earned_nothing_that_is_known() -> None:
    unknown = replace(LOG[0], turns=tuple(replace(turn, reward=None) for turn in LOG[0].turns))
    rows = logged_rows(CHAT, [unknown, LOG[1]], RewardShaping(), 1000)
    assert [row.truncated for row in rows] == [True]
