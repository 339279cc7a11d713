"""What playing in the real world cost a run, by stage: steps, seconds, what failed, and money where a step has a price.

``summary.json`` holds it as ``real_steps``, ``real_resets``, ``real_seconds``, ``real_failures`` (by kind) and, where
``env.price`` is set, ``real_cost``.
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

from imagination.runs.run_folder import RunFolder
from real_envs.seeding import derive_seed
from real_envs.worker_pool import PoolStats
from worldmodel.evaluation.intervals import RESAMPLES, Z95
from worldmodel.evaluation.proportions import Proportion

KEYS = ("real_steps", "real_resets", "real_seconds", "real_failures", "real_cost")
FAILURES = ("crashes", "timeouts", "garbage")


def real_costs(stage: str, spent: PoolStats, price: float) -> dict[str, Any]:
    """As the summary has it, ``{"real_steps": {"collect": 40}, ...}``; ``price``: of a step."""
    return {
        "real_steps": {stage: spent.steps},
        "real_resets": {stage: spent.resets},
        "real_seconds": {stage: round(spent.seconds, 3)},
        "real_failures": {stage: {kind: getattr(spent, kind) for kind in FAILURES}},
        **({"real_cost": {stage: round(spent.steps * price, 6)}} if price else {}),
    }


def spent_before(run: RunFolder, stage: str) -> PoolStats:
    """What the summary says that a stage has spent; nothing where it says nothing."""
    summary = run.summary
    return PoolStats(
        steps=int(summary.get("real_steps", {}).get(stage, 0)),
        resets=int(summary.get("real_resets", {}).get(stage, 0)),
        seconds=float(summary.get("real_seconds", {}).get(stage, 0.0)),
        **summary.get("real_failures", {}).get(stage, {}),
    )


MEASURE = ("evaluate", "audit", "compare")  # every other stage is spent to learn
NUMBERS = ("real_steps", "real_seconds", "real_cost", "dreamed_turns", "wall_seconds", "machine_cost")
FIRST = "first_episodes"
HOUR = 3600.0
WINDOW = 3  # updates of the running mean: the first high one of a noisy curve is luck
Row = Mapping[str, Any]


def ledger(summary: Row, machine_price: float = 0.0) -> dict[str, Any]:
    """What a run spent, by stage and in all; ``machine_price`` is that of an hour, 0 is none.

    Returns:
        ``rows``, one a stage in the order in which they first spent: ``source``, ``purpose`` ("learn" or "measure")
        and ``NUMBERS``, null where the run says nothing; ``learn`` and ``measure``, their sums; ``machine_price``.
        The scripted first episodes of a loop without a log are a row of their own, before the rest of the loop.
    """
    dreamed = {"train": summary.get("dreamed_turns"), "loop": loop_dreams(summary)}
    stages: dict[str, None] = dict.fromkeys([*(summary.get("real_steps") or {}), *(summary.get("wall_seconds") or {})])
    rows = []
    for stage in stages:
        row: dict[str, Any] = {"source": stage, "purpose": "measure" if stage in MEASURE else "learn"}
        for key in NUMBERS:
            row[key] = dreamed.get(stage) if key == "dreamed_turns" else (summary.get(key) or {}).get(stage)
        if stage == "loop" and row["wall_seconds"] is not None:
            row["wall_seconds"] -= _within_the_loop(summary)
        if machine_price and row["wall_seconds"] is not None:
            row["machine_cost"] = row["wall_seconds"] / HOUR * machine_price
        rows += _apart(row, first_steps(summary), price_of(summary)) if stage == "loop" else [row]
    sums = {
        purpose: {key: _sum([row[key] for row in rows if row["purpose"] == purpose]) for key in NUMBERS}
        for purpose in ("learn", "measure")
    }
    return {"rows": rows, **sums, "machine_price": machine_price}


def _within_the_loop(summary: Row) -> float:
    """Seconds of a loop that its first world model and clone took, where it made them: they have rows of their own."""
    loop, seconds = summary.get("loop") or {}, summary.get("wall_seconds") or {}
    if not loop.get("cold") or loop.get("origin"):
        return 0.0
    return sum(seconds.get(stage) or 0.0 for stage in ("fit_world_model", "clone"))


def _apart(loop: dict[str, Any], first: int, price: float) -> list[dict[str, Any]]:
    """The row of a loop as two where scripted agents played first; seconds were not counted apart."""
    if not first or loop["real_steps"] is None:
        return [loop]
    apart = {"real_steps": first, "real_cost": first * price if price else None}
    rest = {key: loop[key] - value for key, value in apart.items() if value is not None and loop[key] is not None}
    return [{**loop, **dict.fromkeys(NUMBERS), "source": FIRST, **apart}, {**loop, **rest}]


def price_of(summary: Row) -> float:
    """Of a real step, by what a stage paid for its steps; 0 where nothing was paid."""
    steps, costs = summary.get("real_steps") or {}, summary.get("real_cost") or {}
    return next((cost / steps[stage] for stage, cost in reversed(costs.items()) if steps.get(stage) and cost), 0.0)


def spent_to_learn(summary: Row) -> tuple[int, int]:
    """Real steps after the clone, as ``(spent, shared)``: of a loop all that it charged, of another run its training;
    and of either what its experiences were learned from.

    The log, with which the run and its control begin, is in neither. What scripted agents played for a loop that had no
    log is spent, and shared.
    """
    steps = summary.get("real_steps") or {}
    if loop := summary.get("loop"):
        return int(loop["charged"]) + int(steps.get("learn_experience") or 0), first_steps(summary)
    return sum(int(steps.get(stage) or 0) for stage in ("learn_experience", "train", "probe")), 0


def first_steps(summary: Row) -> int:
    """Real steps that were charged to a loop in round 0, which only scripted agents play; 0 where there was a log."""
    loop = summary.get("loop") or {}
    if not loop.get("cold"):
        return 0
    return int(loop["rounds"][0]["charged"] if loop.get("rounds") else loop.get("charged", 0))


def loop_dreams(summary: Row) -> int | None:
    """Turns that the rounds of a loop have dreamed; ``None`` where there is no round."""
    rounds = (summary.get("loop") or {}).get("rounds") or ()
    return sum(int(r.get("dreamed_turns") or 0) for r in rounds) if rounds else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Control:
    """A training of the same clone in real games, by the real episodes that it played while it learned."""

    steps: tuple[int, ...]  # taken before each update, rising from 0
    success: tuple[float, ...]  # of the episodes of each update
    groups: tuple[int, ...]  # of episodes of one task that an update played: one trial each, see ``over_tasks``
    total: int  # real steps
    after: Proportion | None = None  # of the policy that it ended with, where that was measured


def read_control(metrics: Sequence[Row], rollouts: Sequence[Row], after: Proportion | None = None) -> Control | None:
    """From the rows of a run folder; ``None`` where no real episode was played, or the training was one in dreams.

    An update in which no episode counts (all of them crashed) has no success; its steps are counted.
    """
    lines = sorted((row for row in metrics if row.get("stage") == "train"), key=lambda row: row["step"])
    if any("dream_success" in row for row in lines):
        return None
    groups = Counter(row.get("step") for row in rollouts if row.get("stage") == "train")
    spent, points = 0, []
    for row in lines:
        if row.get("real_success") is not None:
            points.append((spent, float(row["real_success"]), max(1, groups[row["step"]])))
        spent += int(row.get("played_turns", row.get("turns", 0)))  # more than are learned from (train.oversample)
    if not points:
        return None
    steps, success, played = zip(*points, strict=True)
    return Control(steps, success, played, spent, after)


def running_mean(success: ArrayLike) -> np.ndarray:
    """Of ``WINDOW`` updates, each and those after it: ``[..., updates]`` to ``[..., updates - WINDOW + 1]``.

    Fewer updates than that have one mean, of them all.
    """
    success = np.asarray(success, dtype=float)
    return sliding_window_view(success, min(WINDOW, success.shape[-1]), axis=-1).mean(-1)


def steps_to_reach(control: Control, success: float) -> int | None:
    """Real steps before the first update from which the running mean is at least ``success``.

    What comes later in the window counts for the control and its steps do not: it looks cheaper than it is, not dearer.
    Where no window reaches it and the policy at the end does, it took all steps; ``None`` where neither does.
    """
    after = np.array([math.nan if control.after is None or control.after.rate is None else control.after.rate])
    return _whole(_first(control, np.array([control.success]), after, np.array([success]))[0])


def steps_interval(
    control: Control, success: float, ci95: Sequence[float], seed: int = 0
) -> tuple[int | None, int | None]:
    """The 95 % interval of ``steps_to_reach``, by chance in the control's episodes and in ``success`` together.

    The 2.5 % and 97.5 % quantiles of ``RESAMPLES`` pairs: every update drawn again, as a binomial share of its groups
    (the bootstrap of a share), and a success from two halves of normal distributions that meet in ``success`` and have
    ``ci95`` as their 95 %. An end that is not reached within ``control.total`` is ``None``.
    """
    rng = np.random.default_rng(derive_seed("money", seed))
    drawn = rng.binomial(control.groups, control.success, (RESAMPLES, len(control.groups))) / np.array(control.groups)
    after = np.full(RESAMPLES, math.nan)
    if control.after is not None and control.after.rate is not None:
        trials = len(control.after.by_task) or control.after.n
        after = rng.binomial(trials, control.after.rate, RESAMPLES) / trials
    normal = NormalDist()
    z = np.array([normal.inv_cdf((k + 0.5) / RESAMPLES) for k in range(RESAMPLES)]) / Z95
    wanted = success + np.where(z < 0, z * (success - ci95[0]), z * (ci95[1] - success))
    steps = _first(control, drawn, after, wanted.clip(0, 1))
    return (_whole(np.quantile(steps, 0.025, method="lower")), _whole(np.quantile(steps, 0.975, method="higher")))


def _first(control: Control, success: np.ndarray, after: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Steps until ``wanted [resamples]``, by ``success [resamples, updates]``; infinite where it is not reached."""
    least = wanted - 1e-9  # a mean of 0.6 that is stored as 0.5999... is 0.6
    reached = running_mean(success) >= least[:, None]
    steps = np.array(control.steps, dtype=float)[reached.argmax(-1)]
    return np.where(reached.any(-1), steps, np.where(after >= least, float(control.total), math.inf))


def _around(steps: int | None, ci95: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The interval with the estimate in it: the first of many noisy means is high too early, in resamples above all."""
    low, high, value = (math.inf if end is None else end for end in (*ci95, steps))
    return _whole(min(low, value)), _whole(max(high, value))


def _whole(steps: float) -> int | None:
    return int(steps) if math.isfinite(steps) else None


def share_of(spent: int, shared: int, steps: int | None) -> float | None:
    """What was spent, as a share of what the control needed (``steps`` after what both ``shared``).

    ``None`` where that is nothing or without an end.
    """
    return None if steps is None or shared + steps == 0 else spent / (shared + steps)


def without_dreams(
    control: Control, reached: Proportion, spent: int, shared: int = 0, price: float = 0.0, seed: int = 0
) -> dict[str, Any] | None:
    """What the success ``reached`` by a run on training tasks would have cost the control, trained from its clone.

    Args:
        spent: real steps of the run, ``shared`` included.
        shared: those among them that the control needs, too.
        price: of a real step; 0 is none.

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
