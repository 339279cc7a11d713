"""If these fail, the policy is rewarded for what it did not do, or blamed for what broke.

Traces are written down token by token: S scaffold, A agent, E world.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from imagination.data.examples import imitation_row
from imagination.learning.algorithms import ALGORITHMS, build_algorithm
from imagination.learning.experience import (
    after_unsure_actions,
    anchors,
    compared_expert_row,
    informative_groups,
    policy_row,
    policy_rows,
    turn_weights,
)
from imagination.learning.reward_shaping import RewardShaping, worst_returns
from imagination.settings import AlgorithmSettings
from policy.lm.batch import SOURCES, Row, collate
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory, Turn
from tests.support.plain import credited

OWNERS = {"S": Owner.SCAFFOLD, "A": Owner.AGENT, "E": Owner.ENV}
T, L, U, C = StopReason.TERMINATED, StopReason.TURN_LIMIT, StopReason.UNSURE, StopReason.CONTEXT_LIMIT
CRASH, INVALID = StopReason.ENV_CRASHED, StopReason.PREDICTION_INVALID
OUTAGES = [CRASH, StopReason.ENV_TIMEOUT, StopReason.ENGINE_FAILED]


def trace(owners: str, turns: Sequence[int]) -> Trace:
    """Ids 100, 101, ...; log-probs -0.1, -0.2, ... on the agent's; ``turns`` of the agent's tokens in order."""
    own = iter(turns)
    mine = [owner == "A" for owner in owners]
    return Trace(
        ids=tuple(range(100, 100 + len(owners))),
        owners=tuple(OWNERS[owner] for owner in owners),
        logprobs=tuple(-(i + 1) / 10 if m else None for i, m in enumerate(mine)),
        turns=tuple(next(own) if m else -1 for m in mine),
    )


def episode(
    rewards: Sequence[float | None],
    stop: StopReason = T,
    group: str = "g",
    trace: Trace | None = None,
    prefix: int = 0,
    source: Source = Source.DREAM,
) -> Trajectory:
    turns = tuple(Turn(f"a{i}", f"o{i}", reward, False) for i, reward in enumerate(rewards))
    return Trajectory("e", "t", group, source, "policy", 0, "START", turns, stop, prefix_turns=prefix, trace=trace)


ONE = trace("SA", [0])


def test_what_a_context_begins_with_answers_no_action() -> None:
    """Predicted after nothing, it would teach to know the world by heart; and a summary to an action that the world
    could not answer goes with that action."""
    two = replace(trace("SEAEASAASESSEAEA", [0, 1, 2, 2, 2, 3]), segments=(8,))
    played = episode([0, 0, 0, 1], trace=two, source=Source.REAL)
    first, second = policy_rows([played])
    assert first.observed.tolist() == [False] * 3 + [True] + [False] * 4
    assert second.observed.tolist() == [False] * 6 + [True, False]
    assert [int(row.episode) for row in (first, second)] == [0, 0]
    assert not first.truncated
    unanswered = replace(trace("SEAEASAASESSEA", [0, 1, 2, 2, 2]), segments=(8,))
    (only,) = policy_rows([episode([0, 0], stop=C, trace=unanswered)])
    assert only.ids.tolist() == list(range(100, 106))
    assert only.truncated
    assert [row.truncated.item() for row in policy_rows([episode([0, 0, 0, 1], stop=L, trace=two)])] == [False, True]
    with pytest.raises(ValueError, match="segments"):
        replace(two, segments=(8, 8))


def acted(turns: int) -> Trace:
    """One token a turn."""
    return trace("S" + "AE" * turns, range(turns))


def row_of(played: Trajectory, **more: Any) -> Row:
    row = policy_row(played, **more)
    assert row is not None
    return row


def group_advantages(episodes: Sequence[Trajectory], normalise_std: bool = True) -> tuple[list[float], list[bool]]:
    """What GRPO makes of each episode of an update, and whether it counts: has a row that is learned from."""
    grpo = build_algorithm(AlgorithmSettings(normalise_std=normalise_std, drop_equal_groups=False))
    batch = credited(policy_rows(episodes), grpo)
    rows = iter(zip(batch.advantages.tolist(), batch.rl_weight.tolist(), strict=True))
    found = [next(rows) if policy_row(e) is not None else ([0.0], [0.0]) for e in episodes]
    return [max(advantages, key=abs) for advantages, _ in found], [any(weights) for _, weights in found]


# --- groups ---


def test_advantages_of_a_group_by_hand() -> None:
    """Returns 1, 0, 0, 1: mean 1/2, unbiased deviation sqrt(1/3). Episodes of the two groups are interleaved."""
    returns = {"g": [[0.0, 1.0], [0.0], [None, 0.0], [1.0]], "h": [[0.5], [0.25, 0.5], [0.25], [0.0]]}
    mixed = [
        episode(returns[name][k], group=name, trace=acted(len(returns[name][k]))) for k in range(4) for name in "gh"
    ]
    advantages, counts = group_advantages(mixed)
    g = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages[::2] == pytest.approx([g, -g, -g, g])
    # returns .5, .75, .25, 0: mean .375, squares .015625, .140625, .015625, .140625 over 3
    std = math.sqrt(0.3125 / 3) + 1e-4
    assert advantages[1::2] == pytest.approx([0.125 / std, 0.375 / std, -0.125 / std, -0.375 / std])
    assert counts == [True] * 8
    plain, _ = group_advantages(mixed, normalise_std=False)
    assert plain == pytest.approx([0.5, 0.125, -0.5, 0.375, -0.5, -0.125, 0.5, -0.375])


@pytest.mark.parametrize("failure", OUTAGES)
def test_a_failed_episode_is_excluded_and_its_group_still_normalises(failure: StopReason) -> None:
    """It had earned 1 when the world broke. Counted, it would pull the others down; with it the group would be lost."""
    broken = episode([1.0], failure, trace=ONE)
    others = [episode([1.0], trace=ONE), episode([0.0], L, trace=ONE), episode([0.5], U, trace=ONE)]
    advantages, counts = group_advantages([others[0], broken, *others[1:]])
    expected = 0.5 / (0.5 + 1e-4)  # mean 1/2, deviation 1/2
    assert advantages == pytest.approx([expected, 0.0, -expected, 0.0])
    assert counts == [True, False, True, True]
    assert [a for i, a in enumerate(advantages) if i != 1] == group_advantages(others)[0]


def test_a_malformed_prediction_is_no_survivor_bias() -> None:
    """X is malformed 85 % of the time and pays 1 otherwise, 0.15 on average; Y always pays 0.6. Y is the better one.

    A policy of one logit, 80 updates of four groups of eight, plain policy gradient on GRPO's advantages.
    """
    grpo, chance, logit = build_algorithm(AlgorithmSettings()), random.Random(0), 0.0
    for _ in range(80):
        p, episodes, arms = 1 / (1 + math.exp(-logit)), [], []
        for k in range(32):
            arms.append(chance.random() < p)
            broken = arms[-1] and chance.random() < 0.85
            rewards = [] if broken else [1.0 if arms[-1] else 0.6]
            episodes.append(episode(rewards, INVALID if broken else T, f"{k % 4}", ONE))
        kept = [x for x, e in zip(arms, episodes, strict=True) if policy_row(e) is not None]
        sums = credited(policy_rows(episodes), grpo).advantages.sum(1).tolist()
        logit += 0.5 * fmean(gain * (x - p) for x, gain in zip(kept, sums, strict=True))
    assert 1 / (1 + math.exp(-logit)) < 0.1


def test_a_malformed_prediction_costs_the_action_that_provoked_it() -> None:
    """What was earned before it stays earned; the last action, which nothing answered, is trained, and ends at 0."""
    row = row_of(episode([0.5], INVALID, trace=trace("SAESAA", [0, 1, 1])))
    assert row.rewards.tolist() == [0.5, 0]
    assert list(row.rl_weight) == [0, 1, 0, 0, 1, 1]
    assert not row.truncated
    assert informative_groups([episode([], INVALID, trace=ONE), episode([1.0], trace=ONE)]) == 1


def test_truncated_episodes_are_episodes() -> None:
    """Ours is the limit: left out, a policy that dawdles would not be told."""
    for stop in (L, U, C):
        assert group_advantages([episode([0.0], stop, trace=ONE), episode([1.0], trace=ONE)])[1] == [True, True]


def test_scripted_episodes_are_in_no_group() -> None:
    """They have no tokens to train, and another policy's luck is no baseline."""
    scripted = episode([1.0])
    advantages, counts = group_advantages([scripted, episode([1.0], trace=ONE), episode([0.0], trace=ONE)])
    assert counts == [False, True, True]
    assert advantages[0] == 0.0


def test_what_the_log_earned_is_not_credited() -> None:
    """Both start from the same logged turn, which earned 0.75; only what they did themselves tells them apart."""
    rewards = [[0.75, 0.25], [0.75, 0.0]]
    branched = [episode(r, trace=trace("SSA", [1]), prefix=1) for r in rewards]
    plain, _ = group_advantages(branched, normalise_std=False)
    assert plain == pytest.approx([0.125, -0.125])
    whole, _ = group_advantages([branched[1], episode([0.75], trace=ONE)], normalise_std=False)
    assert whole == pytest.approx([-0.375, 0.375])  # 0 against 0.75, although both totals are 0.75


def test_groups_that_tell_something_are_counted() -> None:
    """Equal sums tell nothing, whatever the turns; nor does an episode that failed, or what the log earned."""
    same = [episode([0.5, 0.5], group="same", trace=acted(2)), episode([1.0], group="same", trace=acted(1))]
    broken = [episode([1.0], group="broken", trace=ONE), episode([0.0], CRASH, group="broken", trace=ONE)]
    copied = [episode([r, 0.0], group="copied", trace=trace("SSA", [1]), prefix=1) for r in (0.0, 0.75)]
    different = [episode([r], group="different", trace=ONE) for r in (1.0, 1.0, 0.0)]
    assert informative_groups([*same, *broken, *copied]) == 0
    assert informative_groups([*different, *same, *broken, *copied]) == 1


def test_turns_of_equal_observations_have_equal_anchors() -> None:
    """What gigpo compares: the observation that a turn answered, the start first, in this and any other episode."""
    turns = (Turn("a", "HALL", 0.0, False), Turn("b", "START", 0.0, False), Turn("c", "HALL", 0.0, False))
    found = anchors(replace(episode([]), turns=turns))
    assert found == [found[0], found[1], found[0], found[1]]
    assert found[0] != found[1]
    assert anchors(episode([0.0]))[0] == found[0]
    assert 0 <= min(found) <= max(found) < 2**63


# --- rows of played episodes ---


def test_a_row_by_hand() -> None:
    """Two turns of which the second pays; the tail after the last action is read by no loss and left out."""
    row = row_of(episode([0.0, 1.0], trace=trace("SESAASESAAAS", [0, 0, 1, 1, 1])))
    assert list(row.ids) == list(range(100, 111))
    batch = collate([row], pad=0)
    s = [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert batch.action_mask[0].long().tolist() == batch.rl_weight[0].tolist() == s
    assert batch.rewards[0].tolist() == [0, 1.0, 0]
    assert batch.turns[0].tolist() == [-1, -1, -1, 0, 0, -1, -1, -1, 1, 1, 1]
    expected = [-(i + 1) / 10 if mine else math.nan for i, mine in enumerate(s)]
    assert batch.behavior_logprobs[0].tolist() == pytest.approx(expected, nan_ok=True)
    assert not batch.ce_weight.any()
    assert not batch.truncated.any()
    assert batch.source.tolist() == [SOURCES.index(Source.DREAM)]


def test_a_reward_lands_on_the_last_token_that_the_policy_made() -> None:
    """Not on an end token that the loop forced, not on the observation that brought it, and not on another turn's: with
    no discount to come, the return of the last token of a turn is what is earned from there on."""
    row = row_of(episode([0.5, None, 0.25], L, trace=trace("SAASESASESAAS", [0, 0, 1, 2, 2])))
    assert row.rewards.tolist() == [0.5, 0, 0.25, 0]
    batch = credited([row], build_algorithm(AlgorithmSettings("reinforce", gamma=0.5)))
    assert batch.advantages[0].tolist() == [0, 0.25 + 1 / 64, 0.5 + 1 / 32, *[0] * 3, 1 / 16, *[0] * 3, 0.125, 0.25, 0]


@pytest.mark.parametrize(
    ("stop", "length", "truncated"), [(T, 4, False), (L, 7, True), (U, 4, False), (C, 7, True)], ids=str
)
def test_a_truncated_episode_keeps_the_state_where_it_was_cut(stop: StopReason, length: int, truncated: bool) -> None:
    """A critic bootstraps from it. After the world's end there is no state to keep."""
    row = row_of(episode([0.0], stop, trace=trace("SEAASES", [0, 0])))
    assert len(row.ids) == len(row.rl_weight) == length
    assert bool(row.truncated) is truncated
    assert sum(row.rl_weight) == 2


def test_an_action_that_the_world_could_not_answer_is_neither_praised_nor_blamed() -> None:
    """Its context was full: the row ends in the state before that action, whose value is all that is known."""
    row = row_of(episode([0.5], C, trace=trace("SAESAA", [0, 1, 1])))
    assert list(row.ids) == [100, 101, 102, 103]
    assert row.rewards.tolist() == [0.5, 0]
    assert list(row.rl_weight) == [0, 1, 0, 0]
    assert row.truncated
    assert policy_row(episode([], C, trace=trace("SESAA", [0, 0]))) is None  # there was no action but that


@pytest.mark.parametrize("name", ["ppo", "turn_ppo", "bilevel_ppo"])
def test_a_full_context_of_the_world_is_no_loss_where_values_stay_the_same(name: str) -> None:
    """V = 0.8 throughout and nothing earned: every turn kept what there was to be had, so no advantage is negative."""
    rows = policy_rows([episode([0.0] * 3, C, trace=trace("S" + "AES" * 3 + "AA", [0, 1, 2, 3, 3]))] * 2)
    undiscounted = {k: 1.0 for k in ("gamma", "turn_gamma") if k in ALGORITHMS[name].settings}
    algorithm = build_algorithm(AlgorithmSettings(name, whiten=False, **undiscounted))  # type: ignore[arg-type]
    assert credited(rows, algorithm, value=0.8).advantages.abs().max() < 1e-6


# --- what breaks or ends a dream, and who pays for it ---


def costly(turns: int, stop: StopReason = T, reward: float = -0.1, **info: float) -> Trajectory:
    """Every turn costs something; a doubted one is recorded without a reward."""
    rewards = [reward] * turns if stop is not U else [*[reward] * (turns - 1), 0.0]
    played = episode(rewards, stop, trace=acted(turns + (stop is StopReason.PREDICTION_INVALID)))
    return replace(played, turns=tuple(replace(turn, info=info) for turn in played.turns))


@pytest.mark.parametrize("stop", [U, StopReason.PREDICTION_INVALID])
def test_to_end_a_dream_by_doubt_is_no_way_to_save_costs(stop: StopReason) -> None:
    """Eight turns of -0.1 are what the log knows: doubt costs as much from wherever it comes."""
    worst = worst_returns([[-0.1] * 8, [-0.1, 0.9]], 8)
    assert worst == pytest.approx([-0.1 * n for n in range(9)])
    shaping = RewardShaping(worst=worst, longest=8)
    honest = costly(8, L)
    for k in range(1, 9):
        doubted = costly(k - (stop is not U), stop)
        rows = policy_rows([doubted, honest, honest], shaping=shaping)
        assert sum(rows[0].rewards) <= sum(rows[1].rewards) + 1e-6
        found = credited(rows, build_algorithm(AlgorithmSettings(drop_equal_groups=False)))
        assert found.advantages[0].max() <= 1e-6
        unpaid = policy_rows([doubted])[0]
        assert sum(unpaid.rewards) > sum(rows[1].rewards)  # without the bound, doubt is the best there is


def test_judgements_that_cost_something_cost_it_for_the_turns_given_up_too() -> None:
    shaping = RewardShaping(process="confidence", longest=8)
    rows = policy_rows([costly(1, U, 0.0, confidence=0.5), costly(8, L, 0.0, confidence=1.0)], shaping=shaping)
    algorithm = build_algorithm(AlgorithmSettings("reinforce"))
    doubted, honest = credited(rows, algorithm, process_coef=-0.1).advantages.tolist()
    assert max(doubted, key=abs) == pytest.approx(-0.05 - 7 * 0.1)  # its own, and seven of the worst
    assert max(honest, key=abs) == pytest.approx(-0.8)
    doubted, honest = credited(rows, algorithm, process_coef=0.1).advantages.tolist()
    assert max(doubted, key=abs) == pytest.approx(0.05)  # what pays is not paid for turns not played


def test_a_dream_that_breaks_at_its_first_action_has_judgements_as_the_others_do() -> None:
    """There is no turn to judge; without an entry for the action that broke it, the update would end in an error."""
    shaping = RewardShaping(process="confidence")
    rows = policy_rows([costly(0, INVALID), costly(8, L, 0.0, confidence=1.0)], shaping=shaping)
    found = credited(rows, build_algorithm(AlgorithmSettings("reinforce")), process_coef=0.1)
    assert found.advantages.amax(1).tolist() == pytest.approx([0.0, 0.8])


def test_a_doubted_turn_in_a_dream_that_goes_on_costs_what_a_turn_may_cost() -> None:
    played = costly(3, L)
    doubted = replace(played.turns[1], reward=0.0, info={"doubted": True})
    played = replace(played, turns=(played.turns[0], doubted, played.turns[2]))
    assert RewardShaping(worst=(0.0, -0.1, -0.2)).rewards(played) == pytest.approx([-0.1] * 3)
    assert RewardShaping().rewards(played) == pytest.approx([-0.1, 0.0, -0.1])


def test_the_worst_of_the_log_by_hand() -> None:
    assert worst_returns([[-0.1, -0.1, 1.0], [0.0, -0.3]], 4) == pytest.approx((0, -0.3, -0.3, -0.3, -0.6))
    assert worst_returns([[0.0, 1.0], [0.5]], 3) == (0.0, 0.0, 0.0, 0.0)  # never negative: doubt is unpaid, no more
    assert worst_returns([], 2) == (0.0, 0.0, 0.0)


def test_rewards_of_a_prefix_are_not_in_the_row() -> None:
    """The log's actions are scaffold there: their rewards have no token to stand on, and were not earned."""
    row = row_of(episode([0.75, 0.5, 0.25], prefix=2, trace=trace("SSSEAAS", [2, 2])))
    assert row.rewards.tolist() == [0, 0, 0.25, 0]


@pytest.mark.parametrize("failure", OUTAGES)
def test_a_failed_episode_has_no_row(failure: StopReason) -> None:
    """Whatever it had earned before the world broke, it says nothing about the task."""
    assert policy_row(episode([1.0], failure, trace=trace("SAESAA", [0, 1, 1]))) is None


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}])
def test_an_episode_of_a_cut_distribution_does_not_train(cut: dict[str, float]) -> None:
    """Its log-probs are those of the nucleus; the trainer's are of the whole: every ratio would be too small."""
    played = episode([1.0], trace=replace(ONE, **cut))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampled with top_p"):
        policy_row(played)


def test_an_episode_without_a_sampled_token_has_no_row() -> None:
    assert policy_row(episode([1.0])) is None  # scripted
    assert policy_row(episode([], C, trace=trace("SES", []))) is None  # the context was full at once


# --- rows of experts ---

CHAT = ChatFormat(train_tokenizer(["a"], 300, ["START", "go east", "HALL", "take lamp"]))


def test_an_expert_row_by_hand() -> None:
    """Cross-entropy on its actions and their ends. Log-probs it never had; with invented ones, or with an RL weight, it
    would enter PPO's ratio."""
    expert = Trajectory(
        "e", "t", "g", Source.EXPERT, "expert", 0, "START",
        (Turn("go east", "HALL", 0.0, False), Turn("take lamp", "GOT IT", 1.0, True)), T,
    )  # fmt: skip
    row = imitation_row(CHAT, expert)
    assert CHAT.tokenizer.convert_ids_to_tokens(list(row.ids)) == [
        "<|user|>", "START", "<|end|>", "<|assistant|>", "go east", "<|end|>",
        "<|user|>", "HALL", "<|end|>", "<|assistant|>", "take lamp", "<|end|>",
    ]  # fmt: skip
    batch = collate([row], pad=0)
    assert batch.ce_weight[0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert batch.action_mask[0].long().tolist() == batch.ce_weight[0].tolist()
    assert batch.behavior_logprobs.isnan().all()
    for absent in (batch.rl_weight, batch.advantages, batch.rewards):
        assert not absent.any()
    assert not batch.truncated.any()
    assert batch.source.tolist() == [SOURCES.index(Source.EXPERT)]


@pytest.mark.parametrize(
    ("own", "judged", "expert"),
    [
        ([1.0, 0.0, 0.0], [0.8659, -0.8659, -0.8659], 0.8659),  # of 1, 0, 0, 1: mean 1/2, deviation 0.57735
        ([0.0, 0.0, 0.0], [-0.4999, -0.4999, -0.4999], 1.4997),  # of 0, 0, 0, 1: mean 1/4, deviation 1/2
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], 0.0),
    ],
)
def test_an_expert_is_judged_within_the_group_of_its_task(own: list[float], judged: list[float], expert: float) -> None:
    """LUFFY, arXiv 2504.14945, section 3.1: mean and deviation of a group are of its own and the expert's returns."""
    solved = episode([0.0, 1.0], source=Source.EXPERT)
    rows = [*policy_rows([episode([r], T, "g", ONE) for r in own]), compared_expert_row(CHAT, solved, 0)]
    found = credited(rows, build_algorithm(AlgorithmSettings(drop_equal_groups=False)))
    assert [max(gains, key=abs) for gains in found.advantages.tolist()] == pytest.approx([*judged, expert], abs=2e-4)
    assert not found.rl_weight[-1].any()  # it has no log-probs to make a ratio of
    assert ((found.advantages[-1] != 0) == ((found.ce_weight[-1] != 0) & (expert != 0))).all()
    alone = credited([*rows[:-1], imitation_row(CHAT, solved)], build_algorithm(AlgorithmSettings()))
    assert not alone.advantages[-1].any()


def test_a_solved_episode_of_any_source_can_be_imitated_as_an_experts() -> None:
    """Shares of the batch are counted by source, so the row says in which role it is there."""
    played = episode([1.0], source=Source.REAL)
    assert imitation_row(CHAT, played).source == SOURCES.index(Source.REAL)
    assert imitation_row(CHAT, played, Source.EXPERT).source == SOURCES.index(Source.EXPERT)


# --- doubt ---


def doubtful(probabilities: Sequence[float | None], prefix: int = 0, source: Source = Source.DREAM) -> Trajectory:
    """An episode of one agent token a turn."""
    turns = tuple(
        Turn(f"a{i}", f"o{i}", 0.0, False, {} if p is None else {"probability": p}) for i, p in enumerate(probabilities)
    )
    n = len(turns) - prefix
    made = trace("S" + "AE" * n, range(prefix, len(turns)))
    return Trajectory("e", "t", "g", source, "policy", 0, "START", turns, L, prefix_turns=prefix, trace=made)


def test_a_turn_counts_by_how_likely_all_before_it_were_right() -> None:
    """0.9, then 0.9 x 0.5; then 0.045, which is below the floor. The last answer judges only what would follow it."""
    assert turn_weights(doubtful([0.9, 0.5, 0.1]), 0.1) == pytest.approx([1.0, 0.9, 0.45, 0.1])
    assert turn_weights(doubtful([None, 0.9, 0.5], prefix=1), 0.1) == pytest.approx([1.0, 1.0, 0.9, 0.45])
    assert turn_weights(doubtful([None, None], source=Source.REAL), 0.1) == [1.0, 1.0, 1.0]
    assert turn_weights(doubtful([0.0, 0.5]), 0.05) == [1.0, 0.05, 0.05]  # never 0: a token would leave the denominator
    with pytest.raises(ValueError, match="calibrated probability"):
        turn_weights(doubtful([0.9, None]), 0.1)


def test_only_the_weights_of_a_row_change() -> None:
    episode_ = doubtful([None, 0.5, 0.5, 0.5], prefix=1)
    plain, weighed = row_of(episode_), row_of(episode_, min_weight=0.3)
    assert plain.rl_weight.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert weighed.rl_weight.tolist() == pytest.approx([0, 1, 0, 0.5, 0, 0.3, 0])
    assert str(replace(weighed, rl_weight=plain.rl_weight)) == str(plain)  # as text: NaN is not NaN
    surest = row_of(doubtful([1.0, 1.0, 1.0]), min_weight=0.3)
    assert list(surest.rl_weight) == [0, 1, 0, 1, 0, 1, 0]


# --- observations to predict ---


def test_what_the_real_world_says_after_an_action_is_observed() -> None:
    """Not the start, not the chat format, and never what a world model said."""
    owners = "SESAESAAESA"
    for source, expected in ((Source.REAL, "....E...E.."), (Source.DREAM, "...........")):
        played = episode([0.0, 0.0, 1.0], source=source, trace=trace(owners, [0, 1, 1, 2]))
        batch = collate([row_of(played)], pad=0)
        assert batch.observed[0].tolist() == [c == "E" for c in expected]
    cut = replace(played, source=Source.REAL, stop=StopReason.TURN_LIMIT, trace=trace(f"{owners}SE", [0, 1, 1, 2]))
    assert row_of(cut).observed.nonzero()[:, 0].tolist() == [4, 8, 12], "the row goes on to the state it was cut in"


def test_the_observations_after_the_least_sure_actions() -> None:
    """Actions of two episodes with mean surprisals 0.4, 0.65, then 0.1, 0.3 and 0.5; log-probs are -0.1 a place."""
    first = trace("SSSAESAAESA", [0, 1, 1, 2])
    second = trace("AESAESA", [0, 1, 2])
    second = replace(second, logprobs=(-0.1, None, None, -0.3, None, None, -0.5))
    rows = [row_of(episode([0.0] * 3, source=Source.REAL, trace=t)) for t in (first, second)]
    batch = collate([*rows, row_of(episode([1.0], source=Source.DREAM, trace=ONE))], pad=0)
    assert torch.equal(after_unsure_actions(batch, 1.0), batch.observed)
    places = [after_unsure_actions(batch, share).nonzero().tolist() for share in (0.25, 0.5, 0.75, 0.0)]
    assert places == [[[0, 8]], [[0, 4], [0, 8]], [[0, 4], [0, 8], [1, 4]], []]
