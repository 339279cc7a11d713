"""A number with its n and its 95 % interval, where the things counted come in clusters.

Turns of one episode, and episodes of one game, resemble each other: a hundred of them say less than a hundred
independent ones. Here whole clusters are what varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np

from real_envs.seeding import derive_seed

Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal distribution
_FEW = (12.706205, 4.302653, 3.182446, 2.776445)  # of Student's t with 1, 2, 3 and 4 degrees of freedom
FEW_TASKS = 5  # fewer tasks than this are no sample of tasks: then episodes are the clusters
RESAMPLES = 1000
Interval = tuple[float, float]
ANYWHERE: Interval = (-math.inf, math.inf)
SHARE: Interval = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number that was measured on ``n`` turns, pairs, episodes or policies; ``None``, not 0, where on nothing."""

    value: float | None
    n: int
    ci95: Interval | None = None

    def to_json(self) -> dict[str, Any]:
        """``{"value": 0.93, "n": 657, "ci95": [0.90, 0.95]}``."""
        return {"value": self.value, "n": self.n, "ci95": None if self.ci95 is None else list(self.ci95)}


def wilson(share: float, n: float) -> Interval:
    """Wilson's score interval at 95 % of a share of ``n`` independent trials; ``n`` may be an effective number.

    ``(p + z²/2n  ±  z · sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n)``, z = 1.96. Wilson, JASA 22 (1927) 209-212.
    """
    z2_n = Z95**2 / n
    centre = (share + z2_n / 2) / (1 + z2_n)
    half = Z95 / (1 + z2_n) * math.sqrt(share * (1 - share) / n + z2_n / (4 * n))
    low = 0.0 if share == 0 else centre - half  # exact, where rounding would leave 1e-17
    high = 1.0 if share == 1 else centre + half
    return low, high


@lru_cache(maxsize=4096)
def over_tasks(share: float, tasks: int) -> Interval:
    """A 95 % interval for success on *tasks like these*, of which ``tasks`` were drawn: each counts as one trial.

    Clopper and Pearson's interval (Biometrika 26, 1934, 404-413) of x = share * tasks successes, a fraction allowed:
    the 2.5 % quantile of Beta(x, n - x + 1) to the 97.5 % quantile of Beta(x + 1, n - x). How alike episodes of a task
    are is not known; the worst case, which it covers, is that a task is either always solved or never.

    Example::

        over_tasks(0.9, 10)  # (0.555, 0.9975): nine of ten
    """
    x = share * tasks
    low = 0.0 if x <= 0 else _beta_quantile(0.025, x, tasks - x + 1)
    high = 1.0 if x >= tasks else _beta_quantile(0.975, x + 1, tasks - x)
    return low, high


def _beta_quantile(p: float, a: float, b: float) -> float:
    """By bisection: the distribution function rises."""
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cdf(middle, a, b) < p else (low, middle)
    return (low + high) / 2


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22), to 1e-12.

    The fraction converges fast for x < (a + 1) / (a + b + 2); elsewhere I_x(a, b) = 1 - I_{1-x}(b, a).
    """
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_cdf(1 - x, b, a)
    front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    # the convergents A / B of 1 / (1 + d_1 / (1 + d_2 / ...)), A_k = A_{k-1} + d_k A_{k-2}, scaled against overflow
    before, now, last = (0.0, 1.0), (1.0, 1.0), math.inf
    for k in range(1, 10_000):
        m = k // 2
        if k % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        before, now = now, (now[0] + d * before[0], now[1] + d * before[1])
        before, now = (before[0] / now[1], before[1] / now[1]), (now[0] / now[1], 1.0)
        if abs(now[0] - last) < 1e-14:
            break
        last = now[0]
    return math.exp(front) / a * now[0]


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


def proportion(hits: Sequence[bool], cluster: Sequence[str], among: Sequence[bool] | None = None) -> Estimate:
    """A share of trials, with the interval in which each cluster counts as one trial (``over_tasks``).

    ``among``: which trials count, all by default.
    """
    if among is not None:
        hits, cluster = list(compress(hits, among)), list(compress(cluster, among))
    if not hits:
        return Estimate(None, 0)
    share = sum(hits) / len(hits)
    return Estimate(share, len(hits), over_tasks(share, len(set(cluster))))


def sums_by_cluster(rows: Sequence[Sequence[float]], cluster: Sequence[str]) -> np.ndarray:
    """``[clusters, columns]``: the rows of each cluster added up, in order of first appearance."""
    index: dict[str, int] = {}
    which = [index.setdefault(name, len(index)) for name in cluster]
    table = np.zeros((len(index), len(rows[0]) if rows else 0))
    np.add.at(table, which, np.asarray(rows, dtype=float).reshape(len(rows), -1))
    return table


def bootstrap(
    sums: np.ndarray,
    statistic: Callable[[np.ndarray], float | None],
    seed: int,
    bounds: Interval = ANYWHERE,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """The percentile interval of a function of sums, over clusters drawn with replacement, widened where they are few.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3; clusters whole, as Davison and Hinkley,
    Bootstrap Methods (1997), section 3.8. Percentiles of n clusters are too narrow by the factor
    ``sqrt((n - 1) / n) z / t`` (Hesterberg, The American Statistician 69, 2015, 371-386, section 5.2): both ends are
    moved away from the median by it, within what the statistic can be.

    Args:
        sums: ``[clusters, columns]``, what each cluster adds to the sums.
        statistic: of the sums ``[columns]``; ``None`` where they define none. Such resamples are left out.
        bounds: what the statistic can be at least and at most.

    Returns:
        ``None`` for fewer than two clusters, or where hardly any resample defines the statistic.
    """
    many = len(sums)
    if many < 2:
        return None
    drawn = np.random.default_rng(derive_seed("bootstrap", seed)).multinomial(many, [1 / many] * many, size=resamples)
    values = [value for total in drawn @ sums if (value := statistic(total)) is not None]
    return interval_of(values, many, bounds, resamples)


def interval_of(
    values: Sequence[float], many: int, bounds: Interval = ANYWHERE, resamples: int = RESAMPLES
) -> Interval | None:
    """The interval of ``bootstrap``, from the values of the statistic in those resamples of ``many`` clusters that
    define it."""
    if many < 2 or len(values) < resamples / 2:
        return None
    low, middle, high = np.quantile(values, [0.025, 0.5, 0.975])
    wider = math.sqrt(many / (many - 1)) * student_quantile(many - 1) / Z95
    return max(bounds[0], float(middle - wider * (middle - low))), min(
        bounds[1], float(middle + wider * (high - middle))
    )


def estimate(
    rows: Sequence[Sequence[float]],
    cluster: Sequence[str],
    statistic: Callable[[np.ndarray], float | None],
    seed: int,
    n: int | None = None,
    bounds: Interval = ANYWHERE,
) -> Estimate:
    """A function of the sums of ``rows [trials, columns]`` with its interval, see ``bootstrap``.

    Args:
        n: what to report as n; the number of trials by default.
    """
    size = len(rows) if n is None else n
    if not rows:
        return Estimate(None, size)
    sums = sums_by_cluster(rows, cluster)
    value = statistic(sums.sum(0))
    return Estimate(value, size, None if value is None else bootstrap(sums, statistic, seed, bounds))


def ratio(total: np.ndarray) -> float | None:
    """The first of two sums over the second: a mean where the second counts."""
    return float(total[0] / total[1]) if total[1] else None
