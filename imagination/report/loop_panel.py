"""A loop round by round: how the policy did while it acted for real, what it believed, and what it dreamed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib

from imagination.report.page import Plot, figures
from imagination.report.run_plots import DREAM, REAL, STYLE, end_labels, finish, new_axes, to_svg
from worldmodel.evaluation.proportions import interval, number

HEADS = (
    "round",
    "real steps",
    "real success while acting",
    "dreamed success",
    "world model",
    "turns of a dream",
    "stale",
)


def render_loop(report: Mapping[str, Any]) -> str:
    """The section "Round by round"; empty for a run that is no loop."""
    if not (rows := loop_rows(report)):
        return ""
    heads = "".join(f"<th{' class=right' * (n != 4)}>{head}</th>" for n, head in enumerate(HEADS))
    body = "".join(
        "<tr>" + "".join(f"<td{' class=right' * (n != 4)}>{escape(cell)}</td>" for n, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    plot = loop_curve(report)
    return f"""<section>
<h2>Round by round</h2>
<p class="lead">{escape(loop_sentence(report))}</p>
{figures([plot] if plot else [])}
<table class="cost">
<thead><tr>{heads}</tr></thead>
<tbody>{body}</tbody>
</table>
<p class="note">Stale: the most updates between the policy that played a real episode and the one that learned from it.
Tasks of a round are chosen, so its success is not that of the evaluation.</p>
</section>"""


def loop_lines(report: Mapping[str, Any]) -> list[str]:
    """The same as Markdown; nothing for a run that is no loop."""
    if not (rows := loop_rows(report)):
        return []
    table = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return ["## Round by round", "", loop_sentence(report), "", *table, ""]


def loop_sentence(report: Mapping[str, Any]) -> str:
    """What was spent, and how many versions of the world model took the place of the last one."""
    loop = report["loop"]
    refits = [version for version in loop["versions"] if version["round"]]
    taken = sum(version["promoted"] for version in refits)
    sentence = f"{loop['charged']:,} real steps in {len(loop['rounds'])} rounds"
    if not refits:
        return f"{sentence}; the world model was not fitted again."
    return f"{sentence}; of {len(refits)} refits of the world model, {taken} took the place of the last version."


def loop_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """A row a round, in the words of ``HEADS``."""
    return [_row(line) for line in (report.get("loop") or {}).get("rounds") or ()]


def _row(line: Mapping[str, Any]) -> list[str]:
    real, new = line["real_success"], {True: ", new", False: ", kept", None: ""}[line["promoted"]]
    played = "–" if not real or not real["n"] else f"{number(real['success'])} {interval(real['ci95'])} of {real['n']}"
    return [
        str(line["round"]),
        f"{line['charged']:,}",
        played,
        number(line["dreamed_success"]),
        f"version {line['version']}{new}",
        "–" if line["horizon"] is None else str(line["horizon"]),
        "–" if line["staleness"] is None else str(line["staleness"]),
    ]


def loop_curve(report: Mapping[str, Any]) -> Plot | None:
    """Real success while acting, with its interval, and dreamed success, over real steps."""
    rounds: Sequence[Mapping[str, Any]] = report["loop"]["rounds"]
    real = [(r["charged"], r["real_success"]) for r in rounds if r["real_success"] and r["real_success"]["n"]]
    dreamed = [(r["charged"], r["dreamed_success"]) for r in rounds if r["dreamed_success"] is not None]
    if len(real) < 2:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(wide=True)
        for steps, success in real:
            if success["ci95"] is not None:
                axes.plot([steps, steps], success["ci95"], color=REAL, linewidth=2, alpha=0.5)
        axes.plot([steps for steps, _ in real], [success["success"] for _, success in real], "o-", color=REAL)
        ends = [("real", real[-1][1]["success"], REAL)]
        if dreamed:
            axes.plot(*zip(*dreamed, strict=True), "o-", color=DREAM)
            ends.append(("dream", dreamed[-1][1], DREAM))
        finish(axes, "real steps", "share of episodes solved", share=True)
        end_labels(axes, ends)
        note = "Real: on the tasks of the round, with 95 % intervals. Dream: in the last update of the round"
        return Plot("What it did and what it believed", note, to_svg(figure, "Success by real steps"), wide=True)
