"""Who solved a task. If these fail, success rates of a log are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from real_envs.importers.judging import judged
from real_envs.trajectory import Source, StopReason, Trajectory, Turn


def episode(*rewards: float | None, success: bool | None = None) -> Trajectory:
    turns = tuple(Turn(f"a{k}", "o", reward, False) for k, reward in enumerate(rewards))
    return Trajectory("e", "t", "g", Source.REAL, "a", 0, "s", turns, StopReason.TURN_LIMIT, success=success)


@pytest.mark.parametrize(
    ("found", "solved_at", "success"),
    [
        (episode(20.0, 30.0), 50.0, True),
        (episode(20.0, 29.0), 50.0, False),
        (episode(-3.0, -2.0), -5.0, True),  # costs
        (episode(None, None), 50.0, None),  # nobody measured anything: unknown, and not guessed
        (episode(20.0, 30.0), None, None),
        (episode(0.0, success=True), 50.0, True),  # what is stated stays
        (episode(90.0, success=False), 50.0, False),
    ],
)
def test_the_threshold_judges_who_does_not_say(
    found: Trajectory, solved_at: float | None, success: bool | None
) -> None:
    assert judged(found, solved_at).success is success
    assert [turn.reward for turn in judged(found, solved_at).turns] == [turn.reward for turn in found.turns]


def test_a_bare_success_is_earned_at_the_end() -> None:
    assert [turn.reward for turn in judged(episode(None, None, success=True)).turns] == [0.0, 1.0]
    assert [turn.reward for turn in judged(episode(None, None, success=False)).turns] == [0.0, 0.0]


def test_a_bare_success_is_worth_what_solves_in_this_log() -> None:
    assert [turn.reward for turn in judged(episode(None, None, success=True), 10.0).turns] == [0.0, 10.0]
    assert [turn.reward for turn in judged(episode(None, success=True), -5.0).turns] == [None]  # costs: 0 would solve


def test_what_broke_is_not_judged() -> None:
    broken = replace(episode(None, success=True), stop=StopReason.ENV_CRASHED)
    assert judged(broken, 1.0) == broken
