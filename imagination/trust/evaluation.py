"""How often does it succeed, and how sure can we be? Counts in, proportions with intervals out; no torch.

Example::

    >>> before, after = Proportion(20, 64), Proportion(41, 64)
    >>> after.to_json()
    {'success': 0.640625, 'n': 64, 'ci95': [0.518..., 0.747...], 'failures': 0}
    >>> difference_ci95(after, before)      # excludes 0: the change is more than chance
    (0.155..., 0.474...)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from real_envs.trajectory import StopReason, Trajectory

Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal distribution
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Proportion:
    """``successes`` of ``n`` independent trials.

    Attributes:
        successes: how many trials succeeded.
        n: how many trials count. Failures (a crashed environment) are no trials.
        failures: trials that were started and say nothing; carried along so that nobody overlooks them.

    Raises:
        ValueError: a count is negative, or there are more successes than trials.
    """

    successes: int
    n: int
    failures: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.successes <= self.n or self.failures < 0:
            raise ValueError(f"{self.successes} successes in {self.n} trials, {self.failures} failures: impossible")

    @property
    def rate(self) -> float | None:
        """Share of successes; ``None`` where nothing was tried, which is not 0."""
        return self.successes / self.n if self.n else None

    @property
    def ci95(self) -> Interval | None:
        """Wilson's score interval at 95 %; ``None`` where nothing was tried.

        With p = successes / n and z = 1.96::

            (p + z²/2n  ±  z · sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n)

        Unlike p ± z · sqrt(p(1 - p)/n) it stays within [0, 1] and has a width at 0 and n successes, which is where a
        policy that never or always succeeds sits. Wilson, JASA 22 (1927) 209-212; recommended for small n by Brown,
        Cai and DasGupta, Statistical Science 16 (2001) 101-133, eq. 4.
        """
        if not self.n:
            return None
        p, z2_n = self.successes / self.n, Z95**2 / self.n
        centre = (p + z2_n / 2) / (1 + z2_n)
        half = Z95 / (1 + z2_n) * math.sqrt(p * (1 - p) / self.n + z2_n / (4 * self.n))
        low = 0.0 if self.successes == 0 else centre - half  # exact, where rounding would leave 1e-17
        high = 1.0 if self.successes == self.n else centre + half
        return low, high

    def to_json(self) -> dict[str, Any]:
        """``{"success": rate, "n": .., "ci95": [low, high], "failures": ..}``; rate and interval null for n = 0."""
        interval = self.ci95
        return {
            "success": self.rate,
            "n": self.n,
            "ci95": None if interval is None else list(interval),
            "failures": self.failures,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Proportion:
        """The inverse of ``to_json``; a rounded rate finds its way back to the count."""
        successes = 0 if data["success"] is None else round(data["success"] * data["n"])
        return cls(successes=successes, n=int(data["n"]), failures=int(data.get("failures") or 0))


def difference_ci95(a: Proportion, b: Proportion) -> Interval | None:
    """95 % interval of ``a.rate - b.rate`` for independent samples; ``None`` where either has no trials.

    Newcombe's hybrid score interval: with Wilson's limits (l, u) of each and d = pa - pb::

        d - sqrt((pa - la)² + (ub - pb)²)   to   d + sqrt((ua - pa)² + (pb - lb)²)

    Newcombe, Statistics in Medicine 17 (1998) 873-890, method 10. Where both were measured on the same tasks and
    seeds the samples are paired, and the interval is a little wider than it needs to be.
    """
    if a.rate is None or b.rate is None or a.ci95 is None or b.ci95 is None:
        return None
    (low_a, high_a), (low_b, high_b), d = a.ci95, b.ci95, a.rate - b.rate
    return d - math.hypot(a.rate - low_a, high_b - b.rate), d + math.hypot(high_a - a.rate, b.rate - low_b)


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """What a set of episodes says.

    Attributes:
        success: solved episodes among those that count; ``success.failures`` holds those that do not.
        mean_turns: turns per counted episode, without a prefix copied from a log; ``None`` where none counts.
        stops: how many episodes ended for each reason, failures included, most frequent first.
    """

    success: Proportion
    mean_turns: float | None
    stops: Mapping[StopReason, int]

    @property
    def failures(self) -> dict[StopReason, int]:
        """The failures among ``stops``."""
        return {stop: count for stop, count in self.stops.items() if stop.is_failure}

    def to_json(self) -> dict[str, Any]:
        """``Proportion.to_json`` and, beside it, ``mean_turns`` and ``stops``."""
        stops = {str(stop): count for stop, count in self.stops.items()}
        return {**self.success.to_json(), "mean_turns": self.mean_turns, "stops": stops}


def summarise(trajectories: Iterable[Trajectory]) -> EpisodeSummary:
    """Counts a set of episodes. A truncated episode is an unsolved one, and so is a malformed dream.

    An outage is not an episode at all.
    """
    episodes = list(trajectories)
    counted = [t for t in episodes if not t.stop.is_outage]
    turns = sum(len(t.own_turns) for t in counted)
    return EpisodeSummary(
        success=Proportion(
            successes=sum(t.solved for t in counted), n=len(counted), failures=len(episodes) - len(counted)
        ),
        mean_turns=turns / len(counted) if counted else None,
        stops=dict(Counter(t.stop for t in episodes).most_common()),
    )
