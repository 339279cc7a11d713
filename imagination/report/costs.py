"""What a run cost, in words: the table by source, and what the same success would have cost without dreams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imagination.report.run_plots import control_curve
from worldmodel.evaluation.proportions import number, proportion

# key -> title and decimals
TITLES = {
    "real_steps": ("real steps", 0),
    "real_seconds": ("seconds of them", 1),
    "real_cost": ("cost of them", 2),
    "dreamed_turns": ("dreamed turns", 0),
    "machine_cost": ("cost of machine", 2),
    "wall_seconds": ("wall seconds", 0),
}
ALWAYS = ("real_steps", "wall_seconds")
WHAT = {
    "collect": "the log, by scripted agents",
    "first_episodes": "of the loop, by scripted agents",
    "loop": "real steps, refits and dreams",
    "train": "dreams and what is learned in them",
    "probe": "real episodes of the tripwires",
}
TOTALS = {"learn": "spent to learn", "measure": "spent to measure"}
NO_CONTROL = {
    "none": "What the same success would have cost without dreams is not known, as there is no control: copy this "
    "run's folder, train the same clone there in the real games (imagine train run=<copy> train.world=real), move the "
    "copy into this folder as control/, and report again.",
    "imported": "What success would have cost without dreams cannot be known where the world cannot be played.",
    "itself": "This run was trained in the real games, without dreams.",
    "real": "What the same success would have cost without dreams can be said once this run is evaluated.",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: of a stage, or the sum (``total``) of rows above. ``cells`` are ``(title, number)``."""

    source: str
    what: str
    cells: list[tuple[str, str]]
    seconds: float | None
    total: bool = False


def cost_table(report: Mapping[str, Any], without: Sequence[str] = ()) -> list[Line]:
    """What was spent to learn, its sum, what was spent to measure; stages that spent nothing have no row.

    Columns in which nothing was spent are left out, and those of ``without``.
    """
    money = report["money"]
    rows: list[tuple[str, str, Mapping[str, Any], bool]] = []
    for purpose, title in TOTALS.items():
        stages = [row for row in money["rows"] if row["purpose"] == purpose and any(row[key] for key in TITLES)]
        rows += [(row["source"], WHAT.get(row["source"], ""), row, False) for row in stages]
        rows += [(title, "", money[purpose], True)] if stages else []
    shown = [key for key in TITLES if key in ALWAYS or any(row[2][key] for row in rows)]
    keys = [key for key in shown if key not in without]
    return [
        Line(source, what, [(TITLES[key][0], _cell(key, row[key])) for key in keys], row["wall_seconds"], total)
        for source, what, row, total in rows
    ]


def _cell(key: str, value: float | None) -> str:
    """``12,400``, or a dash."""
    if value is None:
        return "–"
    small = "cost" in key and 0 < value < 0.1  # a run on one machine costs cents
    return f"{value:.2g}" if small else f"{value:,.{TITLES[key][1]}f}"


def cost_view(report: Mapping[str, Any]) -> dict[str, Any]:
    """The section "What it cost" of the page."""
    lines = cost_table(report, without=["wall_seconds"])  # drawn as bars
    seconds = {line.source: line.seconds for line in lines if not line.total and line.seconds is not None}
    return {
        "heads": [title for title, _ in lines[0].cells] if lines else [TITLES["real_steps"][0]],
        "lines": lines,
        "dreamed": report["money"]["learn"]["dreamed_turns"],
        "seconds": sum(seconds.values()) if seconds else None,
        "longest": max(seconds.values(), default=0) or 1,
        "notes": notes(report),
        "control": without_dreams(report),
        "method": method(report),
        "curve": control_curve(report),
    }


def notes(report: Mapping[str, Any]) -> list[str]:
    """How much real play stalled no dream, and which real environments broke, where there was any."""
    sentences = []
    if overlap := report.get("overlap"):
        real, both, dream = (_seconds(overlap[f"{key}_seconds"]) for key in ("real", "both", "dream"))
        sentences.append(
            f"In updates with both worlds, real play took {real}, {both} of it while dreams were dreamed ({dream})."
        )
    words = {"crashes": "crashed", "timeouts": "hung", "garbage": "answered garbage"}
    parts = []
    for stage, counts in (report.get("real_failures") or {}).items():
        broken = [f"{counts[kind]:,} {word}" for kind, word in words.items() if counts.get(kind)]
        parts += [f"{stage.replace('_', ' ')}: {', '.join(broken)}"] if broken else []
    if parts:
        sentences.append(f"Real environments that broke, and were started anew: {'; '.join(parts)}.")
    return sentences


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"


def without_dreams(report: Mapping[str, Any]) -> list[str]:
    """What the same success would have cost without dreams; where nothing says so, how to get to know it."""
    control = report["money"]["without_dreams"]
    if control is None:
        return [NO_CONTROL[report["money"]["control"]]]
    steps, span = control["steps"], _span(control["steps_ci95"], control["within"])
    same = f"as many episodes of the training tasks as this run's policy, {proportion(control)}"
    if steps is None:
        sentence = f"Without dreams, {control['within']:,} real steps did not let the same clone solve {same}: {span}."
    elif steps == 0:
        sentence = f"Without dreams, the same clone solved {same}, before any training: 0 real steps {span}."
    else:
        sentence = f"Without dreams, the same clone needed {steps:,} real steps {span} to solve {same}."
    sentences = [sentence, _compared(control)]
    if "cost" in control and steps is not None:
        span = _span(control["cost_ci95"], control["cost"] / steps * control["within"] if steps else 0.0, 2)
        sentences.append(f"At the price of a real step, those of the control cost {control['cost']:,.2f} {span}.")
    return sentences


def method(report: Mapping[str, Any]) -> str:
    """How that was counted; empty where it was not."""
    control = report["money"]["without_dreams"]
    if control is None:
        return ""
    return (
        "The control is the same clone, trained in the real games. Its steps count up to the first update from which "
        f"the mean of {control['window']} updates is as high. The 95 % interval is of chance in its episodes (each "
        "group of a task one trial) and in this run's own success together."
    )


def _compared(control: Mapping[str, Any]) -> str:
    """What this run took, and its ratio to what the control took."""
    spent, shared, (least, most) = control["spent"], control["shared"], control["ratio_ci95"]
    if not spent:
        return "This run took none beyond the log that both begin with."
    both = f", with {shared:,} of scripted first episodes on both sides" if shared else ""
    if control["steps"] is None:
        return f"This run took {spent:,}: less than {number(spent / (shared + control['within']))} times as many{both}."
    if control["ratio"] is None:
        return f"This run took {spent:,}."
    span = f"[{number(least or 0.0)}, {'no limit' if most is None else number(most)}]"
    return f"This run took {spent:,}, {number(control['ratio'])} times as many {span}{both}."


def _span(ends: Sequence[float | None], within: float, digits: int = 0) -> str:
    """``[600, 2,400]``, or with an open end ``[600, more than 4,000]``."""
    shown = ["more than " * (end is None) + f"{within if end is None else end:,.{digits}f}" for end in ends]
    return f"[{shown[0] if ends[0] is None and ends[1] is None else ', '.join(shown)}]"
