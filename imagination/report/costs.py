"""What a run cost, in words: the table by source, and what the same success would have cost without dreams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imagination.evaluation.format import number, proportion

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
NO_CONTROL = (
    "What the same success would have cost without dreams is not known, as there is no control: copy this run's "
    "folder, train the same clone there in the real games (imagine train run=<copy> train.world=real), move the copy "
    "into this folder as control/, and report again."
)


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table.

    Attributes:
        source: the stage, or the title of a sum.
        what: it is, where that needs a word.
        numbers: by the keys of ``TITLES``; ``None`` where the run says nothing.
        total: it is a sum of rows above.
    """

    source: str
    what: str
    numbers: Mapping[str, float | None]
    total: bool = False

    def cell(self, key: str) -> str:
        """As tables show it: ``12,400``, or a dash."""
        value = self.numbers[key]
        if value is None:
            return "–"
        small = "cost" in key and 0 < value < 0.1  # a run on one machine costs cents
        return f"{value:.2g}" if small else f"{value:,.{TITLES[key][1]}f}"


def cost_table(report: Mapping[str, Any]) -> tuple[list[str], list[Line]]:
    """Keys of the columns that say something, and rows: what was spent to learn, its sum, what was spent to measure.

    Stages that spent nothing have no row.
    """
    money = report["money"]
    lines: list[Line] = []
    for purpose, title in TOTALS.items():
        rows = [row for row in money["rows"] if row["purpose"] == purpose and any(row[key] for key in TITLES)]
        lines += [Line(row["source"], WHAT.get(row["source"], ""), row) for row in rows]
        lines += [Line(title, "", money[purpose], total=True)] if rows else []
    shown = [key for key in TITLES if key in ALWAYS or any(line.numbers[key] for line in lines)]
    return shown, lines


def cost_lines(report: Mapping[str, Any]) -> list[str]:
    """The table in Markdown, and the sentences below it."""
    keys, lines = cost_table(report)
    heads = " | ".join(TITLES[key][0] for key in keys)
    found = [f"| source | {heads} |", "|---|" + "--:|" * len(keys)]
    for line in lines:
        cells = [line.source.replace("|", "\\|").replace("<", "&lt;").replace("\n", " "), *map(line.cell, keys)]
        found.append(f"| {' | '.join(f'**{cell}**' if line.total else cell for cell in cells)} |")
    for sentence in (overlap_sentence(report), failures_sentence(report)):
        found += ["", sentence] if sentence else []
    return [*found, "", " ".join(without_dreams(report)).replace("<", "&lt;")]


def without_dreams(report: Mapping[str, Any]) -> list[str]:
    """What the same success would have cost without dreams; where nothing says so, how to get to know it."""
    found = report["money"]["without_dreams"]
    if found is None:
        why = {
            "none": NO_CONTROL,
            "imported": "What success would have cost without dreams cannot be known where the world cannot be played.",
            "itself": "This run was trained in the real games, without dreams.",
            "real": "What the same success would have cost without dreams can be said once this run is evaluated.",
        }
        return [why[report["money"]["control"]]]
    steps, span = found["steps"], _span(found["steps_ci95"], found["within"])
    same = f"as many episodes of the training tasks as this run's policy, {proportion(found)}"
    if steps is None:
        said = f"Without dreams, {found['within']:,} real steps did not let the same clone solve {same}: {span}."
    elif steps == 0:
        said = f"Without dreams, the same clone solved {same}, before any training: 0 real steps {span}."
    else:
        said = f"Without dreams, the same clone needed {steps:,} real steps {span} to solve {same}."
    sentences = [said, _compared(found)]
    if "cost" in found and steps is not None:
        span = _span(found["cost_ci95"], found["cost"] / steps * found["within"] if steps else 0.0, 2)
        sentences.append(f"At the price of a real step, those of the control cost {found['cost']:,.2f} {span}.")
    return sentences


def method(report: Mapping[str, Any]) -> str:
    """How that was counted, in a sentence or two; empty where it was not."""
    found = report["money"]["without_dreams"]
    if found is None:
        return ""
    return (
        "The control is the same clone, trained in the real games. Its steps count up to the first update from which "
        f"the mean of {found['window']} updates is as high. The 95 % interval is of chance in its episodes (each group "
        "of a task one trial) and in this run's own success together."
    )


def _compared(found: Mapping[str, Any]) -> str:
    """What this run took, and its ratio to what the control took."""
    spent, shared, (least, most) = found["spent"], found["shared"], found["ratio_ci95"]
    if not spent:
        return "This run took none beyond the log that both begin with."
    both = f", with {shared:,} of scripted first episodes on both sides" if shared else ""
    if found["steps"] is None:
        return f"This run took {spent:,}: less than {number(spent / (shared + found['within']))} times as many{both}."
    if found["ratio"] is None:
        return f"This run took {spent:,}."
    span = f"[{number(least or 0.0)}, {'no limit' if most is None else number(most)}]"
    return f"This run took {spent:,}, {number(found['ratio'])} times as many {span}{both}."


def _span(ends: Sequence[float | None], within: float, digits: int = 0) -> str:
    """``[600, 2,400]``, or with an open end ``[600, more than 4,000]``."""
    shown = ["more than " * (end is None) + f"{within if end is None else end:,.{digits}f}" for end in ends]
    return f"[{shown[0] if ends[0] is None and ends[1] is None else ', '.join(shown)}]"


def overlap_sentence(report: Mapping[str, Any]) -> str:
    """How much of the real play of training stalled no dream; empty where training played in one world alone."""
    found = report.get("overlap")
    if not found:
        return ""
    return (
        f"In updates with both worlds, real play took {_seconds(found['real_seconds'])}, "
        f"{_seconds(found['both_seconds'])} of it while dreams were dreamed ({_seconds(found['dream_seconds'])})."
    )


def failures_sentence(report: Mapping[str, Any]) -> str:
    """What real episodes failed of, by stage; empty where none did."""
    words = {"crashes": "crashed", "timeouts": "hung", "garbage": "answered garbage"}
    parts = []
    for stage, counts in (report.get("real_failures") or {}).items():
        told = [f"{counts[kind]:,} {word}" for kind, word in words.items() if counts.get(kind)]
        parts += [f"{stage.replace('_', ' ')}: {', '.join(told)}"] if told else []
    return f"Real environments that broke, and were started anew: {'; '.join(parts)}." if parts else ""


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"
