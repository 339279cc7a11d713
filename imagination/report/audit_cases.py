"""Where a world model fails: its wrong predictions by kind, with examples to read, as a part of the audit's page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from imagination.evaluation.format import number


def render_failures(found: Mapping[str, Any]) -> str:
    """The section of the page, from what ``audit.json`` holds; empty where nothing is wrong."""
    parts = []
    for name in ("on_policies", "held_out"):
        one = found["sets"].get(name)
        if one is None or not one["failures"]["wrong"]:
            continue
        failures = one["failures"]
        blocks = "".join(
            f"<details><summary>{escape(group['title'])}: {group['n']} "
            f"({group['share_of_wrong']:.0%})</summary>{''.join(map(_case, group['examples']))}</details>"
            for group in failures["groups"]
        )
        parts.append(
            f"<h3>{escape(one['about'][:1].upper() + one['about'][1:])}</h3>"
            f'<p class="note">{failures["wrong"]:,} of {failures["n"]:,} predictions are wrong, '
            f"{failures['wrong_reward']:,} of them in the reward.</p>"
            f'<div class="episode">{blocks}</div>'
        )
    if not parts:
        return ""
    return f"""<section>
<h2>Where it fails</h2>
<p class="lead">Every wrong prediction is in one group; in each, the ones it was surest of, which no guard
can catch.</p>
{"".join(parts)}
</section>"""


def _case(case: Mapping[str, Any]) -> str:
    before = " › ".join(case["actions_before"][-6:]) or "at the start"
    predicted = case["predicted"]
    sure = "" if predicted is None else f'<span class="conf">its confidence {number(predicted["confidence"])}</span>'
    said = "nothing that could be read" if predicted is None else _answer(predicted)
    return f"""<div class="case"><div class="note">{escape(case["task"])} · after: {escape(before)}</div>
<div class="act"><code>&gt; {escape(case["action"])}</code>{sure}</div>
<div class="cells"><div class="in-dream"><b class="dream">predicted</b><div class="text">{said}</div></div>
<div class="in-real"><b class="real">real</b><div class="text">{_answer(case["real"])}</div></div></div></div>"""


def _answer(answer: Mapping[str, Any]) -> str:
    tags = "".join(
        f'<br><span class="tag">{tag}</span>'
        for tag, there in (
            (f"reward {answer['reward']:g}" if answer["reward"] else "", bool(answer["reward"])),
            ("end", answer["terminated"]),
        )
        if there
    )
    return escape(answer["observation"]) + tags
