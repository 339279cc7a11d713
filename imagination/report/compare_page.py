"""A comparison as one page: a summary, and all pairs to search, filter and read.

Observations are untrusted text: they are embedded as JSON in which no ``<``, ``>`` or ``&`` stands, so that no
``</script>`` can end it, and the script writes them as text nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagination.evaluation.compare.pairs import NEVER
from imagination.report.compare_text import KINDS, SIGNALS_ON, SOURCES
from imagination.report.page import Pictures, embed_json, render
from worldmodel.evaluation.proportions import count

SCRIPTS = ("compare_state.js", "compare_list.js", "compare_pair.js", "compare_main.js")
HORIZONS = (1, 3, 5, 8, 12)  # turns after which the share of true dreams is told
KINDS_SHOWN = (NEVER, "wording", "state", "reward", "end", "invalid")


def render_page(comparison: Mapping[str, Any], screens: Sequence[Path] = ()) -> str:
    """The page of a ``compare.json``, with the pictures that it names as far as the folders ``screens`` have them."""
    longest = max((len(row["still_true"]) - 1 for row in comparison["aligned"]), default=0)
    return render(
        "compare.html",
        f"{comparison['run']} · dreams beside reality",
        css="compare.css",
        scripts=SCRIPTS,
        policy="img-src data:",
        comparison=comparison,
        headline=headline(comparison),
        kinds={kind: KINDS[kind] for kind in KINDS_SHOWN},
        horizons={k: f"true after {count(k, 'turn')}" for k in HORIZONS if k <= longest},
        sources=SOURCES,
        signals_on=SIGNALS_ON,
        data=embed_json(page_data(comparison, screens)),
    )


def page_data(comparison: Mapping[str, Any], screens: Sequence[Path] = ()) -> dict[str, Any]:
    """The pairs, as small as the page can read them: each text stands once, turns are lists.

    ``{"labels": {kind: words}, "texts": [...], "pictures": [...], "pairs": [...]}``; a pair has the keys of
    ``compare.json`` except that ``start`` is an index into the texts, ``screenshot`` 0 or a place, from 1, among the
    pictures, and a turn ``[action, kind, unsure, dream, real]``, a side ``0`` or
    ``[observation, reward, terminated, confidence, marks, picture, rule]``. Marks count UTF-16 units, as in JavaScript.
    """
    texts: dict[str, int] = {}
    pictures = Pictures(screens)

    def index(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def side(answer: Mapping[str, Any] | None) -> Any:
        if answer is None:
            return 0
        text, confidence = answer["observation"], answer["confidence"]
        marks = [[_utf16(text, position) for position in span] for span in answer["marks"]]
        confidence = None if confidence is None else round(confidence, 4)
        rule = index(answer["rule"]) if answer.get("rule") else None
        picture = pictures.place(answer.get("screenshot"))
        return [index(text), answer["reward"], int(answer["terminated"]), confidence, marks or 0, picture, rule]

    pairs = []
    for pair in comparison["pairs"]:
        turns = [
            [index(t["action"]), t["kind"], int(t["unsure"]), side(t["dream"]), side(t["real"])] for t in pair["turns"]
        ]
        start, screenshot = index(pair["start"]), pictures.place(pair.get("screenshot"))
        pairs.append({**pair, "start": start, "screenshot": screenshot, "turns": turns})
    return {"labels": {**KINDS, **SOURCES}, "texts": list(texts), "pictures": pictures.addresses, "pairs": pairs}


def _utf16(text: str, position: int) -> int:
    return len(text[:position].encode("utf-16-le", "surrogatepass")) // 2


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
