"""Intervals against published and hand-computed numbers: a wrong one lets a report claim a gain that is noise."""

from dataclasses import replace

import pytest

from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.evaluation.proportions import Proportion, difference_ci95, summarise


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # by hand, z² = 3.8415: 5/10 -> 0.5 ± 1.9600 / 1.38415 · sqrt(0.025 + 0.0096036) = 0.5 ± 0.2634
        (5, 10, 0.2366, 0.7634),
        # by hand, all of n: low = n / (n + z²) = 10 / 13.8415
        (10, 10, 0.7225, 1.0000),
        # by hand, none of n: high = z² / (n + z²) = 3.8415 / 4.8415
        (0, 1, 0.0000, 0.7935),
    ],
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    assert Proportion(successes, n).ci95 == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("a", "b", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 873-890, table II, method 10
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 20), 0.6791, 1.0000),
    ],
)
def test_interval_of_a_difference(a: tuple[int, int], b: tuple[int, int], low: float, high: float) -> None:
    assert difference_ci95(Proportion(*a), Proportion(*b)) == pytest.approx((low, high), abs=5e-5)


def test_tasks_that_all_fare_alike_do_not_correlate() -> None:
    """One of ten and three of ten in each task: the deviations are rounding alone, and would count as r = 1."""
    one, three = (Proportion(12 * k, 120, by_task={f"t{i}": (k, 10) for i in range(12)}) for k in (1, 3))
    apart = replace(three, by_task={f"other {task}": counts for task, counts in three.by_task.items()})
    assert difference_ci95(one, three) == difference_ci95(one, apart)


def test_the_extremes_are_exact() -> None:
    for n in range(1, 200):
        none, all_of_them = Proportion(0, n).ci95, Proportion(n, n).ci95
        assert none is not None
        assert all_of_them is not None
        assert none[0] == 0.0
        assert all_of_them[1] == 1.0


def test_nothing_tried_is_not_zero() -> None:
    empty = Proportion(0, 0, failures=3)
    assert empty.rate is None
    assert empty.to_json() == {"success": None, "n": 0, "ci95": None, "failures": 3}
    assert difference_ci95(empty, Proportion(1, 2)) is None


@pytest.mark.parametrize("counts", [(3, 2, 0), (-1, 2, 0), (0, 0, -1)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        Proportion(*counts)


def test_json_round_trip_survives_a_rounded_rate() -> None:
    assert Proportion.from_json({"success": 0.333, "n": 3, "ci95": [0.06, 0.79]}) == Proportion(1, 3)
    assert Proportion.from_json(Proportion(7, 9, failures=2).to_json()) == Proportion(7, 9, failures=2)


def episode(rewards: list[float | None], stop: StopReason, prefix: int = 0) -> Trajectory:
    turns = tuple(Turn("look", "A room.", reward=r, terminated=False) for r in rewards)
    return Trajectory("id", "task", "group", Source.REAL, "policy", 0, "start", turns, stop, prefix_turns=prefix)


def test_outages_are_counted_and_are_no_trials() -> None:
    summary = summarise(
        [
            episode([0.0, 1.0], StopReason.TERMINATED),
            episode([0.0, 0.0, 0.0, 0.0], StopReason.TURN_LIMIT),
            episode([0.0, None, 0.0], StopReason.UNSURE, prefix=2),  # one turn of its own
            episode([1.0], StopReason.ENV_CRASHED),  # a reward before the crash is no success
            episode([], StopReason.PREDICTION_INVALID),  # lost: the policy's own action provoked it
        ]
    )
    assert summary.success == Proportion(1, 4, failures=1)
    assert summary.mean_turns == pytest.approx((2 + 4 + 1 + 0) / 4)
    assert summary.failures == {StopReason.ENV_CRASHED: 1, StopReason.PREDICTION_INVALID: 1}
    assert sum(summary.stops.values()) == 5
    assert summary.to_json()["stops"]["turn_limit"] == 1


def test_no_episodes_have_no_mean() -> None:
    summary = summarise([])
    assert summary.mean_turns is None
    assert summary.success.rate is None
