"""A comparison as one page: a summary, and all pairs to search, filter and read. It needs nothing but itself.

Observations are untrusted text, so three things keep them from becoming code: they are embedded as JSON in which no
``<``, ``>`` or ``&`` stands (no ``</script>`` can end it), the script only ever writes them as text nodes, and the
content security policy lets no script run but the one whose hash it names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from imagination.evaluation.compare.pairs import NEVER
from imagination.report.compare_text import KINDS, SIGNALS_ON, SOURCES
from imagination.report.page import asset, picture_address, scripted_page
from worldmodel.evaluation.proportions import count, interval, number, signed

SCRIPTS = ("compare_state.js", "compare_list.js", "compare_pair.js", "compare_main.js")
HORIZONS = (1, 3, 5, 8, 12)  # turns after which the share of true dreams is told
KINDS_SHOWN = (NEVER, "wording", "state", "reward", "end", "invalid")


def render_page(comparison: Mapping[str, Any], screens: Sequence[Path] = ()) -> str:
    """The page of a ``compare.json``.

    Args:
        screens: folders where the pictures that it names may be; those found are in the page.
    """
    body = f"""<a class="skip" href="#pairs" id="skip">Skip to the pairs</a>
{_head(comparison)}
{asset("compare.html")}
<script type="application/json" id="data">{embed_json(page_data(comparison, screens))}</script>"""
    title = f"{comparison['run']} · dreams beside reality"
    return scripted_page(title, body, asset("compare.css"), "\n".join(map(asset, SCRIPTS)), "img-src data:")


def embed_json(value: Any) -> str:
    """JSON that can stand inside a ``script`` element: pure ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(comparison: Mapping[str, Any], screens: Sequence[Path] = ()) -> dict[str, Any]:
    """The pairs, as small as the page can read them: each text stands once, turns are lists.

    ``{"labels": {kind: words}, "texts": [...], "pictures": [...], "pairs": [...]}``; a pair has the keys of
    ``compare.json`` except that ``start`` is an index into the texts, ``screenshot`` 0 or a place, from 1, among the
    pictures, and a turn ``[action, kind, unsure, dream, real]``, a side ``0`` or
    ``[observation, reward, terminated, confidence, marks, picture, rule]``. Marks count UTF-16 units, as in JavaScript.
    """
    texts: dict[str, int] = {}
    pictures: dict[str, int] = {}  # data: addresses
    place_of: dict[str, int] = {}

    def index(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def picture(name: str | None) -> int:
        if name is None:
            return 0
        if name not in place_of:
            address = picture_address(name, screens)
            if address is None:
                return 0
            place_of[name] = pictures.setdefault(address, len(pictures) + 1)
        return place_of[name]

    def side(answer: Mapping[str, Any] | None) -> Any:
        if answer is None:
            return 0
        text, confidence = answer["observation"], answer["confidence"]
        marks = [[_utf16(text, position) for position in span] for span in answer["marks"]]
        confidence = None if confidence is None else round(confidence, 4)
        rule = index(answer["rule"]) if answer.get("rule") else None
        seen = picture(answer.get("screenshot"))
        return [index(text), answer["reward"], int(answer["terminated"]), confidence, marks or 0, seen, rule]

    pairs = []
    for pair in comparison["pairs"]:
        turns = [
            [index(t["action"]), t["kind"], int(t["unsure"]), side(t["dream"]), side(t["real"])] for t in pair["turns"]
        ]
        pairs.append(
            {**pair, "start": index(pair["start"]), "screenshot": picture(pair.get("screenshot")), "turns": turns}
        )
    return {"labels": {**KINDS, **SOURCES}, "texts": list(texts), "pictures": list(pictures), "pairs": pairs}


def _utf16(text: str, position: int) -> int:
    return len(text[:position].encode("utf-16-le", "surrogatepass")) // 2


def _head(comparison: Mapping[str, Any]) -> str:
    facts = [
        comparison["run"],
        f"seed {comparison['seed']}",
        f"policy {comparison['policy']} at temperature {comparison['temperature']:g}" if comparison["policy"] else "",
        comparison["hardware"],
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison["notes"])
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    return f"""<header class="top">
<div class="run">{escape(" · ".join(str(fact) for fact in facts if fact))}</div>
<h1>{escape(headline(comparison))}</h1>
{notes}
<details class="summary" open><summary>Summary</summary>
<div class="tables">
{_aligned(comparison["aligned"])}
{"".join(_free(split) for split in comparison["free"])}
{_signals(comparison.get("signals", ()))}
{_cost(comparison["cost"])}
</div>
</details>
</header>"""


def headline(comparison: Mapping[str, Any]) -> str:
    """The first thing to know, in a sentence."""
    dreams = [row for row in comparison["aligned"] if row["source"] == "dream"] or comparison["aligned"]
    dreams = [row for row in dreams if row["pairs"]]
    if not dreams:
        return "Nothing could be compared"
    counts = [f"{row['first'].get(NEVER, 0):,} of {row['pairs']:,}" for row in dreams]
    whose = "of the policy’s dreams" if dreams[0]["source"] == "dream" else "of the logged episodes, dreamed again,"
    if len(dreams) > 1:
        counts = [f"{part} ({row['split']})" for part, row in zip(counts, dreams, strict=True)]
    wrong = sum(row["false_success"] for row in dreams)
    solved = f"{wrong} {'was' if wrong == 1 else 'were'} solved only in the dream"
    return f"{' and '.join(counts)} {whose} never parted from reality; {solved}"


def _table(title: str, lead: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML; the first of a row is its header."""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return f"""<section><h2>{title}</h2><p class="lead">{lead}</p>
<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table class="small">
<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div></section>"""


def _aligned(aligned: Sequence[Mapping[str, Any]]) -> str:
    if not aligned:
        return ""
    horizons = [k for k in HORIZONS if k <= max(len(row["still_true"]) - 1 for row in aligned)]
    rows = []
    for row in aligned:
        name = f"{escape(SOURCES[row['source']])}<small>{escape(row['split'])}</small>"
        left_out = f"<small>{row['left_out']} left out</small>" if row["left_out"] else ""
        kinds = [f"{row['first'].get(kind, 0) or '–'}" for kind in KINDS_SHOWN]
        true = {k: share for k, share, _ in row["still_true"]}
        cells = [number(true.get(k)) for k in horizons]
        rows.append([name, f"{row['pairs']}{left_out}", *kinds, str(row["false_success"]), *cells])
    head = ["", "pairs", *(KINDS[kind] for kind in KINDS_SHOWN), "solved only in the dream"]
    head += [f"true after {count(k, 'turn')}" for k in horizons]
    lead = (
        "The same start and the same actions in both worlds. Pairs by the class of their first difference; then the "
        "share of dreams that are still word for word true after so many turns (Kaplan and Meier’s estimate)."
    )
    return _table("Where dreams part from reality", lead, head, rows)


def _free(split: Mapping[str, Any]) -> str:
    rows = []
    for key, title in (("dream", "dreamed"), ("replayed", "dreamed actions, replayed"), ("real", "real")):
        side = split.get(key)
        if side is None:
            continue
        rate = f"<b>{number(side['success'])}</b> {interval(side['ci95'])}<small>n = {side['n']}</small>"
        keys = ("mean_turns", "mean_reward", "tokens_per_observation", "tokens_per_action")
        rows.append([f'<span class="{"dream" if key == "dream" else "real"}">{title}</span>', rate])
        rows[-1] += [number(side.get(k), 1 if "reward" not in k else 2) for k in keys]
    gap, tokens = split["optimism_gap"], split["tokens"]
    if gap["value"] is not None:
        rows.append(
            ["dreamed minus real", f"{signed(gap['value'])} {interval(gap['ci95'], with_sign=True)}", *[""] * 4]
        )
    head = ["", "success", "turns", "reward", "tokens an observation", "tokens an action"]
    lead = "95 % intervals for tasks like these: each task counts as one trial."
    divergences = [
        f"of {what} {number(data['jsd_bits'], 4)} bits (by chance up to {number(data['by_chance_p95'], 4)})"
        for what, data in tokens.items()
        if data["jsd_bits"] is not None
    ]
    if divergences:
        lead += " Jensen-Shannon divergence of the tokens: " + ", ".join(divergences) + "."
    name = escape(split["split"])
    return _table(f"The same policy, free in both: {name}", lead, head, rows) + _actions(split)


def _actions(split: Mapping[str, Any]) -> str:
    actions = split["actions"]
    if not actions["top"]:
        return ""

    def share(row: Mapping[str, Any], side: str) -> str:
        if not actions[side]:
            return "–"
        part = row[side] / actions[side]
        return f'<meter class="{side}" max="1" value="{part:.3f}"></meter> {100 * part:.1f} %'

    rows = [
        [f"<code>{escape(row['action'])}</code>", share(row, "dream"), share(row, "real")] for row in actions["top"]
    ]
    lead = f"{actions['distinct_dream']} distinct actions in the dream, {actions['distinct_real']} for real."
    return _table(f"What it does most: {escape(split['split'])}", lead, ["", "in the dream", "for real"], rows)


def _signals(signals: Sequence[Mapping[str, Any]]) -> str:
    if not signals:
        return ""
    rows = []
    for row in signals:
        cells = [f"{number(row[k]['value'])} {interval(row[k]['ci95'])}" for k in ("auroc", "average_precision")]
        name = f"{escape(row['name'])}<small>{escape(SIGNALS_ON[row['on']])}</small>"
        rows.append([name, f"{row['false']} of {row['n']}", *cells])
    lead = (
        "Without the real world: how well does each signal tell false turns from true ones? A signal that knows "
        "nothing has an AUROC of 0.5 and the share of false turns as average precision."
    )
    return _table("What tells a false turn", lead, ["", "false turns", "AUROC", "average precision"], rows)


def _cost(cost: Mapping[str, Mapping[str, float]]) -> str:
    parts = {
        "real": "free play for real",
        "dream": "free dreams",
        "replay": "dreams replayed for real",
        "log": "logged episodes dreamed again",
    }
    rows = [
        [title, *(f"{cost[kind].get(part, 0):,.0f}" for kind in ("real_steps", "seconds", "generated_tokens"))]
        for part, title in parts.items()
        if part in cost["seconds"]
    ]
    return _table("What it cost", "Of this comparison alone.", ["", "real steps", "seconds", "generated tokens"], rows)
