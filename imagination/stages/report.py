"""Stage ``report``: a page from what the run has written so far."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from imagination.pages.report.report import write_report
from imagination.pages.report.text import terminal_table
from imagination.settings import Config, UserError


def report(config: Config, folder: Path, partial: bool = True) -> None:
    """Writes ``report.json``, ``report.md`` and ``report.html``, and prints the table and where the page is."""
    if not (folder / "summary.json").exists():
        raise UserError(f"{folder} holds no run yet; start one with `imagine collect run={config.run}`")
    page = write_report(folder, partial=partial)
    console = Console()
    console.print(terminal_table(json.loads((folder / "report.json").read_text())))
    console.print(f"report: {page}", soft_wrap=True)
