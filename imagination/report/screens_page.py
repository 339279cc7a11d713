"""Dreamed screens beside real ones: a page with a slider through the turns of each episode, and the audit's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from imagination.report.page import Pictures, embed_json, render
from worldmodel.evaluation.proportions import count, number

ALIKE = {
    "psnr": ("PSNR, dB", 1),
    "ssim": ("SSIM", 3),
    "changed_region_psnr": ("PSNR where it changes, dB", 1),
    "changed_region_iou": ("IoU of what changes", 2),
    "unchanged_left_alone": ("still where nothing changes", 2),
}


def render_screens(comparison: Mapping[str, Any], screens: Sequence[Path]) -> str:
    """The page of a ``compare-screens.json``; its pictures are in the folders ``screens``, missing ones are blank."""
    return render(
        "screens.html",
        f"{comparison['run']} · dreamed screens",
        css="screens.css",
        scripts=["screens.js"],
        policy="img-src data:",
        comparison=comparison,
        headline=headline(comparison),
        data=embed_json(_data(comparison, screens)),
    )


def headline(comparison: Mapping[str, Any]) -> str:
    """The first thing to know, in a sentence."""
    episodes = comparison["episodes"]
    if not episodes:
        return "There was no episode to dream again"
    true = sum(episode["parted"] is None for episode in episodes)
    whole = count(len(episodes), "episode")
    return f"{true:,} of {whole}, dreamed from the first screen on, never visibly part from reality"


def _data(comparison: Mapping[str, Any], screens: Sequence[Path]) -> dict[str, Any]:
    """The episodes with a place, from 1, among ``pictures`` in place of each picture's name; 0 where it is missing."""
    pictures = Pictures(screens)
    episodes = [
        {
            **episode,
            "start": pictures.place(episode["start"]),
            "turns": [
                {**turn, **{side: pictures.place(turn[side]) for side in ("real", "shrunk", "dream", "ahead")}}
                for turn in episode["turns"]
            ],
        }
        for episode in comparison["episodes"]
    ]
    return {"pictures": pictures.addresses, "episodes": episodes, "size": comparison["size"]}


def audit_table(audit: Mapping[str, Any]) -> RenderableType:
    """Dreamed screens, and beside them what is reached by saying that nothing changes."""
    table = Table(
        title=f"Dreamed screens of {audit['run']}, {audit['steps']} steps each: held-out tasks",
        title_style="bold",
        caption="95 % intervals in brackets; copied: the screen before, as if nothing changed",
        pad_edge=False,
    )
    for title in ("", "dreamed", "copied", "n"):
        table.add_column(title, justify="right" if title else "left", no_wrap=bool(title))
    for key, title in (("one_turn", "from the real screen before"), ("open_loop", "from the first screen on")):
        table.add_row(Text(title, style="bold"))
        for name, (words, digits) in ALIKE.items():
            row = audit[key][name]
            table.add_row(
                f"  {words}",
                _estimate(row["dream"], digits),
                _estimate(row.get("copy"), digits),
                str(row["dream"]["n"]),
            )
        table.add_section()
    table.add_row(Text("same screen, two actions", style="bold"))
    for name, words in (
        ("differ", "other outcomes: dreams differ"),
        ("own", "other outcomes: each dream its own"),
        ("same", "same outcome: same dream"),
    ):
        row = audit["sensitivity"][name]
        table.add_row(f"  {words}", _estimate(row, 2), "", str(row["n"]))
    if audit["probe"] is not None:
        table.add_section()
        probe = audit["probe"]
        for title, part in (("state of the element", probe), ("  where it flips", probe["flips"])):
            real = number(part["real"]["value"])
            table.add_row(
                f"{title} (real: {real})",
                _estimate(part["dream"], 2),
                _estimate(part["copy"], 2),
                str(part["dream"]["n"]),
            )
    speed = audit["speed"]
    footer = (
        f"{speed['screens_per_second']:g} screens a second on {speed['threads']} thread(s), "
        f"{speed['screens_per_core_second']:g} a second of one core's time"
    )
    if audit.get("pages_right") is not None:
        footer += f"\n{audit['pages_right']:.0%} of the pages that screens were drawn from are exactly the real ones"
    return Group(table, Text(footer), *(Text(f"note: {note}", style="yellow") for note in audit["notes"]))


def _estimate(estimate: Mapping[str, Any] | None, digits: int) -> Text:
    if estimate is None or estimate["value"] is None:
        return Text("–")
    ends = estimate["ci95"]
    brackets = "" if ends is None else f" [{', '.join(number(end, digits) for end in ends)}]"
    return Text(number(estimate["value"], digits) + brackets)
