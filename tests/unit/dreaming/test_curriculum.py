"""If these fail, dreams are longer than the schedule says, where the world model may be wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from imagination.dreaming.curriculum import check_horizon, turns_at
from imagination.learning.collector import longest_turns
from imagination.settings import Config
from imagination.settings.compose import load_config
from imagination.stages.check_train import check

POINTS = [[0, 4], [8, 12], [10, 6]]


def test_the_horizon_of_every_update_by_hand() -> None:
    steps = [turns_at(u, POINTS, "steps", 20) for u in range(12)]
    assert steps == [4, 4, 4, 4, 4, 4, 4, 4, 12, 12, 6, 6]
    linear = [turns_at(u, POINTS, "linear", 20) for u in range(12)]
    assert linear == [4, 5, 6, 7, 8, 9, 10, 11, 12, 9, 6, 6]
    assert turns_at(3, [[0, 2], [4, 3]], "linear", 20) == 3  # 2.75


def test_without_a_schedule_the_horizon_is_the_settings_own() -> None:
    assert [turns_at(u, [], shape, 9) for u in (0, 50) for shape in ("steps", "linear")] == [9] * 4


def test_growing_horizons_equal_a_plain_loop() -> None:
    """TTI: every so many updates by a factor, or by turns, and never beyond the limit; whole turns, rounded down."""
    doubled = [turns_at(u, [[0, 10]], "multiply", 30) for u in range(5)]
    assert doubled == [10, 20, 30, 30, 30]
    for shape, every, growth in (("multiply", 3, 1.5), ("multiply", 1, 2.0), ("add", 2, 1.0), ("add", 1, 0.5)):
        turns = 4.0
        for update in range(40):
            if update and update % every == 0:
                turns = min(turns * growth if shape == "multiply" else turns + growth, 17.0)
            assert turns_at(update, [[0, 4]], shape, 17, every, growth) == math.floor(turns), (shape, update)
    assert turns_at(10**6, [[0, 1]], "multiply", 12) == 12  # no overflow


@pytest.mark.parametrize("source", ["dream", "real"])
def test_the_horizon_is_that_of_dreams_and_of_the_control(source: str) -> None:
    config = load_config([f"train.world={source}", "dream.horizon=[[0,3]]", "dream.horizon_shape=multiply"], Config)
    check(config)
    assert [longest_turns(config.dream, u) for u in range(4)] == [3, 6, 12, 12]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": "multiply", "growth": 1.0}, "a factor above 1"),
        ({"shape": "add", "growth": 0.0}, "turns above 0"),
        ({"shape": "add", "every": 0}, "horizon_every must be 1 or more"),
    ],
)
def test_growth_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    wrong = check_horizon([[0, 4]], 12, **changes)
    assert wrong is not None
    assert said in wrong
    assert check_horizon([[0, 4]], 12, "multiply", 2, 1.5) is check_horizon([[0, 4]], 12, "add", 1, 1.0) is None
    for horizon in ([], POINTS):
        assert "grows from one point" in (check_horizon(horizon, 12, **{**changes, "every": 1, "growth": 2.0}) or "")


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
