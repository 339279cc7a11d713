"""The report as one page of HTML that needs nothing but itself: no network, no scripts.

The order is that of a reader's questions: what came out, how sure is it, how did it go, what did it cost, how good is
the world model, and what do its dreams look like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from imagination.evaluation.compare.alignment import Row, replayed_pairs
from imagination.report.costs import render_money
from imagination.report.episodes import choose, render_episodes, render_pair
from imagination.report.loop_panel import render_loop
from imagination.report.page import Plot, banner, document, figures
from imagination.report.run_data import build_report, load_run
from imagination.report.run_plots import draw_curves
from imagination.report.run_text import (
    audit_table,
    calibration_sentence,
    language_sentence,
    plain,
    render_markdown,
    rules_sentence,
    tripwire_note,
    verdict,
)
from real_envs.files import write_atomically
from worldmodel.evaluation.proportions import count, interval, number, signed

MEASURES = {
    "train_tasks": ("Training tasks", "real environment", "real"),
    "heldout_tasks": ("Held-out tasks", "real environment, never trained on", "real"),
    "dream_success": ("In the dream", "what the world model believed", "dream"),
}


def render_html(
    name: str, report: Mapping[str, Any], metrics: Sequence[Row], rollouts: Sequence[Row], config: str
) -> str:
    """The whole page.

    Args:
        name: of the run, for the title.
        report: as ``build_report`` made it.
        metrics: rows of ``metrics.jsonl``.
        rollouts: rows of ``rollouts.jsonl``.
        config: the text of ``config.yaml``.
    """
    sections = [
        _head(name, report),
        _results(report),
        _curves(draw_curves(metrics, report)),
        render_loop(report),
        render_money(report),
        _audit(report),
        _pairs(rollouts, report),
        render_episodes(rollouts),
        _settings(config, report),
    ]
    body = "\n".join(section for section in sections if section)
    return document(f"{name} · imagination", body)


def _head(name: str, report: Mapping[str, Any]) -> str:
    headline, *rest = report["verdict"]
    facts = [f"seed {report['seed']}" if report["seed"] is not None else "", plain(report["hardware"])]
    notes = ""
    if report["notes"]:
        title = "This run is not finished" if report["partial"] else "Not everything could be measured"
        items = "".join(f"<li>{escape(note)}</li>" for note in report["notes"])
        notes = f'<div class="partial"><h3>{title}</h3><ul>{items}</ul></div>'
    if wires := tripwire_note(report):
        notes = f'<div class="partial"><h3>{wires[0]}</h3><p>{escape(wires[1])}</p></div>{notes}'
    more = f'<p class="more">{_soft_intervals(" ".join(rest))}</p>'
    return banner(name, facts, _soft_intervals(headline), f"{more}\n{notes}")


def _soft_intervals(sentence: str) -> str:
    """Intervals step back behind the numbers they belong to."""
    return re.sub(r"(\[[^\]]*\])", r'<span class="ci">\1</span>', escape(sentence))


def _results(report: Mapping[str, Any]) -> str:
    rows = []
    for key, (title, note, kind) in MEASURES.items():
        before, after = (report["policy"][which][key] for which in ("before", "after"))
        ci95 = report["change_ci95"][key]
        change = None if ci95 is None else after["success"] - before["success"]
        rows.append(
            f'<tr><th scope="row"><span class="{kind}">{title}</span><small>{note}</small></th>'
            f"{_measured('before', before)}{_measured('after', after)}{_difference('change', change, ci95)}"
            f'<td class="strip">{_strip(before, after, kind, axis=key == "dream_success")}</td></tr>'
        )
    gap, gap_ci = report["optimism_gap"], report["optimism_gap_ci95"]
    rows.append(
        '<tr><th scope="row">Optimism gap<small>dream minus reality, training tasks</small></th>'
        f"{_difference('before', gap['before'], gap_ci['before'])}{_difference('after', gap['after'], gap_ci['after'])}"
        "<td></td><td></td></tr>"
    )
    return f"""<section>
<h2>Success rate before and after</h2>
<p class="lead">Share of episodes solved, with 95&nbsp;% intervals. Hollow: before training, filled: after.</p>
<table class="results">
<thead><tr><td></td><th>before</th><th>after</th><th>change</th><th></th></tr></thead>
<tbody>
{chr(10).join(rows)}
</tbody>
</table>
<p class="note">Intervals are of 95 %, for tasks like these: each task counts as one trial, so more tasks narrow them
and more episodes of the same do not. Episodes that crashed are left out of n.</p>
</section>"""


def _measured(name: str, data: Mapping[str, Any] | None) -> str:
    if data is None:
        return f'<td class="num" data-name="{name}">–<small>not measured</small></td>'
    tasks = f", {count(data['tasks'], 'task')}" if data.get("tasks") else ""
    failures = f", {data['failures']} failed" if data.get("failures") else ""
    return (
        f'<td class="num" data-name="{name}"><b>{number(data["success"])}</b>'
        f"<small>{interval(data['ci95'])}</small><small>n = {data['n']}{tasks}{failures}</small></td>"
    )


def _difference(name: str, value: float | None, ci95: Sequence[float] | None) -> str:
    return (
        f'<td class="num" data-name="{name}"><b>{signed(value)}</b><small>{interval(ci95, with_sign=True)}</small></td>'
    )


def _strip(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, kind: str, *, axis: bool) -> str:
    """Both rates with their intervals on one line from 0 to 1."""
    parts = ['<svg aria-hidden="true">']
    for x in (0, 25, 50, 75, 100):
        parts.append(f'<line x1="{x}%" x2="{x}%" y1="0" y2="38" stroke="var(--grid)"/>')
    for y, data, fill in ((12, before, "var(--paper)"), (27, after, f"var(--{kind})")):
        if data is None or data["success"] is None:
            continue
        if data["ci95"] is not None:
            low, high = (100 * x for x in data["ci95"])
            parts.append(
                f'<line x1="{low:.1f}%" x2="{high:.1f}%" y1="{y}" y2="{y}" stroke="var(--{kind})" stroke-width="2.5" '
                'stroke-opacity="0.5"/>'
            )
        parts.append(
            f'<circle cx="{100 * data["success"]:.1f}%" cy="{y}" r="5" fill="{fill}" stroke="var(--{kind})" '
            'stroke-width="2"/>'
        )
    if axis:
        anchors = ((0, "start"), (50, "middle"), (100, "end"))
        parts += [f'<text x="{x}%" y="52" text-anchor="{side}">{x / 100:g}</text>' for x, side in anchors]
    return "".join(parts) + "</svg>"


def _curves(plots: Sequence[Plot]) -> str:
    if not plots:
        return ""
    return f"""<section>
<h2>How it went</h2>
<p class="lead">Faint: what was logged. Strong: its running mean over nine neighbours, where points are many.</p>
{figures(plots)}
</section>"""


def _audit(report: Mapping[str, Any]) -> str:
    columns, rows = audit_table(report)
    if not rows:
        return ""
    body = [
        f'<tr><th scope="row">{title}<small>{meaning}</small></th>'
        + "".join(f'<td class="num right">{cell}</td>' for cell in cells)
        + "</tr>"
        for title, meaning, cells in rows
    ]
    hard = (
        "; the actions of the policy that trained inside it seek out its weak spots"
        if "on_policy" in report["world_model"]
        else ""
    )
    sentences = (language_sentence(report), calibration_sentence(report))
    notes = "".join(f'<p class="note">{escape(sentence)}</p>\n' for sentence in sentences if sentence)
    return f"""<section>
<h2>How good the world model is</h2>
<p class="lead">One turn ahead of a real history, on turns it was not fitted to{hard}.</p>
<table class="audit">
<thead><tr><td></td>{"".join(f'<th class="right">{column}</th>' for column in columns)}</tr></thead>
<tbody>{"".join(body)}</tbody>
</table>
{notes}{_rules(report)}
{_more(report, "audit.html", "The audit, with intervals, a verdict and the mistakes to read")}</section>"""


def _rules(report: Mapping[str, Any]) -> str:
    """Which rules answered in dreams, and how often."""
    rules = report.get("answered_by_rule")
    if not rules:
        return ""
    rows = "".join(f'<tr><td>{escape(rule)}</td><td class="num right">{n:,}</td></tr>' for rule, n in rules["by_rule"])
    return f"""<p class="note">{escape(rules_sentence(rules))}</p>
<details><summary>By rule</summary><table class="audit"><tbody>{rows}</tbody></table></details>
"""


def _pairs(rollouts: Sequence[Row], report: Mapping[str, Any]) -> str:
    chosen, total = choose(replayed_pairs(rollouts)), report["twins"]
    if not chosen:
        return ""
    return f"""<section>
<h2>Dreams beside reality</h2>
<p class="lead">The same start and the same actions, dreamed and then replayed in the real environment. Of
{total["n"]} pairs, {total["never_parted"]} never parted; {total["false_success"]} were solved in the dream and not in
reality. Below is one pair of each kind. Where both agree, the text stands once, across both columns; once they have
parted they are in different states, and later differences follow from the first.</p>
{"".join(render_pair(kind, pair) for kind, pair in chosen)}
{_more(report, "compare.html", "All pairs of the last comparison, to search and filter")}</section>"""


def _more(report: Mapping[str, Any], page: str, what: str) -> str:
    return f'<p><a href="{page}">{what}</a></p>' if page in report.get("pages", ()) else ""


def _settings(config: str, report: Mapping[str, Any]) -> str:
    versions = f'<p class="note">{escape(plain(report["versions"]))}</p>' if report["versions"] else ""
    if not config:
        return f"<footer>{versions}</footer>" if versions else ""
    return f"""<footer>{versions}<details><summary>Settings of the run (config.yaml)</summary>
<pre>{escape(config)}</pre></details></footer>"""


def write_report(run_folder: Path | str, *, partial: bool = False, machine_price: float = 0.0) -> Path:
    """Writes ``report.json``, ``report.md`` and ``report.html`` into the run folder; returns the path of the page.

    Args:
        run_folder: of a run.
        partial: also of one that is not finished.
        machine_price: of an hour of this machine; 0 is none.

    Raises:
        ReportError: see ``load_run`` and ``build_report``; nothing is written then.
    """
    run = load_run(run_folder)
    numbers = build_report(run, partial=partial, machine_price=machine_price)
    report = {"verdict": verdict(numbers), **numbers}
    files = {
        "report.json": json.dumps(report, indent=2, allow_nan=False) + "\n",
        "report.md": render_markdown(run.folder.name, report, run.rollouts),
        "report.html": render_html(run.folder.name, report, run.metrics, run.rollouts, run.config),
    }
    for name, text in files.items():
        write_atomically(run.folder / name, text)
    return run.folder / "report.html"
