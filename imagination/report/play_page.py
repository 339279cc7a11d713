"""The page to play in a dream by hand. It asks nobody but the server that it comes from."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from imagination.report.scripted import scripted_page


def render_play_page(run: str, action_chars: int) -> str:
    """
    Args:
        run: its name.
        action_chars: the longest action that the server takes.
    """
    folder = files("imagination.report") / "assets"
    html, css, code = ((folder / f"play.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    body = html.replace("$RUN", escape(run)).replace("$ACTION_CHARS", str(action_chars))
    return scripted_page(f"{run} · play in the dream", body, css, code, "connect-src 'self'")
