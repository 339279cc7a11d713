"""The frame and the style sheet of all pages: one file each that needs nothing but itself, for light and dark.

The content security policy lets no script or style run that is not the page's own, and no other address be asked.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture with its heading, ready for ``<figure>``."""

    title: str
    note: str
    svg: str
    wide: bool = False


def document(title: str, body: str, more_css: str = "") -> str:
    """A whole page that runs no script.

    Args:
        title: plain text.
        body: HTML.
        more_css: behind the common style sheet.
    """
    style = asset("page.css") + more_css
    return _frame(title, "default-src 'none'; style-src 'unsafe-inline'", style, f"<main>\n{body}\n</main>")


def scripted_page(title: str, body: str, css: str, code: str, policy: str) -> str:
    """A page with a script of its own, which writes untrusted text as text nodes only.

    Args:
        title: plain text.
        body: HTML; the script comes behind it.
        css: behind the common style sheet.
        code: JavaScript, which runs in strict mode and in a scope of its own.
        policy: what else the page may do, in the words of the content security policy.
    """
    style = asset("page.css") + css
    script = f'"use strict";\n(() => {{\n{code}}})();\n'
    allowed = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
        f"; {policy}"
    )
    return _frame(title, allowed, style, f"{body}\n<script>{script}</script>")


def _frame(title: str, policy: str, style: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def asset(name: str) -> str:
    """The text of a file in ``assets/``."""
    return (files("imagination.report") / "assets" / name).read_text(encoding="utf-8")


def figures(plots: Sequence[Plot], narrow: str = "small") -> str:
    """Pictures in a grid, each with its heading; nothing for none. ``narrow``: the class of those that are not wide."""
    if not plots:
        return ""
    shown = [
        f'<figure class="{"wide" if plot.wide else narrow}"><figcaption><h3>{escape(plot.title)}</h3>'
        f'<span class="note">{escape(plot.note, quote=False)}</span></figcaption>{plot.svg}</figure>'
        for plot in plots
    ]
    return f'<div class="plots">{"".join(shown)}</div>'


def banner(run: str, facts: Sequence[str], headline: str, below: str) -> str:
    """The head of a page. ``headline`` and ``below`` are HTML, the facts plain text."""
    line = " · ".join(fact for fact in (run, *facts) if fact)
    return f"""<header>
<div class="run">{escape(line)}</div>
<h1>{headline}</h1>
{below}
</header>"""


def picture_address(name: str, folders: Sequence[Path]) -> str | None:
    """A PNG file as a ``data:`` address; ``None`` where it is in none of the folders."""
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    return None if path is None else f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


def render_play_page(run: str, action_chars: int) -> str:
    """The page to play in a dream by hand. It asks nobody but the server that it comes from.

    Args:
        run: its name.
        action_chars: the longest action that the server takes.
    """
    html, css, code = (asset(f"play.{kind}") for kind in ("html", "css", "js"))
    body = html.replace("$RUN", escape(run)).replace("$ACTION_CHARS", str(action_chars))
    return scripted_page(f"{run} · play in the dream", body, css, code, "connect-src 'self'")
