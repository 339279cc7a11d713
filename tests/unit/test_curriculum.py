"""If these fail, dreams are longer than the schedule says, where the world model may be wrong."""

from __future__ import annotations

import pytest

from imagination.curriculum import check_horizon, turns_at

POINTS = [[0, 4], [8, 12], [10, 6]]


def test_the_horizon_of_every_update_by_hand() -> None:
    steps = [turns_at(u, POINTS, "steps", 20) for u in range(12)]
    assert steps == [4, 4, 4, 4, 4, 4, 4, 4, 12, 12, 6, 6]
    linear = [turns_at(u, POINTS, "linear", 20) for u in range(12)]
    assert linear == [4, 5, 6, 7, 8, 9, 10, 11, 12, 9, 6, 6]
    assert turns_at(3, [[0, 2], [4, 3]], "linear", 20) == 3  # 2.75


def test_without_a_schedule_the_horizon_is_the_settings_own() -> None:
    assert [turns_at(u, [], shape, 9) for u in (0, 50) for shape in ("steps", "linear")] == [9] * 4


@pytest.mark.parametrize(
    ("horizon", "said"),
    [
        ([[0, 4], [3]], "a list of"),
        ([[1, 4]], "from 0"),
        ([[0, 4], [5, 6], [5, 8]], "must rise"),
        ([[0, 0]], "between 1 and dream.max_turns=12"),
        ([[0, 4], [9, 13]], "between 1 and dream.max_turns=12"),
    ],
)
def test_a_schedule_that_cannot_be(horizon: list[list[int]], said: str) -> None:
    wrong = check_horizon(horizon, 12)
    assert wrong is not None
    assert said in wrong
    assert check_horizon(POINTS, 12) is check_horizon([], 12) is None
