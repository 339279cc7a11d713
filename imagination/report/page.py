"""Pages from the templates beside this file: one file each that needs nothing but itself, for light and dark.

What a page shows comes from games and models: templates escape it, scripts write it as text nodes, and the content
security policy lets no script run that is not the page's own, and no other address be asked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from worldmodel.evaluation.proportions import count, interval, number, signed

LONG = 420  # characters; longer texts fold


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture with its heading, ready for ``<figure>``."""

    title: str
    note: str
    svg: Markup
    wide: bool = False


def plain(value: Any) -> str:
    """A string, or a dict of them, in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "unknown" if value is None else str(value)


def _soft_intervals(sentence: str) -> Markup:
    """Intervals step back behind the numbers they belong to."""
    return Markup(re.sub(r"(\[[^\]]*\])", r'<span class="ci">\1</span>', str(escape(sentence))))


def _cut(text: str) -> tuple[str, str]:
    """The beginning of a long text and its rest."""
    at = len(text) if len(text) <= LONG else text.rfind(" ", 0, LONG) + 1 or LONG
    return text[:at], text[at:]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {s} s"


_ENVIRONMENT = Environment(
    loader=PackageLoader("imagination.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "count": count,
    "cut": _cut,
    "duration": _duration,
    "interval": interval,
    "number": number,
    "plain": plain,
    "signed": signed,
    "soft_intervals": _soft_intervals,
    "thousands": lambda value: f"{value:,.0f}",
}


def render(
    template: str, title: str, *, css: str = "", scripts: Sequence[str] = (), policy: str = "", **facts: Any
) -> str:
    """A whole page.

    Args:
        template: in ``templates/``.
        css: in ``assets/``, behind the common style sheet.
        scripts: in ``assets/``; together they run in strict mode and in a scope of their own.
        policy: what else a page with scripts may do, in the words of the content security policy.
        facts: what the template shows.
    """
    style = _asset("page.css") + (_asset(css) if css else "")
    script, allowed = "", "default-src 'none'; style-src 'unsafe-inline'"
    if scripts:
        code = "\n".join(map(_asset, scripts))
        script = f'"use strict";\n(() => {{\n{code}}})();\n'
        allowed = (
            f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}; "
            f"script-src {_hash(script)}; {policy}"
        )
    frame = {"policy": Markup(allowed), "style": Markup(style), "script": Markup(script)}
    return _ENVIRONMENT.get_template(template).render(title=title, **frame, **facts)


def _asset(name: str) -> str:
    return (files("imagination.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


def embed_json(value: Any) -> Markup:
    """JSON that can stand inside a ``script`` element: pure ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


class Pictures:
    """PNG files of some folders as ``data:`` addresses, each once."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._place_of: dict[str, int] = {}  # by name
        self._places: dict[str, int] = {}  # by address

    def place(self, name: str | None) -> int:
        """Its place, from 1, among ``addresses``; 0 for none, or one that is in none of the folders."""
        if name not in self._place_of:
            path = next((folder / name for folder in self._folders if name and (folder / name).is_file()), None)
            if name is None or path is None:
                return 0
            address = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
            self._place_of[name] = self._places.setdefault(address, len(self._places) + 1)
        return self._place_of[name]

    @property
    def addresses(self) -> list[str]:
        return list(self._places)


def render_play_page(run: str, action_chars: int) -> str:
    """The page to play in a dream by hand. It sends requests to no server but its own."""
    title = f"{run} · play in the dream"
    facts = {"run": run, "action_chars": action_chars}
    return render("play.html", title, css="play.css", scripts=["play.js"], policy="connect-src 'self'", **facts)
