"""A page with a script of its own, which needs nothing but itself and the server that it may come from.

The content security policy lets no script or style but these run, and no other address be asked; untrusted text is the
script's to write as text nodes only.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from imagination.report.style import CSS


def scripted_page(title: str, body: str, css: str, code: str, policy: str) -> str:
    """
    Args:
        title: plain text.
        body: HTML; the script comes behind it.
        css: behind the common style sheet.
        code: JavaScript, which runs in strict mode and in a scope of its own.
        policy: what else the page may do, in the words of the content security policy.
    """
    style = CSS + css
    script = f'"use strict";\n(() => {{\n{code}}})();\n'
    allowed = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
        f"; {policy}"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{allowed}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


def picture_address(name: str, folders: Sequence[Path]) -> str | None:
    """A PNG file as a ``data:`` address; ``None`` where it is in none of the folders."""
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    return None if path is None else f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"
