"""What a run cost, in words: the table by source, and what the same success would have cost without dreams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib

from imagination.evaluation.costs import running_mean
from imagination.report.page import Plot, figures
from imagination.report.run_plots import DREAM, PAPER, REAL, STYLE, end_labels, finish, new_axes, to_svg
from worldmodel.evaluation.proportions import number, proportion

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
    lines_of_table = [f"| source | {heads} |", "|---|" + "--:|" * len(keys)]
    for line in lines:
        cells = [line.source.replace("|", "\\|").replace("<", "&lt;").replace("\n", " "), *map(line.cell, keys)]
        lines_of_table.append(f"| {' | '.join(f'**{cell}**' if line.total else cell for cell in cells)} |")
    for sentence in (overlap_sentence(report), failures_sentence(report)):
        lines_of_table += ["", sentence] if sentence else []
    return [*lines_of_table, "", " ".join(without_dreams(report)).replace("<", "&lt;")]


def without_dreams(report: Mapping[str, Any]) -> list[str]:
    """What the same success would have cost without dreams; where nothing says so, how to get to know it."""
    control = report["money"]["without_dreams"]
    if control is None:
        why = {
            "none": NO_CONTROL,
            "imported": "What success would have cost without dreams cannot be known where the world cannot be played.",
            "itself": "This run was trained in the real games, without dreams.",
            "real": "What the same success would have cost without dreams can be said once this run is evaluated.",
        }
        return [why[report["money"]["control"]]]
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
    """How that was counted, in a sentence or two; empty where it was not."""
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


def overlap_sentence(report: Mapping[str, Any]) -> str:
    """How much of the real play of training stalled no dream; empty where training played in one world alone."""
    overlap = report.get("overlap")
    if not overlap:
        return ""
    return (
        f"In updates with both worlds, real play took {_seconds(overlap['real_seconds'])}, "
        f"{_seconds(overlap['both_seconds'])} of it while dreams were dreamed ({_seconds(overlap['dream_seconds'])})."
    )


def failures_sentence(report: Mapping[str, Any]) -> str:
    """What real episodes failed of, by stage; empty where none did."""
    words = {"crashes": "crashed", "timeouts": "hung", "garbage": "answered garbage"}
    parts = []
    for stage, counts in (report.get("real_failures") or {}).items():
        broken = [f"{counts[kind]:,} {word}" for kind, word in words.items() if counts.get(kind)]
        parts += [f"{stage.replace('_', ' ')}: {', '.join(broken)}"] if broken else []
    return f"Real environments that broke, and were started anew: {'; '.join(parts)}." if parts else ""


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"


def render_money(report: Mapping[str, Any]) -> str:
    """The section "What it cost"."""
    keys, lines = cost_table(report)
    keys.remove("wall_seconds")  # drawn as bars
    seconds = {line.source: s for line in lines if not line.total and (s := line.numbers["wall_seconds"]) is not None}
    longest = max(seconds.values(), default=0) or 1
    dreamed = report["money"]["learn"]["dreamed_turns"]
    dreams = f"{dreamed:,} turns were dreamed; " if dreamed is not None else ""
    lead = f"{_duration(sum(seconds.values()))} in all" if seconds else "no times were recorded"
    heads = "".join(f'<th class="right">{TITLES[key][0]}</th>' for key in keys)
    notes = (overlap_sentence(report), failures_sentence(report))
    return f"""<section>
<h2>What it cost</h2>
<p class="lead">{dreams}{lead}.</p>
<table class="cost">
<thead><tr><td></td>{heads}<th>wall time</th></tr></thead>
<tbody>{"".join(_row(line, keys, longest) for line in lines)}</tbody>
</table>{"".join(f'{chr(10)}<p class="note">{escape(note)}</p>' for note in notes if note)}
{_control(report)}
</section>"""


def _row(line: Line, keys: list[str], longest: float) -> str:
    s = line.numbers["wall_seconds"]
    if line.total:
        bar = f"<span>{_duration(s)}</span>" if s is not None else ""
    elif s is None:
        bar = ""
    else:
        bar = f'<i style="width:calc((100% - 6.5rem) * {s / longest:.3f})"></i><span>{_duration(s)}</span>'
    shown = "".join(f'<td class="right" data-name="{TITLES[key][0]}">{line.cell(key)}</td>' for key in keys)
    kind = ' class="total"' if line.total else ""
    small = f"<small>{line.what}</small>" if line.what else ""
    return (
        f'<tr{kind}><th scope="row">'
        f'{escape(line.source.replace("_", " "))}{small}</th>{shown}<td class="bar">{bar}</td></tr>'
    )


def _control(report: Mapping[str, Any]) -> str:
    first, *rest = without_dreams(report)
    if report["money"]["without_dreams"] is None:
        return f'<p class="note">{escape(first)}</p>'
    plot = control_curve(report)
    return f"""<h3 class="second">The same success without dreams</h3>
<p>{escape(first)} {escape(" ".join(rest))}</p>
<p class="note">{escape(method(report))}</p>
{figures([plot] if plot else [])}"""


def control_curve(report: Mapping[str, Any]) -> Plot | None:
    """The control's success by real steps, and where on it the success of this run lies."""
    control = report["money"]["without_dreams"]
    if control is None or len(control["curve"]) < 2:
        return None
    steps, success = zip(*control["curve"], strict=True)
    mean = running_mean(success, control["window"])
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(wide=True)
        end = control["within"]
        axes.axhspan(*control["ci95"], color=DREAM, alpha=0.12, linewidth=0)
        axes.plot(steps, success, color=REAL, alpha=0.3, linewidth=1.2)
        axes.plot(steps[: len(mean)], mean, color=REAL)
        low, high = (end if step is None else step for step in control["steps_ci95"])
        axes.plot([low, high], [control["success"]] * 2, color=REAL, linewidth=8, alpha=0.4)
        axes.plot([0, end], [control["success"]] * 2, color=DREAM, linewidth=1.5)
        if control["steps"] is not None:
            axes.plot(control["steps"], control["success"], "o", color=REAL, markersize=8, markeredgecolor=PAPER)
        finish(axes, "real steps of the control", "share of episodes solved", share=True)
        axes.set_xlim(0, end)
        end_labels(axes, [("control", float(mean[-1]), REAL), ("this run", control["success"], DREAM)])
        return Plot(
            "The control on its way",
            f"Line: mean of {control['window']} updates of the control. Dot and bar: where it comes to this run's "
            f"{number(control['success'])}, with the interval. Band: the interval of this run",
            to_svg(figure, "Success of the control by real steps"),
            wide=True,
        )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {s} s"
