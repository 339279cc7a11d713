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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from real_envs.trajectory import StopReason, Trajectory
from worldmodel.evaluation.intervals import Interval, over_tasks, wilson

FEWEST_PAIRS = 10  # tasks; the correlation of fewer is too uncertain to narrow an interval by


@dataclass(frozen=True, slots=True)
class Proportion:
    """``successes`` of ``n`` trials.

    Attributes:
        failures: trials that were started and say nothing (a crashed environment); not among ``n``.
        by_task: successes and trials of each task; without tasks the trials are independent.

    Raises:
        ValueError: a count is negative, or there are more successes than trials.
    """

    successes: int
    n: int
    failures: int = 0
    by_task: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.successes <= self.n or self.failures < 0:
            raise ValueError(f"{self.successes} successes in {self.n} trials, {self.failures} failures: impossible")

    @property
    def rate(self) -> float | None:
        return self.successes / self.n if self.n else None

    @property
    def ci95(self) -> Interval | None:
        """At 95 %, for tasks like these (``over_tasks``); Wilson's for independent trials; ``None`` without any.

        Wilson's is recommended for small n by Brown, Cai and DasGupta, Statistical Science 16 (2001) 101-133, eq. 4.
        """
        if not self.n:
            return None
        share = self.successes / self.n
        return over_tasks(share, len(self.by_task)) if self.by_task else wilson(share, self.n)

    @property
    def cell(self) -> str:
        """As tables show it: ``0.36 [0.05, 0.80]``, or a dash where nothing was tried."""
        return proportion(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """``{"success": rate, "n": .., "ci95": [low, high], "failures": ..}``; rate and interval null for n = 0.

        With tasks also ``tasks``, their number, and ``by_task``, a list of ``[task, successes, trials]``.
        """
        tasks = [[task, *counts] for task, counts in self.by_task.items()]
        return {
            "success": self.rate,
            "n": self.n,
            "ci95": None if self.ci95 is None else list(self.ci95),
            "failures": self.failures,
            **({"tasks": len(tasks), "by_task": tasks} if tasks else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Proportion:
        """The inverse of ``to_json``; a rounded rate finds its way back to the count."""
        successes = 0 if data["success"] is None else round(data["success"] * data["n"])
        by_task = {str(task): (int(good), int(n)) for task, good, n in data.get("by_task") or ()}
        return cls(successes, int(data["n"]), int(data.get("failures") or 0), by_task)


def pooled(parts: Sequence[Proportion]) -> Proportion:
    """All trials together; those of one task stay trials of one task."""
    by_task: dict[str, tuple[int, int]] = {}
    for part in parts:
        for task, (good, n) in part.by_task.items():
            before = by_task.get(task, (0, 0))
            by_task[task] = before[0] + good, before[1] + n
    return Proportion(sum(p.successes for p in parts), sum(p.n for p in parts), sum(p.failures for p in parts), by_task)


def difference_ci95(a: Proportion, b: Proportion) -> Interval | None:
    """95 % interval of ``a.rate - b.rate``, paired where both were measured on the same tasks; ``None`` without trials.

    Newcombe's hybrid interval: with the limits (l, u) of each, d = pa - pb and the correlation r of the tasks' rates::

        d - sqrt((pa - la)² - 2 r (pa - la)(ub - pb) + (ub - pb)²)
        d + sqrt((ua - pa)² - 2 r (ua - pa)(pb - lb) + (pb - lb)²)

    Newcombe, Statistics in Medicine 17 (1998) 873-890, method 10, and 2635-2650, method 10, for pairs. Samples that
    share no tasks have r = 0.
    """
    if a.rate is None or b.rate is None or a.ci95 is None or b.ci95 is None:
        return None
    (low_a, high_a), (low_b, high_b), d = a.ci95, b.ci95, a.rate - b.rate
    r = _correlation(a, b)

    def half(x: float, y: float) -> float:
        return math.sqrt(max(x**2 - 2 * r * x * y + y**2, 0.0))

    return d - half(a.rate - low_a, high_b - b.rate), d + half(high_a - a.rate, b.rate - low_b)


def _correlation(a: Proportion, b: Proportion) -> float:
    """Of the rates of tasks that both were measured on, if these are all; 0 where it is negative or not defined."""
    if a.by_task.keys() != b.by_task.keys() or len(a.by_task) < FEWEST_PAIRS:
        return 0.0
    rates = np.array([[good / n for good, n in (a.by_task[task], b.by_task[task])] for task in a.by_task])
    if (rates.min(0) == rates.max(0)).any():  # of equal rates, rounding makes a deviation that is not quite 0
        return 0.0
    return max(float(np.corrcoef(rates.T)[0, 1]), 0.0)


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """What a set of episodes says; ``mean_turns`` is without a prefix copied from a log, ``stops`` with failures."""

    success: Proportion
    mean_turns: float | None
    stops: Mapping[StopReason, int]

    @property
    def failures(self) -> dict[StopReason, int]:
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
        success=_share([(t.task_id, t.solved) for t in counted], len(episodes) - len(counted)),
        mean_turns=turns / len(counted) if counted else None,
        stops=dict(Counter(t.stop for t in episodes).most_common()),
    )


def noted(trajectories: Iterable[Trajectory]) -> dict[str, Proportion]:
    """How often each note that is true or false holds at the end of an episode, such as ``injected`` of AgentDojo, of
    the episodes whose last turn has it."""
    ends = [(t.task_id, t.turns[-1].info) for t in trajectories if t.turns and not t.stop.is_outage]
    names = {name: None for _, info in ends for name, value in info.items() if isinstance(value, bool)}
    return {
        name: _share([(task, info[name]) for task, info in ends if isinstance(info.get(name), bool)]) for name in names
    }


def _share(hits: Sequence[tuple[str, Any]], failures: int = 0) -> Proportion:
    by_task: dict[str, tuple[int, int]] = {}
    for task, hit in hits:
        good, n = by_task.get(task, (0, 0))
        by_task[task] = good + bool(hit), n + 1
    return Proportion(sum(bool(hit) for _, hit in hits), len(hits), failures, by_task)


def number(value: float | None, digits: int = 2) -> str:
    """``0.31``; a dash where there is nothing, which is not zero."""
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")


def interval(ci95: Sequence[float] | None, *, with_sign: bool = False) -> str:
    """``[0.20, 0.44]``; empty where there is none."""
    return "" if ci95 is None else "[{}, {}]".format(*(signed(x) if with_sign else number(x) for x in ci95))


def count(n: int | None, noun: str) -> str:
    """``0 real steps``, ``1 real step``, ``12,400 real steps``."""
    return f"an unknown number of {noun}s" if n is None else f"{n:,} {noun}{'' if n == 1 else 's'}"


def proportion(data: Mapping[str, Any] | None) -> str:
    """``0.31 [0.21, 0.43]``."""
    if data is None or data["success"] is None:
        return "–"
    return f"{number(data['success'])} {interval(data['ci95'])}".rstrip()
