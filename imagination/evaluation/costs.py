"""What the same success would have cost without dreams, by the curve of a control. Numbers only.

Example::

    control = Control(steps=(0, 100, 200, 300), success=(0.2, 0.4, 0.6, 0.8), groups=(4, 4, 4, 4), total=400)
    steps_to_reach(control, 0.6)  # 100: on the mean of three updates from the second one, 0.6, it is reached
    steps_to_reach(control, 0.9)  # None: not within the 400 steps that the control took
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

from imagination.evaluation.proportions import Proportion
from real_envs.streams import stream_seed
from worldmodel.evaluation.intervals import RESAMPLES, Z95

WINDOW = 3  # updates of the running mean: the first high one of a noisy curve is luck
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Control:
    """A training of the same clone in real games, by the real episodes that it played while it learned.

    Attributes:
        steps: real steps taken before each update, rising from 0.
        success: of the episodes of each update, in [0, 1].
        groups: of episodes (one task each) that an update played. Episodes of a task resemble each other, so a group
            counts as one trial, the worst case (see ``over_tasks``).
        total: real steps of the whole training.
        after: success of the policy that it ended with, where that was measured as the run's own was.
    """

    steps: tuple[int, ...]
    success: tuple[float, ...]
    groups: tuple[int, ...]
    total: int
    after: Proportion | None = None


def read_control(metrics: Sequence[Row], rollouts: Sequence[Row], after: Proportion | None = None) -> Control | None:
    """From the rows of a run folder that was trained with ``train.world=real``.

    An update in which no episode counts (all of them crashed) has no success; its steps are counted.

    Returns:
        ``None`` where no real episode was played, or the training was one in dreams.
    """
    lines = sorted((row for row in metrics if row.get("stage") == "train"), key=lambda row: row["step"])
    if any("dream_success" in row for row in lines):
        return None
    groups = Counter(row.get("step") for row in rollouts if row.get("stage") == "train")
    spent, points = 0, []
    for row in lines:
        if row.get("real_success") is not None:
            points.append((spent, float(row["real_success"]), max(1, groups[row["step"]])))
        spent += int(row.get("turns", 0))
    if not points:
        return None
    steps, success, played = zip(*points, strict=True)
    return Control(steps, success, played, spent, after)


def running_mean(success: ArrayLike, window: int = WINDOW) -> np.ndarray:
    """Of ``window`` updates, each and those after it: ``[..., updates]`` to ``[..., updates - window + 1]``.

    Fewer updates than that have one mean, of them all.
    """
    success = np.asarray(success, dtype=float)
    return sliding_window_view(success, min(window, success.shape[-1]), axis=-1).mean(-1)


def steps_to_reach(control: Control, success: float, window: int = WINDOW) -> int | None:
    """Real steps before the first update from which the running mean is at least ``success``.

    What comes later in the window counts for the control and its steps do not, which makes the control look cheaper
    than it is, not dearer. Where no window reaches it and the policy at the end does, it took all steps.

    Returns:
        0 where the clone itself is as good; ``None`` where it is not reached within ``control.total``.
    """
    after = np.array([math.nan if control.after is None or control.after.rate is None else control.after.rate])
    return _whole(_first(control, np.array([control.success]), after, np.array([success]), window)[0])


def steps_interval(
    control: Control, success: float, ci95: Sequence[float], seed: int = 0
) -> tuple[int | None, int | None]:
    """The 95 % interval of ``steps_to_reach``, by chance in the control's episodes and in ``success`` together.

    The 2.5 % and 97.5 % quantiles of ``RESAMPLES`` pairs: every update drawn again, as a binomial share of its groups
    (the bootstrap of a share), and a success from two halves of normal distributions that meet in ``success`` and have
    ``ci95`` as their 95 %. A control without chance gives the steps to both ends of ``ci95``.

    Returns:
        ``None`` in place of an end that is not reached within ``control.total``: the interval is open there.
    """
    rng = np.random.default_rng(stream_seed("money", seed))
    drawn = rng.binomial(control.groups, control.success, (RESAMPLES, len(control.groups))) / np.array(control.groups)
    after = np.full(RESAMPLES, math.nan)
    if control.after is not None and control.after.rate is not None:
        trials = len(control.after.by_task) or control.after.n
        after = rng.binomial(trials, control.after.rate, RESAMPLES) / trials
    normal = NormalDist()
    z = np.array([normal.inv_cdf((k + 0.5) / RESAMPLES) for k in range(RESAMPLES)]) / Z95
    wanted = success + np.where(z < 0, z * (success - ci95[0]), z * (ci95[1] - success))
    steps = _first(control, drawn, after, wanted.clip(0, 1), WINDOW)
    return (
        _whole(np.quantile(steps, 0.025, method="lower")),
        _whole(np.quantile(steps, 0.975, method="higher")),
    )


def _first(control: Control, success: np.ndarray, after: np.ndarray, wanted: np.ndarray, window: int) -> np.ndarray:
    """Steps until ``wanted [resamples]``, by ``success [resamples, updates]``; infinite where it is not reached."""
    least = wanted - 1e-9  # a mean of 0.6 that is stored as 0.5999... is 0.6
    reached = running_mean(success, window) >= least[:, None]
    steps = np.array(control.steps, dtype=float)[reached.argmax(-1)]
    return np.where(reached.any(-1), steps, np.where(after >= least, float(control.total), math.inf))


def _around(steps: int | None, ci95: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The interval with the estimate in it: the first of many noisy means is high too early, in resamples above all."""
    low, high, value = (math.inf if end is None else end for end in (*ci95, steps))
    return _whole(min(low, value)), _whole(max(high, value))


def _whole(steps: float) -> int | None:
    return int(steps) if math.isfinite(steps) else None


def share_of(spent: int, shared: int, steps: int | None) -> float | None:
    """What was spent, as a share of what the control needed; ``None`` where that is nothing or without an end.

    Args:
        spent: by the run.
        shared: what both needed: the control starts with it, too.
        steps: of the control after it.
    """
    return None if steps is None or shared + steps == 0 else spent / (shared + steps)


def without_dreams(
    control: Control, reached: Proportion, spent: int, shared: int = 0, price: float = 0.0, seed: int = 0
) -> dict[str, Any] | None:
    """What the success that a run has reached would have cost the control.

    Args:
        control: trained from the run's own clone.
        reached: the run's real success on training tasks.
        spent: real steps of the run, ``shared`` included.
        shared: those among them that the control needs, too.
        price: of a real step; 0 is none.
        seed: of the resampling.

    Returns:
        ``success`` and its ``ci95``, ``steps`` with ``steps_ci95`` (null: not within ``within`` steps), ``spent``,
        ``shared``, ``ratio`` (spent over the control's steps, both with what is shared) with ``ratio_ci95`` (null: no
        limit on that side), ``window``, ``curve`` as ``[steps, success]``, ``after`` (success of the control's last
        policy) and, with a price, ``cost`` with ``cost_ci95``. ``None`` where nothing was measured.
    """
    if reached.rate is None or reached.ci95 is None:
        return None
    steps = steps_to_reach(control, reached.rate)
    low, high = _around(steps, steps_interval(control, reached.rate, reached.ci95, seed))
    priced = {
        "cost": None if steps is None else steps * price,
        "cost_ci95": [None if end is None else end * price for end in (low, high)],
    }
    return {
        "success": reached.rate,
        "ci95": list(reached.ci95),
        "steps": steps,
        "steps_ci95": [low, high],
        "within": control.total,
        "spent": spent,
        "shared": shared,
        "ratio": share_of(spent, shared, steps),
        "ratio_ci95": [share_of(spent, shared, high), share_of(spent, shared, low)],
        "window": WINDOW,
        "curve": [list(point) for point in zip(control.steps, control.success, strict=True)],
        "after": None if control.after is None else control.after.to_json(),
        **(priced if price else {}),
    }
