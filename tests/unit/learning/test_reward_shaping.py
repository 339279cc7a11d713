"""If these fail, the policy is paid for something else than the settings say."""

from __future__ import annotations

import math
import random

import pytest
import torch

from imagination.learning.algorithms import ALGORITHMS, Episodes, build_algorithm
from imagination.learning.algorithms.advantage import with_penalties
from imagination.learning.experience import informative_groups, policy_row, policy_rows
from imagination.learning.reward_shaping import GRAIN, RewardShaping, check_tiers
from imagination.settings import AlgorithmSettings, UserError
from imagination.settings.algorithm_parts import DynamicSampling, Kl
from real_envs.trajectory import StopReason
from tests.support.dreamed import dream
from tests.support.plain import credited

TIERS = ((0.5, 0.3), (1.0, 1.0))


# --- tiers ---


@pytest.mark.parametrize(
    ("rewards", "prefix", "expected"),
    [
        ([0.0, 0.5, 0.0, 0.5], 0, [0, 0.3, 0, 0.7]),
        ([0.4, None, 0.05], 0, [0, 0, 0]),
        ([0.4, 0.3, 0.2], 0, [0, 0.3, 0]),  # within a tier nothing is earned
        ([0.5, 0.5], 1, [0, 0.7]),  # the log had climbed to the first tier
        ([0.6, -0.2], 0, [0.3, -0.3]),  # what is lost again is taken back
        ([0.111111] * 9, 0, [0, 0, 0, 0, 0.3, 0, 0, 0, 0.7]),  # dreams write six decimals: this is a solved task
    ],
)
def test_a_turn_earns_what_it_climbs(rewards: list[float | None], prefix: int, expected: list[float]) -> None:
    assert RewardShaping(TIERS).rewards(dream(rewards, prefix=prefix)) == pytest.approx(expected, abs=GRAIN)


def test_an_episode_adds_up_to_the_tier_of_its_outcome_by_a_plain_loop() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rewards = [rng.choice([0.0, 0.1, 0.25, 0.4]) for _ in range(rng.randint(1, 6))]
        height = 0.0
        for threshold, reward in TIERS:
            if sum(rewards) >= threshold - 1e-6:
                height = reward
        assert sum(RewardShaping(TIERS).rewards(dream(rewards))) == pytest.approx(height, abs=GRAIN)


def test_equal_outcomes_are_equal_to_the_bit_however_they_were_climbed() -> None:
    """By rounding alone a group of equals would look informative, and its advantages would be noise over noise."""
    shaping = RewardShaping(((0.2, 0.1), (0.4, 0.4), (0.9, 1.1)))
    ways = [[1.0], [0.2, 0.2, 0.5], [0.4, 0.6], [0.3, 0.0, 0.7], [0.2, 0.75]]
    episodes = [dream(rewards) for rewards in ways]
    assert informative_groups(episodes) == 1
    assert informative_groups(episodes, shaping) == 0
    grpo = build_algorithm(AlgorithmSettings())
    assert not credited(policy_rows(episodes, shaping=shaping), grpo).rl_weight.any()
    assert credited(policy_rows([*episodes, dream([0.3])], shaping=shaping), grpo).rl_weight.any()


def test_a_failed_episode_has_no_row_whatever_it_reached() -> None:
    assert policy_row(dream([1.0], stop=StopReason.ENGINE_FAILED), shaping=RewardShaping(TIERS)) is None


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ([[0.5]], "a list of"),
        ([[0.5, 0.3], [0.4, 1.0]], "must both rise"),
        ([[0.5, 0.3], [0.6, 0.3]], "must both rise"),
        ([[0.0, 0.3]], "from above 0"),
        ([[0.5, -1.0]], "from above 0"),
        ([[0.5, 0.3], [1.5, 1.0]], "has the outcome 1"),
        ([[1.0, 1000.0]], "up to 100"),
    ],
)
def test_tiers_that_cannot_be(tiers: list[list[float]], said: str) -> None:
    wrong = check_tiers(tiers)
    assert wrong is not None
    assert said in wrong
    assert check_tiers([]) is check_tiers([[0.5, 0.3], [1.0, 1.0]]) is None


# --- judgements of turns ---


def test_judgements_are_added_to_what_turns_earned() -> None:
    """Two own turns after one of the log, and an action that broke the dream: 0.2 * judgement, each on its turn."""
    info: list[dict[str, float | str | bool]] = [{}, {"confidence": 0.5}, {"confidence": 1.0, "outcome_by": "model"}]
    played = dream([0.9, 0.0, 1.0], info, prefix=1, stop=StopReason.PREDICTION_INVALID, unanswered=True)
    row = policy_row(played, shaping=RewardShaping(process="confidence"))
    assert row is not None
    assert list(row.process) == pytest.approx([math.nan, 0.5, 1.0, 0.0], nan_ok=True)
    reinforce = build_algorithm(AlgorithmSettings("reinforce"))
    plain, found = credited([row], reinforce), credited([row], reinforce, process_coef=0.2)
    assert plain.advantages[plain.rl_weight != 0].tolist() == [1.0, 1.0, 0.0]
    assert found.advantages[found.rl_weight != 0].tolist() == pytest.approx([1.0 + 0.1 + 0.2, 1.0 + 0.2, 0.0])


def test_what_was_not_judged_is_not_zero() -> None:
    with pytest.raises(UserError, match=r"turn 1 of episode e .* confidence; set train\.process"):
        policy_row(dream([0, 0], [{"x": 1.0}, {"confidence": 0.5, "by": "me"}]), shaping=RewardShaping(process="x"))
    with pytest.raises(UserError, match="none at all"):
        policy_row(dream([0.0], [{"x": "words"}]), shaping=RewardShaping(process="x"))
    with pytest.raises(UserError, match="no such number"):
        policy_row(dream([0.0], [{"x": math.nan}]), shaping=RewardShaping(process="x"))
    with pytest.raises(ValueError, match="process reward"):
        credited(policy_rows([dream([0.0])]), build_algorithm(AlgorithmSettings("reinforce")), process_coef=0.1)


def test_judgements_do_not_make_a_group_of_equals_informative() -> None:
    """What a group teaches is decided by what the environment paid, as with a penalty for length."""
    info: list[dict[str, float | str | bool]] = [{"confidence": 0.3}, {"confidence": 0.9}]
    rows = policy_rows([dream([1.0], info[k:]) for k in range(2)], shaping=RewardShaping(process="confidence"))
    assert not credited(rows, build_algorithm(AlgorithmSettings()), process_coef=0.5).rl_weight.any()
    kept = credited(rows, build_algorithm(AlgorithmSettings(drop_equal_groups=False)), process_coef=0.5)
    assert [max(gains, key=abs) for gains in kept.advantages.tolist()] == pytest.approx([-0.7068, 0.7068], abs=1e-3)


def test_shaped_turns_are_judged_and_the_payment_is_still_known() -> None:
    episodes = Episodes(
        turn_rewards=torch.tensor([[0.0, 1.0], [5.0, 5.0]]),
        action_turn_index=torch.tensor([[0, -1, 1], [0, -1, 1]]),
        group_ids=torch.tensor([0, 0]),
        valid=torch.tensor([True, False]),
        shaped=torch.tensor([[0.25, 0.5], [math.nan, math.inf]]),
    )
    found = with_penalties(episodes, Kl(), DynamicSampling())
    assert found.token_rewards.tolist() == [[0.25, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert found.turn_rewards.tolist() == [[0.25, 0.5], [0.0, 0.0]]
    assert episodes.earned.sum(1).tolist() == [1.0, 0.0]
    gains = ALGORITHMS["reinforce"].judge(episodes).advantages
    assert gains.tolist() == [[0.75, 0.0, 0.5], [0.0, 0.0, 0.0]]


# --- what was carried out ---


def test_refusals_are_told_by_their_words() -> None:
    said = ["You can't go that way.", "A hall.", "That's not a verb."]
    played = dream([0, 0, 0], said=said, stop=StopReason.CONTEXT_LIMIT, unanswered=True)
    row = policy_row(played, shaping=RewardShaping(refusals="^(You can't|That's not)"))
    assert row is not None
    assert list(row.carried_out) == [False, True, False, False]
    assert RewardShaping().carried_out(dream([0.0])) == []
