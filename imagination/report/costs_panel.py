"""What a run cost, as a part of the page: the table with bars of time, and the control's way to the same success."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import matplotlib

from imagination.evaluation.costs import running_mean
from imagination.evaluation.format import number
from imagination.report.costs import (
    TITLES,
    Line,
    cost_table,
    failures_sentence,
    method,
    overlap_sentence,
    without_dreams,
)
from imagination.report.run_plots import DREAM, PAPER, REAL, STYLE, Plot, end_labels, finish, new_axes, to_svg


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
    figure = ""
    if plot := control_curve(report):
        caption = f'<figcaption><h3>{plot.title}</h3><span class="note">{plot.note}</span></figcaption>'
        figure = f'<div class="plots"><figure class="wide">{caption}{plot.svg}</figure></div>'
    return f"""<h3 class="second">The same success without dreams</h3>
<p>{escape(first)} {escape(" ".join(rest))}</p>
<p class="note">{escape(method(report))}</p>
{figure}"""


def control_curve(report: Mapping[str, Any]) -> Plot | None:
    """The control's success by real steps, and where on it the success of this run lies."""
    found = report["money"]["without_dreams"]
    if found is None or len(found["curve"]) < 2:
        return None
    steps, success = zip(*found["curve"], strict=True)
    mean = running_mean(success, found["window"])
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(wide=True)
        end = found["within"]
        axes.axhspan(*found["ci95"], color=DREAM, alpha=0.12, linewidth=0)
        axes.plot(steps, success, color=REAL, alpha=0.3, linewidth=1.2)
        axes.plot(steps[: len(mean)], mean, color=REAL)
        low, high = (end if step is None else step for step in found["steps_ci95"])
        axes.plot([low, high], [found["success"]] * 2, color=REAL, linewidth=8, alpha=0.4)
        axes.plot([0, end], [found["success"]] * 2, color=DREAM, linewidth=1.5)
        if found["steps"] is not None:
            axes.plot(found["steps"], found["success"], "o", color=REAL, markersize=8, markeredgecolor=PAPER)
        finish(axes, "real steps of the control", "share of episodes solved", share=True)
        axes.set_xlim(0, end)
        end_labels(axes, [("control", float(mean[-1]), REAL), ("this run", found["success"], DREAM)])
        return Plot(
            "The control on its way",
            f"Line: mean of {found['window']} updates of the control. Dot and bar: where it comes to this run's "
            f"{number(found['success'])}, with the interval. Band: the interval of this run",
            to_svg(figure, "Success of the control by real steps"),
            wide=True,
        )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {s} s"
