"""The audit of a model of screens as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from worldmodel.evaluation.proportions import number

ALIKE = {
    "psnr": ("PSNR, dB", 1),
    "ssim": ("SSIM", 3),
    "changed_region_psnr": ("PSNR where it changes, dB", 1),
    "changed_region_iou": ("IoU of what changes", 2),
    "unchanged_left_alone": ("still where nothing changes", 2),
}


def audit_table(found: Mapping[str, Any]) -> RenderableType:
    """Dreamed screens, and beside them what is reached by saying that nothing changes."""
    table = Table(
        title=f"Dreamed screens of {found['run']}, {found['steps']} steps each: held-out tasks",
        title_style="bold",
        caption="95 % intervals in brackets; copied: the screen before, as if nothing changed",
        pad_edge=False,
    )
    for title in ("", "dreamed", "copied", "n"):
        table.add_column(title, justify="right" if title else "left", no_wrap=bool(title))
    for key, title in (("one_turn", "from the real screen before"), ("open_loop", "from the first screen on")):
        table.add_row(Text(title, style="bold"))
        for name, (words, digits) in ALIKE.items():
            row = found[key][name]
            table.add_row(
                f"  {words}", _told(row["dream"], digits), _told(row.get("copy"), digits), str(row["dream"]["n"])
            )
        table.add_section()
    table.add_row(Text("same screen, two actions", style="bold"))
    for name, words in (
        ("differ", "other outcomes: dreams differ"),
        ("own", "other outcomes: each dream its own"),
        ("same", "same outcome: same dream"),
    ):
        row = found["sensitivity"][name]
        table.add_row(f"  {words}", _told(row, 2), "", str(row["n"]))
    if found["probe"] is not None:
        table.add_section()
        probe = found["probe"]
        for title, part in (("state of the element", probe), ("  where it flips", probe["flips"])):
            real = number(part["real"]["value"])
            table.add_row(
                f"{title} (real: {real})",
                _told(part["dream"], 2),
                _told(part["copy"], 2),
                str(part["dream"]["n"]),
            )
    speed = found["speed"]
    said = (
        f"{speed['screens_per_second']:g} screens a second on {speed['threads']} thread(s), "
        f"{speed['screens_per_core_second']:g} a second of one core's time"
    )
    if found.get("pages_right") is not None:
        said += f"\n{found['pages_right']:.0%} of the pages that screens were drawn from are to the letter what came"
    return Group(table, Text(said), *(Text(f"note: {note}", style="yellow") for note in found["notes"]))


def _told(estimate: Mapping[str, Any] | None, digits: int) -> Text:
    if estimate is None or estimate["value"] is None:
        return Text("–")
    ends = estimate["ci95"]
    brackets = "" if ends is None else f" [{', '.join(number(end, digits) for end in ends)}]"
    return Text(number(estimate["value"], digits) + brackets)
