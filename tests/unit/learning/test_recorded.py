"""If these fail, real episodes are learned from too often, or without the tokens that the policy had sampled."""

from __future__ import annotations

import pytest

from imagination.learning.experience import RecordedGroups
from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory, Turn

TRACE = Trace((1,), (Owner.AGENT,), (-0.5,), (0,), 1.0)


def episode(
    group: str, number: int, trace: Trace | None = TRACE, stop: StopReason = StopReason.TURN_LIMIT
) -> Trajectory:
    said = (Turn("look", "A hall.", 0.0, False),)
    return Trajectory(f"{group}/{number}", group, group, Source.REAL, "policy", 0, "S", said, stop, trace=trace)


def test_groups_are_those_with_tokens_and_without_outages() -> None:
    crashed = StopReason.ENV_CRASHED
    played = [episode("a", 0), episode("b", 0, None), episode("a", 1), episode("c", 0, stop=crashed), episode("d", 0)]
    assert [[t.id for t in group] for group in RecordedGroups.of(played).groups] == [["a/0", "a/1"], ["d/0"]]


@pytest.mark.parametrize(
    ("before", "count", "dealt"),
    [(0, 2, "ab"), (2, 2, "ca"), (4, 5, "bc"), (6, 2, ""), (9, 1, ""), (0, 9, "abc"), (5, 1, "c")],
)
def test_each_group_is_dealt_twice_at_most(before: int, count: int, dealt: str) -> None:
    recorded = RecordedGroups.of([episode(name, k) for name in "abc" for k in range(2)])
    found = recorded.deal(before, count)
    assert [t.group_id for t in found] == [f"recorded/{name}" for name in dealt for _ in range(2)]
    assert [t.id for t in found] == [f"{name}/{k}" for name in dealt for k in range(2)]


def test_an_update_after_another_goes_on_where_that_stopped() -> None:
    recorded = RecordedGroups.of([episode(name, 0) for name in "abcde"])
    told = [t.task_id for k in range(6) for t in recorded.deal(2 * k, 2)]
    assert "".join(told) == "abcdeabcde"
