"""A run folder in, a report out: ``report.json``, ``report.md`` and ``report.html``."""

from __future__ import annotations

import json
from pathlib import Path

from imagination.report.run_data import build_report, load_run
from imagination.report.run_page import render_html
from imagination.report.run_text import render_markdown, verdict
from real_envs.files import write_atomically


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
