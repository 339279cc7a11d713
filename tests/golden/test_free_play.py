"""The numbers of free play, against counts and sums done by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from imagination.evaluation.compare.free_play import action_table, free_play, token_divergence
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.comparisons import episode


def encode(text: str) -> list[int]:
    """A token a letter."""
    return [ord(letter) for letter in text]


def played(id: str, *actions: str, solved: bool = False, stop: StopReason | None = None) -> Trajectory:
    turns = [
        Turn(action, "ab", float(solved and k == len(actions) - 1), solved and k == len(actions) - 1)
        for k, action in enumerate(actions)
    ]
    return episode(id, turns, Source.REAL, stop)


def test_the_success_length_reward_and_gap_of_a_policy() -> None:
    dreams = [
        played("d0", "go", "take", solved=True),
        played("d1", "go"),
        played("d2", "x", stop=StopReason.ENV_CRASHED),
    ]
    reals = [played("r0", "go", "go", "take", "take"), played("r1", "go", "look")]
    result = free_play(dreams, reals, encode)
    assert result["dream"]["success"] == 0.5
    assert (result["dream"]["n"], result["dream"]["failures"]) == (2, 1)
    assert result["dream"]["mean_turns"] == 1.5
    assert result["real"]["turns_quartiles"] == [2.5, 3.0, 3.5]
    assert result["dream"]["mean_reward"] == 0.5
    assert result["dream"]["tokens_per_observation"] == 2
    assert result["dream"]["tokens_per_action"] == pytest.approx((2 + 4 + 2) / 3)
    assert result["optimism_gap"]["value"] == 0.5
    low, high = result["optimism_gap"]["ci95"]
    # all of one task: half of it is [0.0004, 0.9996], none of it [0, 0.975]; Newcombe: 0.5 - hypot(0.4996, 0.975), ...
    assert (low, high) == pytest.approx((0.5 - math.hypot(0.499614, 0.975), 0.5 + 0.499614), abs=1e-4)


def test_without_reality_nothing_is_made_up() -> None:
    result = free_play([played("d", "go")], None, encode)
    assert result["real"] is None
    assert result["optimism_gap"] == {"value": None, "ci95": None}
    assert result["tokens"]["actions"]["jsd_bits"] is None
    assert result["actions"]["real"] == 0


def test_actions_are_ranked_by_their_share_in_either_world() -> None:
    dreams = [played("d", "go", "go", "go", "look")]
    table = action_table(dreams, [played("r", "take  it", "go")], limit=2)
    assert table["top"] == [{"action": "go", "dream": 3, "real": 1}, {"action": "take it", "dream": 0, "real": 1}]
    assert (table["dream"], table["real"], table["distinct_dream"], table["distinct_real"]) == (4, 2, 2, 2)


def test_a_divergence_that_chance_gives_is_told_from_one_that_it_does_not() -> None:
    same = [Counter({1: 5, 2: 5, k % 7 + 3: 2}) for k in range(40)]
    alike = token_divergence(same[::2], same[1::2])
    assert alike["jsd_bits"] <= alike["by_chance_p95"]
    other = token_divergence(same[:20], [Counter({9: 10}) for _ in range(20)])
    assert other["jsd_bits"] > 5 * other["by_chance_p95"]
    assert (other["dream_tokens"], other["real_tokens"]) == (240, 200)
    assert token_divergence(same, same[:3], seed=1) == token_divergence(same, same[:3], seed=1)
