"""A number with its n and its 95 % interval, where the things counted come in clusters.

Turns of one episode, and episodes of one game, resemble each other: a hundred of them say less than a hundred
independent ones. Here whole clusters are what varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal distribution
_FEW = (12.706205, 4.302653, 3.182446, 2.776445)  # of Student's t with 1, 2, 3 and 4 degrees of freedom
FEW_TASKS = 5  # fewer tasks than this are no sample of tasks: then episodes are the clusters
RESAMPLES = 1000
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was measured.

    Attributes:
        value: ``None`` where there was nothing to measure, which is not 0.
        n: how many turns, pairs, episodes or policies it was measured on.
        ci95: ``None`` where no interval can be given.
    """

    value: float | None
    n: int
    ci95: Interval | None = None

    def to_json(self) -> dict[str, Any]:
        """``{"value": 0.93, "n": 657, "ci95": [0.90, 0.95]}``."""
        return {"value": self.value, "n": self.n, "ci95": None if self.ci95 is None else list(self.ci95)}


def wilson(share: float, n: float) -> Interval:
    """Wilson's score interval at 95 % of a share of ``n`` independent trials; ``n`` may be an effective number.

    With z = 1.96::

        (p + z²/2n  ±  z · sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n)

    Wilson, JASA 22 (1927) 209-212. Unlike p ± z · sqrt(p(1 - p)/n) it stays in [0, 1] and has a width at 0 and 1.
    """
    z2_n = Z95**2 / n
    centre = (share + z2_n / 2) / (1 + z2_n)
    half = Z95 / (1 + z2_n) * math.sqrt(share * (1 - share) / n + z2_n / (4 * n))
    low = 0.0 if share == 0 else centre - half  # exact, where rounding would leave 1e-17
    high = 1.0 if share == 1 else centre + half
    return low, high


def student_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, to 0.2 %: a table up to four degrees of freedom, a series from
    five on (Abramowitz and Stegun 26.7.5), which is 24 % too small at one."""
    if degrees <= len(_FEW):
        return _FEW[degrees - 1]
    z, v = Z95, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def clusters(tasks: Sequence[str], episodes: Sequence[str]) -> Sequence[str]:
    """By what to cluster: by task where there are at least ``FEW_TASKS`` of them, by episode otherwise."""
    return tasks if len(set(tasks)) >= FEW_TASKS else episodes


def proportion(hits: Sequence[bool], cluster: Sequence[str]) -> Estimate:
    """A share, with Wilson's interval for the number of independent trials that the clusters are worth.

    The design effect is the variance of the share between clusters over that of independent trials, both estimated
    without bias, so that it is 1 where each trial is its own cluster. Where it exceeds 1, n is divided by it and by
    (t/z)², t having one degree of freedom less than there are clusters (Korn and Graubard, Survey Methodology 24, 1998,
    193-201; with Wilson's interval as in Franco et al., JSSAM 7, 2019). Shares of exactly 0 or 1 do not tell how far
    clusters differ: their trials count as independent, and their intervals are too narrow where clusters do.

    Args:
        hits: one entry a trial.
        cluster: of each trial.
    """
    n = len(hits)
    if not n:
        return Estimate(None, 0)
    counts: dict[str, tuple[int, int]] = {}
    for hit, name in zip(hits, cluster, strict=True):
        good, size = counts.get(name, (0, 0))
        counts[name] = good + bool(hit), size + 1
    share, effective, many = sum(hits) / n, float(n), len(counts)
    if many > 1 and 0 < share < 1:
        spread = sum((good - share * size) ** 2 for good, size in counts.values()) / n**2 * many / (many - 1)
        effect = spread / (share * (1 - share) / (n - 1))
        if effect > 1 + 1e-9:  # what rounding leaves is no effect
            effective = max(1.0, n / effect * (Z95 / student_quantile(many - 1)) ** 2)
    return Estimate(share, n, wilson(share, effective))


def sums_by_cluster(rows: Sequence[Sequence[float]], cluster: Sequence[str]) -> np.ndarray:
    """``[clusters, columns]``: the rows of each cluster added up, in order of first appearance."""
    index: dict[str, int] = {}
    which = [index.setdefault(name, len(index)) for name in cluster]
    table = np.zeros((len(index), len(rows[0]) if rows else 0))
    np.add.at(table, which, np.asarray(rows, dtype=float).reshape(len(rows), -1))
    return table


def bootstrap(
    sums: np.ndarray, statistic: Callable[[np.ndarray], float | None], seed: int, resamples: int = RESAMPLES
) -> Interval | None:
    """The percentile interval of a function of sums, over clusters drawn with replacement.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3; clusters whole, as Davison and Hinkley,
    Bootstrap Methods (1997), section 3.8. With few clusters it is too narrow rather than too wide.

    Args:
        sums: ``[clusters, columns]``, what each cluster adds to the sums.
        statistic: of the sums ``[columns]``; ``None`` where they define none (nothing to divide by). Such resamples are
            left out.

    Returns:
        ``None`` for fewer than two clusters, or where hardly any resample defines the statistic.
    """
    many = len(sums)
    if many < 2:
        return None
    drawn = np.random.default_rng(seed).multinomial(many, [1 / many] * many, size=resamples)
    values = [value for total in drawn @ sums if (value := statistic(total)) is not None]
    if len(values) < resamples / 2:
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def estimate(
    rows: Sequence[Sequence[float]],
    cluster: Sequence[str],
    statistic: Callable[[np.ndarray], float | None],
    seed: int,
    n: int | None = None,
) -> Estimate:
    """A function of the sums of ``rows`` with its bootstrap interval.

    Args:
        rows: ``[trials, columns]``.
        cluster: of each trial.
        statistic: see ``bootstrap``.
        n: what to report as n; the number of trials by default.
    """
    size = len(rows) if n is None else n
    if not rows:
        return Estimate(None, size)
    sums = sums_by_cluster(rows, cluster)
    value = statistic(sums.sum(0))
    return Estimate(value, size, None if value is None else bootstrap(sums, statistic, seed))


def ratio(total: np.ndarray) -> float | None:
    """The first of two sums over the second: a mean where the second counts."""
    return float(total[0] / total[1]) if total[1] else None
