"""If these fail, an interval that claims to cover 95 times in 100 does not where episodes of a task are alike.

Tasks are drawn with success rates of their own (a beta distribution), episodes of a task with that rate. ``alike`` is
the correlation of two episodes of a task: at 0.9 most tasks are always solved or never.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from worldmodel.evaluation.intervals import beta_cdf, bootstrap, over_tasks, wilson
from worldmodel.evaluation.proportions import Proportion, difference_ci95

LEAST = 0.93
RUNS = 400


def success(rng: np.random.Generator, rate: float, alike: float, tasks: int, episodes: int) -> np.ndarray:
    """Solved episodes ``[run, task]``."""
    a, b = rate * (1 - alike) / alike, (1 - rate) * (1 - alike) / alike
    return rng.binomial(episodes, rng.beta(a, b, (RUNS, tasks)))


def measured(solved: np.ndarray, episodes: int) -> Proportion:
    by_task = {str(task): (int(good), episodes) for task, good in enumerate(solved)}
    return Proportion(int(solved.sum()), episodes * len(solved), 0, by_task)


@pytest.mark.parametrize("tasks", [5, 6, 20, 100])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9, 0.98])
def test_success_is_covered_over_tasks(rate: float, tasks: int) -> None:
    for alike in (0.02, 0.3, 0.6, 0.9):
        drawn = success(np.random.default_rng(tasks), rate, alike, tasks, 20)
        covered = [low <= rate <= high for low, high in (measured(run, 20).ci95 or (1, 0) for run in drawn)]
        assert np.mean(covered) >= LEAST, alike


def test_episodes_counted_as_independent_would_not_be_covered() -> None:
    """Six games of which some are learned and some are not: Wilson's interval of 240 episodes covers hardly half."""
    drawn = success(np.random.default_rng(0), 0.7, 0.6, 6, 40).sum(1) / 240
    assert np.mean([low <= 0.7 <= high for low, high in (wilson(share, 240) for share in drawn)]) < 0.6


@pytest.mark.parametrize("tasks", [6, 20, 100])
def test_differences_are_covered_over_tasks(tasks: int) -> None:
    """Two policies on the same tasks: what one solves, the other solves more often."""
    for alike, (rate, gain) in itertools.product((0.1, 0.6), ((0.3, 0.2), (0.5, 0.0), (0.7, 0.25))):
        rng = np.random.default_rng(tasks)
        a, b = rate * (1 - alike) / alike, (1 - rate) * (1 - alike) / alike
        before = rng.beta(a, b, (RUNS, tasks))
        after = before + gain / (1 - rate) * (1 - before)  # the mean rises by gain
        drawn = [rng.binomial(10, p) for p in (after, before)]
        found = [difference_ci95(measured(x, 10), measured(y, 10)) or (1, 0) for x, y in zip(*drawn, strict=True)]
        assert np.mean([low <= gain <= high for low, high in found]) >= LEAST, (alike, rate, gain)


def test_pairs_narrow_a_difference() -> None:
    rng = np.random.default_rng(0)
    hard = rng.beta(0.7, 0.7, 100)
    before, after = (measured(rng.binomial(10, p), 10) for p in (hard, np.minimum(hard + 0.1, 1)))
    renamed = Proportion(after.successes, after.n, 0, {f"other {k}": v for k, v in after.by_task.items()})
    (low, high), (low_apart, high_apart) = (difference_ci95(x, before) or (0, 0) for x in (after, renamed))
    assert high - low < 0.5 * (high_apart - low_apart)


@pytest.mark.parametrize("clusters", [5, 6, 20])
@pytest.mark.parametrize("spread", ["normal", "skewed"])
def test_bootstraps_of_few_clusters_are_covered(clusters: int, spread: str) -> None:
    """A mean over clusters of ten, with an effect of each cluster; plain percentiles of five cover 0.82 to 0.87."""
    rng = np.random.default_rng(clusters)
    covered = []
    for run in range(RUNS):
        effect = rng.normal(0, 1, clusters) if spread == "normal" else rng.gamma(4, 0.5, clusters) - 2
        values = effect[:, None] + rng.normal(0, 1, (clusters, 10))
        sums = np.stack([values.sum(1), np.full(clusters, 10.0)], 1)
        low, high = bootstrap(sums, lambda total: float(total[0] / total[1]), run, resamples=500) or (1, 0)
        covered.append(low <= 0 <= high)
    assert np.mean(covered) >= (LEAST if spread == "normal" else 0.9)


def test_the_incomplete_beta_function_by_known_values() -> None:
    """I_x(1, 1) = x, I_x(1, b) = 1 - (1 - x)^b, and the upper tail of ten fair coins: P(at least 8) = 56 / 1024."""
    assert beta_cdf(0.3, 1, 1) == pytest.approx(0.3, abs=1e-12)
    assert beta_cdf(0.2, 1, 5) == pytest.approx(1 - 0.8**5, abs=1e-12)
    assert beta_cdf(0.5, 8, 3) == pytest.approx(56 / 1024, abs=1e-12)
    assert (beta_cdf(0.0, 2, 3), beta_cdf(1.0, 2, 3)) == (0.0, 1.0)
    total = sum(x**1.3 * (1 - x) ** 4.1 for x in (np.arange(200_000) + 0.5) / 200_000)
    part = sum(x**1.3 * (1 - x) ** 4.1 for x in (np.arange(80_000) + 0.5) / 200_000)
    assert beta_cdf(0.4, 2.3, 5.1) == pytest.approx(part / total, abs=1e-8)


def test_intervals_over_tasks_by_hand() -> None:
    """None of n: 1 - 0.025^(1/n); nine of ten is printed in tables."""
    assert over_tasks(0.0, 6) == pytest.approx((0.0, 1 - 0.025 ** (1 / 6)))
    assert over_tasks(1.0, 6) == pytest.approx((0.025 ** (1 / 6), 1.0))
    assert over_tasks(0.9, 10) == pytest.approx((0.5550, 0.9975), abs=1e-4)
    assert over_tasks(0.45, 10)[0] < 0.45 < over_tasks(0.45, 10)[1]
