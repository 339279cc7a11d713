"""What a run spent, by source: real steps, dreamed turns, seconds and, where there are prices, money. Numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEASURE = ("evaluate", "audit", "compare")  # every other stage is spent to learn
NUMBERS = ("real_steps", "real_seconds", "real_cost", "dreamed_turns", "wall_seconds", "machine_cost")
FIRST = "first_episodes"
HOUR = 3600.0
Row = Mapping[str, Any]


def ledger(summary: Row, machine_price: float = 0.0) -> dict[str, Any]:
    """What a run spent, by stage and in all.

    Args:
        summary: of the run (``imagination.runs.real_costs``).
        machine_price: of an hour of this machine; 0 is none.

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
    """Seconds of a loop that its first world model and clone took: they have rows of their own.

    A loop that began without a log made them itself, unless it took them from another run.
    """
    loop, seconds = summary.get("loop") or {}, summary.get("wall_seconds") or {}
    if not loop.get("cold") or loop.get("origin"):
        return 0.0
    return sum(seconds.get(stage) or 0.0 for stage in ("fit_world_model", "clone"))


def _apart(loop: dict[str, Any], first: int, price: float) -> list[dict[str, Any]]:
    """The row of a loop as two where scripted agents played first; seconds were not counted apart."""
    if not first or loop["real_steps"] is None:
        return [loop]
    paid = {"real_steps": first, "real_cost": first * price if price else None}
    rest = {key: loop[key] - value for key, value in paid.items() if value is not None and loop[key] is not None}
    return [{**loop, **dict.fromkeys(NUMBERS), "source": FIRST, **paid}, {**loop, **rest}]


def price_of(summary: Row) -> float:
    """Of a real step, by what a stage paid for its steps; 0 where nothing was paid."""
    steps = summary.get("real_steps") or {}
    paid = [
        cost / steps[stage] for stage, cost in (summary.get("real_cost") or {}).items() if steps.get(stage) and cost
    ]
    return paid[-1] if paid else 0.0


def spent_to_learn(summary: Row) -> tuple[int, int]:
    """Real steps after the clone, as ``(spent, shared)``: of a loop all that it charged, of another run its training.

    The log is in neither: both the run and its control begin with it. What scripted agents played for a loop that had
    no log is spent, and shared.
    """
    if loop := summary.get("loop"):
        return int(loop["charged"]), first_steps(summary)
    steps = summary.get("real_steps") or {}
    return int(steps.get("train") or 0) + int(steps.get("probe") or 0), 0


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
