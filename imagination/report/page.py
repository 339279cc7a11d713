"""What the report and the audit share as pages: the frame, and a style sheet for light and dark, wide and narrow."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path


def document(title: str, body: str, more_css: str = "") -> str:
    """A whole page that needs no network and runs no script.

    Args:
        title: plain text.
        body: HTML.
        more_css: behind the common style sheet.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{CSS}{more_css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf7; --card: #ffffff; --ink: #1b1d21; --muted: #5f646d; --grid: #e3e0d9;
  --dream: #0069a8; --real: #b54a00; --expert: #73777f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #121418; --card: #1a1d23; --ink: #e9e7e2; --muted: #9ba1aa; --grid: #30343c;
    --dream: #5ab6ea; --real: #f0a043; --expert: #9ba1aa;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 5rem; }
section { margin-top: 3.5rem; }
h1 { font-size: clamp(1.45rem, 1.1rem + 1.9vw, 2.25rem); line-height: 1.25; font-weight: 600; letter-spacing: -0.015em;
  margin: 0.75rem 0 1rem; text-wrap: pretty; }
h2 { font-size: 1.3rem; font-weight: 600; letter-spacing: -0.01em; margin: 0 0 0.35rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 0; }
p { margin: 0.35rem 0; max-width: 44rem; text-wrap: pretty; }
.run { color: var(--muted); font-size: 0.9rem; overflow-wrap: anywhere; }
.ci { color: var(--muted); font-weight: 400; font-size: 0.72em; white-space: nowrap; letter-spacing: 0; }
.more { font-size: 1.08rem; }
.note, .lead { color: var(--muted); font-size: 0.9rem; }
.lead { margin-bottom: 1.1rem; }
.partial { border-left: 3px solid var(--real); padding: 0.1rem 0 0.1rem 1rem; margin-top: 1.5rem; }
.partial ul { margin: 0.25rem 0; padding-left: 1.1rem; color: var(--muted); font-size: 0.9rem; }
.dream { color: var(--dream); } .real { color: var(--real); }

table { border-collapse: collapse; width: 100%; }
a { color: inherit; text-underline-offset: 0.2em; }
th, td { text-align: left; font-weight: 400; padding: 0.7rem 1rem 0.7rem 0; border-top: 1px solid var(--grid);
  vertical-align: top; }
thead th, thead td { border-top: 0; }
thead th { color: var(--muted); font-size: 0.85rem; padding-bottom: 0.35rem; }
tbody th { font-weight: 600; }
td small, th small { display: block; color: var(--muted); font-size: 0.8rem; font-weight: 400; white-space: nowrap; }
th small { white-space: normal; }
td.num { white-space: nowrap; } td.num b { font-size: 1.2rem; font-weight: 600; }
.results td.strip { width: 34%; padding-right: 0; }
.strip svg { display: block; width: 100%; height: 3.1rem; overflow: visible; }
.strip text { font-size: 11px; fill: var(--muted); }

.plots { display: grid; gap: 1rem; grid-template-columns: repeat(6, 1fr); }
figure { margin: 0; background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 0.9rem 1rem;
  grid-column: span 2; min-width: 0; }
figure.wide { grid-column: span 3; }
figure svg { display: block; width: 100%; height: auto; margin-top: 0.5rem; overflow: visible; }
figcaption .note { display: block; }

.cost td.bar { width: 34%; padding-right: 0; }
.cost .total th, .cost .total td { font-weight: 600; border-top-color: var(--muted); }
.second { margin: 1.75rem 0 0.35rem; }
.bar i { display: inline-block; height: 0.8rem; min-width: 2px; background: var(--expert); border-radius: 0 2px 2px 0;
  vertical-align: middle; }
.bar span { font-size: 0.85rem; padding-left: 0.5rem; white-space: nowrap; }
.right { text-align: right; }
.audit { max-width: 54rem; }

.pair, .episode { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; margin-top: 1.25rem;
  overflow: hidden; }
.pair > header { padding: 0.9rem 1.1rem; }
.pair > header .note { margin: 0.1rem 0 0; }
.heads, .cells { display: grid; grid-template-columns: 1fr 1fr; }
.heads { font-size: 0.85rem; font-weight: 600; border-top: 1px solid var(--grid); }
.heads > *, .cells > * { padding: 0.45rem 1.1rem; min-width: 0; }
.heads > * + *, .cells > * + * { border-left: 1px solid var(--grid); }
ol.turns { list-style: none; margin: 0; padding: 0; }
.turn { border-top: 1px solid var(--grid); }
.act { display: flex; gap: 0.75rem; align-items: baseline; padding: 0.5rem 1.1rem 0; font-size: 0.9rem; }
.no { color: var(--muted); font-size: 0.8rem; min-width: 1.2rem; }
code, .text, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.82rem;
  line-height: 1.5; }
.act code { font-weight: 600; font-size: 0.88rem; overflow-wrap: anywhere; }
.conf { margin-left: auto; white-space: nowrap; color: var(--muted); font-size: 0.8rem; }
.conf .gauge { display: inline-block; width: 3.5rem; height: 0.4rem; background: var(--grid); border-radius: 2px;
  margin-right: 0.5rem; vertical-align: middle; overflow: hidden; }
.conf .gauge i { display: block; height: 100%; background: var(--dream); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.both { padding: 0.15rem 1.1rem 0.6rem 3rem; color: var(--muted); }
.cells .text { padding-bottom: 0.7rem; }
.cut { color: var(--muted); font-style: italic; }
.tag { display: inline-block; font: 600 0.75rem/1.5 system-ui, sans-serif; padding: 0 0.45rem; border-radius: 3px;
  border: 1px solid currentColor; margin-top: 0.3rem; margin-right: 0.35rem; color: var(--muted); }
.parting { display: flex; align-items: center; gap: 0.75rem; padding: 0.5rem 1.1rem; font-size: 0.85rem;
  font-weight: 600; border-top: 2px solid var(--ink); }
mark { color: inherit; border-radius: 2px; padding: 0.05em 0; text-decoration: underline; text-underline-offset: 0.2em;
  text-decoration-thickness: 1.5px; }
.in-dream mark { background: color-mix(in srgb, var(--dream) 17%, transparent); text-decoration-color: var(--dream); }
.in-real mark { background: color-mix(in srgb, var(--real) 17%, transparent); text-decoration-color: var(--real); }
.who { display: none; font: 600 0.75rem/1.6 system-ui, sans-serif; }
.after > .cells, .after > .act { opacity: 0.75; }
details > summary { cursor: pointer; color: var(--muted); font-size: 0.9rem; padding: 0.45rem 1.1rem; }
details > summary:hover { color: var(--ink); }
.folded { border-top: 1px solid var(--grid); }
details > .text, details > pre { padding: 0.25rem 1.1rem 0.9rem; margin: 0; }
.start { border-top: 1px solid var(--grid); }
.episode > summary { padding: 0.75rem 1.1rem; color: var(--ink); }
.episode .both { padding-left: 3rem; }
pre { overflow-x: auto; }
footer { margin-top: 3.5rem; border-top: 1px solid var(--grid); padding-top: 1rem; }

@media (max-width: 720px) {
  main { padding: 1.25rem 1rem 3rem; }
  section { margin-top: 2.5rem; }
  figure, figure.wide { grid-column: 1 / -1; }
  .results thead, .cost thead { display: none; }
  .results tr, .cost tr { display: grid; grid-template-columns: repeat(3, 1fr); border-top: 1px solid var(--grid);
    padding: 0.7rem 0; }
  .results th, .results td, .cost th, .cost td { border: 0; padding: 0.15rem 0.5rem 0.15rem 0; }
  .results tbody th, .results td.strip, .cost tbody th, .cost td.bar { grid-column: 1 / -1; width: auto; }
  .cost .right { text-align: left; }
  td[data-name]::before { content: attr(data-name); display: block; color: var(--muted);
    font-size: 0.75rem; }
  .cells { grid-template-columns: 1fr; }
  .cells > * + * { border-left: 0; border-top: 1px dashed var(--grid); }
  .heads { display: none; }
  .who { display: block; }
  .both { padding-left: 1.1rem; }
}
@media print { .pair, figure { break-inside: avoid; } }
"""


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
