from __future__ import annotations

import json
import math
from pathlib import Path

from rich.console import Console
from rich.text import Text

from imagination.report.costs import without_dreams
from imagination.report.run_page import write_report
from imagination.report.run_text import outdated_sentences, terminal_table
from imagination.settings import Config, UserError
from imagination.settings.compose import command


def report(config: Config, folder: Path, partial: bool = True) -> None:
    """Write the report of a run: dreamed and real success on one page.

    Reads what the other stages wrote and draws the curves. It trains nothing and may be run at any time.
    With a control/ in the run folder it also estimates what the same success costs without dreams.

    Reads: summary.json, metrics.jsonl, rollouts.jsonl, control/ (where there is one)
    Writes: report.html, report.md, report.json

    Examples:
        imagine report run=mine
        imagine report run=mine machine_price=0.5

    Raises:
        UserError: there is no run, or ``machine_price`` is no price.
    """
    if not 0 <= config.machine_price < math.inf:
        raise UserError(f"machine_price is what an hour of this machine costs, 0 or more, got {config.machine_price}")
    if not (folder / "summary.json").exists():
        raise UserError(f"{folder} holds no run yet; start one with `{command('collect', config)}`")
    page = write_report(folder, partial=partial, machine_price=config.machine_price)
    console = Console()
    numbers = json.loads((folder / "report.json").read_text())
    console.print(terminal_table(numbers))
    console.print(Text(" ".join(without_dreams(numbers))))
    for sentence in outdated_sentences(numbers):
        console.print(Text(f"note: {sentence}", style="yellow"))
    console.print(f"report: {page}", soft_wrap=True)
