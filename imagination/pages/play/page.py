"""The page to play in a dream by hand. It needs nothing but the server that it comes from.

What a world model writes is untrusted text: the script writes it as text nodes only, and the content security policy
lets no other script run and no other address be asked.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files

from imagination.pages.style import CSS


def render_play_page(run: str, action_chars: int) -> str:
    """
    Args:
        run: its name.
        action_chars: the longest action that the server takes.
    """
    folder = files("imagination.pages.play") / "assets"
    style = CSS + (folder / "play.css").read_text(encoding="utf-8")
    code = (folder / "play.js").read_text(encoding="utf-8")
    script = f'"use strict";\n(() => {{\n{code}}})();\n'
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; connect-src 'self'; style-src {_hash(style)}; "
        f"script-src {_hash(script)}"
    )
    body = (folder / "play.html").read_text(encoding="utf-8")
    body = body.replace("$RUN", escape(run)).replace("$ACTION_CHARS", str(action_chars))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(run)} · play in the dream</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"
