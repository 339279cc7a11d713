"""If these fail, the audit's intervals promise more, or less, than was measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from worldmodel.evaluation.intervals import (
    bootstrap,
    clusters,
    estimate,
    over_tasks,
    proportion,
    ratio,
    student_quantile,
    sums_by_cluster,
    wilson,
)

Z = 1.959964


def score_limits_hold(share: float, n: float, interval: tuple[float, float]) -> None:
    """Wilson's limits x are where (share - x)² = z² x (1 - x) / n."""
    for x in interval:
        assert (share - x) ** 2 == pytest.approx(Z**2 * x * (1 - x) / n, abs=1e-6)


def test_wilson() -> None:
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # printed in textbooks
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1, 10)[1] == 1.0
    score_limits_hold(0.3, 7.5, wilson(0.3, 7.5))


@pytest.mark.parametrize(
    ("degrees", "t"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (4, 2.7764),
        (5, 2.5706),
        (6, 2.4469),
        (10, 2.2281),
        (30, 2.0423),
        (1000, 1.9623),
    ],
)
def test_student_quantile(degrees: int, t: float) -> None:
    assert student_quantile(degrees) == pytest.approx(t, rel=2e-3)


def test_a_cluster_counts_as_one_trial() -> None:
    """However many turns its episodes have: how alike they are is not known."""
    alone = proportion([True, False, True, True], ["a", "b", "c", "d"])
    assert (alone.value, alone.n, alone.ci95) == (0.75, 4, over_tasks(0.75, 4))
    hits, names = [name != "f" for name in "abcdef" for _ in range(10)], [n for n in "abcdef" for _ in range(10)]
    found = proportion(hits, names)
    assert (found.value, found.n) == (pytest.approx(5 / 6), 60)
    assert found.ci95 == pytest.approx((0.3588, 0.9958), abs=1e-4)  # five of six, printed in tables


def test_nothing_is_none() -> None:
    assert proportion([], []).to_json() == {"value": None, "n": 0, "ci95": None}
    assert estimate([], [], ratio, seed=0).value is None


def test_few_tasks_are_no_sample_of_tasks() -> None:
    tasks, episodes = ["a", "b", "c", "d"], ["1", "2", "3", "4"]
    assert clusters(tasks, episodes) is episodes
    assert clusters([*tasks, "e"], [*episodes, "5"]) == [*tasks, "e"]


def test_sums_by_cluster() -> None:
    assert sums_by_cluster([(1, 2), (3, 4), (5, 6)], ["a", "b", "a"]).tolist() == [[6, 8], [3, 4]]


def test_the_bootstrap_draws_whole_clusters() -> None:
    """Four hundred clusters of two equal values: the spread of a mean of 400, not of 800, values."""
    rng = np.random.default_rng(3)
    values = rng.normal(size=400)
    rows = [(v, 1.0) for v in values for _ in range(2)]
    names = [str(k) for k in range(400) for _ in range(2)]
    found = estimate(rows, names, ratio, seed=1)
    assert found.value == pytest.approx(values.mean())
    assert found.ci95 is not None
    half = (found.ci95[1] - found.ci95[0]) / 2
    assert half == pytest.approx(1.96 * values.std() / math.sqrt(400), rel=0.12)
    assert estimate(rows, names, ratio, seed=1).ci95 == found.ci95  # the seed decides
    assert estimate(rows, names, ratio, seed=2).ci95 != found.ci95


def test_the_bootstrap_gives_up_honestly() -> None:
    """One cluster has no spread; a ratio whose divisor hardly ever exists has no interval."""
    assert bootstrap(np.array([[1.0, 1.0]]), ratio, seed=0) is None
    mostly_undefined = np.array([[1.0, 1.0], *[[0.0, 0.0]] * 9])
    low, high = bootstrap(mostly_undefined, ratio, seed=0) or (0.0, 0.0)
    assert (low, high) == (1.0, 1.0)  # defined in 65 % of the resamples
    assert bootstrap(mostly_undefined, lambda total: None, seed=0) is None
