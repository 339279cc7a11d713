"""The report of a run as one page of HTML, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagination.evaluation.compare.alignment import Row, replayed_pairs
from imagination.report import run_text
from imagination.report.costs import cost_view
from imagination.report.episodes import choose, chosen_episodes, pair_view
from imagination.report.page import render
from imagination.report.run_data import build_report, load_run
from imagination.report.run_plots import draw_curves, loop_curve
from real_envs.files import write_atomically

MEASURES = {
    "train_tasks": ("Training tasks", "real environment", "real"),
    "heldout_tasks": ("Held-out tasks", "real environment, never trained on", "real"),
    "dream_success": ("In the dream", "what the world model believed", "dream"),
}


def render_html(
    name: str, report: Mapping[str, Any], metrics: Sequence[Row], rollouts: Sequence[Row], config: str
) -> str:
    """The page of the run ``name``, from what ``build_report`` made and the run's own files."""
    headline, *reasons = report["verdict"]
    columns, rows = run_text.audit_table(report)
    heldout = {"heldout_tasks": ("Held-out tasks", "real environment, trained on", "real")}
    rounds, rules = run_text.loop_view(report), report.get("answered_by_rule")
    return render(
        "report.html",
        f"{name} · imagination",
        name=name,
        report=report,
        headline=headline,
        reasons=reasons,
        tripwires=run_text.tripwire_note(report),
        measures=MEASURES | (heldout if run_text.trained_on_heldout(report) else {}),
        curves=draw_curves(metrics, report),
        rounds=rounds and {**rounds, "curve": loop_curve(report)},
        cost=cost_view(report),
        audit={"columns": columns, "rows": rows, "sentences": run_text.audit_sentences(report)},
        rules=rules and {**rules, "sentence": run_text.rules_sentence(rules)},
        pairs=[pair_view(kind, pair) for kind, pair in choose(replayed_pairs(rollouts))],
        episodes=chosen_episodes(rollouts),
        config=config,
    )


def write_report(run_folder: Path | str, *, partial: bool = False, machine_price: float = 0.0) -> Path:
    """Writes ``report.json``, ``report.md`` and ``report.html`` into the run folder; returns the path of the page.

    Raises ``ReportError`` as ``load_run`` and ``build_report`` do; nothing is written then.
    """
    run = load_run(run_folder)
    numbers = build_report(run, partial=partial, machine_price=machine_price)
    report = {"verdict": run_text.verdict(numbers), **numbers}
    files = {
        "report.json": json.dumps(report, indent=2, allow_nan=False) + "\n",
        "report.md": run_text.render_markdown(run.folder.name, report, run.rollouts),
        "report.html": render_html(run.folder.name, report, run.metrics, run.rollouts, run.config),
    }
    for name, text in files.items():
        write_atomically(run.folder / name, text)
    return run.folder / "report.html"
