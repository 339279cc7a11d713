"""Stage ``report``: a page from what the run has written so far."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rich.console import Console
from rich.text import Text

from imagination.report.costs import without_dreams
from imagination.report.run_page import write_report
from imagination.report.run_text import terminal_table
from imagination.settings import Config, UserError


def report(config: Config, folder: Path, partial: bool = True) -> None:
    """Writes ``report.json``, ``report.md`` and ``report.html``, and prints the table and where the page is.

    Raises:
        UserError: there is no run, or ``machine_price`` is no price.
    """
    if not 0 <= config.machine_price < math.inf:
        raise UserError(f"machine_price is what an hour of this machine costs, 0 or more, got {config.machine_price}")
    if not (folder / "summary.json").exists():
        raise UserError(f"{folder} holds no run yet; start one with `imagine collect run={config.run}`")
    page = write_report(folder, partial=partial, machine_price=config.machine_price)
    console = Console()
    numbers = json.loads((folder / "report.json").read_text())
    console.print(terminal_table(numbers))
    console.print(Text(" ".join(without_dreams(numbers))))
    console.print(f"report: {page}", soft_wrap=True)
