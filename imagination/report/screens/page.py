"""Dreamed screens beside real ones, an episode at a time, with a slider through its turns. One file, no network.

Actions and goals are untrusted text: they are embedded as JSON without ``<``, and the script writes them as text nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from imagination.report.compare_page import embed_json
from imagination.report.page import picture_address, scripted_page
from worldmodel.evaluation.proportions import count


def render_screens(comparison: Mapping[str, Any], screens: Sequence[Path]) -> str:
    """The page of a ``compare-screens.json``.

    Args:
        screens: folders where the pictures that it names are; those that are missing are left blank.
    """
    folder = files("imagination.report.screens") / "assets"
    body = f"""{_head(comparison)}
{(folder / "screens.html").read_text(encoding="utf-8")}
<script type="application/json" id="data">{embed_json(_data(comparison, screens))}</script>"""
    code, css = ((folder / f"screens.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    return scripted_page(f"{comparison['run']} · dreamed screens", body, css, code, "img-src data:")


def headline(comparison: Mapping[str, Any]) -> str:
    """The first thing to know, in a sentence."""
    episodes = comparison["episodes"]
    if not episodes:
        return "There was no episode to dream again"
    true = sum(episode["parted"] is None for episode in episodes)
    whole = count(len(episodes), "episode")
    return f"{true:,} of {whole}, dreamed from the first screen on, never visibly part from reality"


def _head(comparison: Mapping[str, Any]) -> str:
    facts = [comparison["run"], f"seed {comparison['seed']}", f"{count(comparison['steps'], 'step')} a screen"]
    return f"""<header class="top">
<div class="run">{escape(" · ".join(facts))}</div>
<h1>{escape(headline(comparison))}</h1>
</header>"""


def _data(comparison: Mapping[str, Any], screens: Sequence[Path]) -> dict[str, Any]:
    """The episodes with a place, from 1, among ``pictures`` in place of each picture's name; 0 where it is missing."""
    pictures: dict[str, int] = {}

    def picture(name: str) -> int:
        address = picture_address(name, screens)
        return 0 if address is None else pictures.setdefault(address, len(pictures) + 1)

    episodes = [
        {
            **episode,
            "start": picture(episode["start"]),
            "turns": [
                {**turn, **{side: picture(turn[side]) for side in ("real", "shrunk", "dream", "ahead")}}
                for turn in episode["turns"]
            ],
        }
        for episode in comparison["episodes"]
    ]
    return {"pictures": list(pictures), "episodes": episodes, "size": comparison["size"]}
