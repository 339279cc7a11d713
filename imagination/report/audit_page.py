"""The audit as one page of HTML that needs nothing but itself, and as a table for a terminal.

The order is that of a reader's questions: may I dream in it, what was asked of it, how long and how truly does it
dream, what does it believe of policies, where does it fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from imagination.evaluation.verdict import digits_of
from imagination.report.audit_plots import draw_audit
from imagination.report.page import banner, document, figures
from worldmodel.evaluation.proportions import interval, number, signed

Estimate = Mapping[str, Any]
EXTRA = """
.met { color: var(--dream); font-weight: 600; } .missed { color: var(--real); font-weight: 600; }
.reasons { padding-left: 1.1rem; max-width: 48rem; } .reasons li { margin: 0.35rem 0; }
.scroll { overflow-x: auto; } .scroll table { min-width: 36rem; }
.wide-table td, .wide-table th { padding-right: 0.8rem; }
.case { border-top: 1px solid var(--grid); padding: 0.6rem 1.1rem 0.8rem; }
.case .cells > * { padding: 0.3rem 0; } .case .cells > * + * { border-left: 0; padding-left: 1rem; }
.case .cells { gap: 0.5rem; }
@media (max-width: 720px) { .case .cells > * + * { border-top: 0; padding-left: 0; }
  .targets th[scope=row] { min-width: 8rem; } .plots { grid-template-columns: 1fr; } }
"""
SET_TITLES = {"held_out": "log, held out", "on_policy": "own actions", "on_policies": "all policies"}
WORDS = {True: "met", False: "missed", None: "not measured"}


def render_audit(audit: Mapping[str, Any]) -> str:
    """The whole page, from what ``audit.json`` holds."""
    body = "\n".join(
        part
        for part in (
            _head(audit),
            _targets(audit["targets"]),
            _plots(audit),
            _one_turn(audit),
            _policies(audit),
            render_failures(audit),
            _footer(audit),
        )
        if part
    )
    return document(f"{audit['run']} · audit of {audit['world_model']['name']}", body, EXTRA)


def _head(audit: Mapping[str, Any]) -> str:
    headline, *reasons = audit["verdict"]["sentences"]
    facts = [
        f"world model {audit['world_model']['name']} {audit['world_model']['version']}",
        f"seed {audit['seeds']['run']}",
        f"{audit['real_steps']:,} real steps",
        f"{audit['seconds']:.0f} s",
    ]
    forecast = audit.get("forecast")
    reasons += [forecast["sentence"]] if forecast else []
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    notes = "".join(f"<li>{escape(note)}</li>" for note in audit["notes"])
    aside = f'<div class="partial"><h3>What to keep in mind</h3><ul>{notes}</ul></div>' if notes else ""
    return banner(audit["run"], facts, escape(headline), f'<ul class="reasons">{items}</ul>\n{aside}')


def _targets(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        kind = {True: "met", False: "missed", None: "note"}[row["met"]]
        bound = "at least" if row["bound"] == ">=" else "at most"
        lines.append(
            f'<tr><th scope="row">{escape(row["title"])}<small>{bound} {row["target"]:g}</small></th>'
            f'{_cell(row["estimate"])}<td class="{kind}">{WORDS[row["met"]]}</td></tr>'
        )
    return f"""<section>
<h2>What was asked of it</h2>
<table class="audit targets">
<thead><tr><td></td><th class="right">measured</th><th></th></tr></thead>
<tbody>{"".join(lines)}</tbody>
</table>
<p class="note">Brackets: 95&nbsp;% intervals, which take whole tasks (or episodes, where there are few tasks) as what
varies.</p>
</section>"""


def _plots(audit: Mapping[str, Any]) -> str:
    plots = draw_audit(audit)
    if not plots:
        return ""
    own = next((audit["sets"][name]["about"] for name in ("on_policies", "held_out") if name in audit["sets"]), "")
    return f"""<section>
<h2>How it dreams</h2>
<p class="lead">The small pictures: {escape(own)}.</p>
{figures(plots, narrow="half")}
</section>"""


MEASURES: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("Exact match", "words, reward and end are right", ("exact",)),
    (
        "The same, as dreams sample",
        "at dream.temperature; all other rows are of its likeliest answers",
        ("sampled", "exact"),
    ),
    ("Observation", "the words are right", ("text",)),
    ("The same, not in the log", "of turns that no logged episode has; the rest it may know by heart", ("new", "text")),
    ("Token F1", "overlap of its words with the real ones", ("token_f1",)),
    ("Reward precision", "of the rewards it predicted, those that were paid", ("reward", "precision")),
    ("Reward recall", "of the rewards that were paid, those it predicted", ("reward", "recall")),
    ("End precision", "of the ends it predicted, those that came", ("end", "precision")),
    ("End recall", "of the ends that came, those it predicted", ("end", "recall")),
    ("Calibration error", "of its confidence in the whole answer; 0 is best", ("calibration", "whole", "ece")),
    (
        "The same, deciding",
        "of its confidence in reward and end, where it pays or ends",
        ("calibration", "deciding", "ece"),
    ),
    ("Refuses too", "of the actions that the world refused", ("refusals", "refused_too")),
    ("Accepts too", "of the actions that the world did not refuse", ("refusals", "accepted_too")),
    ("BehR", "change of a policy’s log-probability of the next action, in nats; 0 is best", ("behr", "behr")),
    ("Malformed", "predictions that could not be read; they count as wrong", ("malformed",)),
)


def _one_turn(audit: Mapping[str, Any]) -> str:
    sets = {name: audit["sets"][name] for name in SET_TITLES if name in audit["sets"] and audit["sets"][name]["n"]}
    if not sets:
        return ""
    lines = []
    for title, meaning, path in MEASURES:
        cells = [_at(one, path) for one in sets.values()]
        if any(cell is not None for cell in cells):
            lines.append(
                f'<tr><th scope="row">{title}<small>{meaning}</small></th>'
                + "".join(_cell(cell, sign=path[0] == "behr") for cell in cells)
                + "</tr>"
            )
    pairs = audit["sensitivity"]
    listens = (
        f"<p>Pairs of actions from {pairs['states']:,} logged states: where the real answers differ its predictions "
        f"differ in {_words(pairs['sensitivity'])} (sensitivity); where they are the same its predictions are the same "
        f"in {_words(pairs['specificity'])} (specificity).</p>"
        if pairs["sensitivity"]["n"] or pairs["specificity"]["n"]
        else ""
    )
    heads = "".join(
        f'<th class="right">{SET_TITLES[name]}<small>{one["n"]:,} turns</small></th>' for name, one in sets.items()
    )
    about = "; ".join(f"{SET_TITLES[name]}: {one['about']}" for name, one in sets.items())
    return f"""<section>
<h2>One turn ahead</h2>
<p class="lead">From a real history, greedily. {escape(about)}.</p>
<div class="scroll"><table class="audit wide-table">
<thead><tr><td></td>{heads}</tr></thead>
<tbody>{"".join(lines)}</tbody>
</table></div>
{listens}
</section>"""


def _policies(audit: Mapping[str, Any]) -> str:
    if not audit["policies"]:
        return ""
    columns = (
        ("dream", "dream"),
        ("guarded", "guarded dream"),
        ("replay", "dreamed actions, replayed"),
        ("real", "real"),
        ("gap", "gap"),
        ("cr", "CR"),
        ("cr_pairwise", "CR pairwise"),
    )
    lines = [
        f'<tr><th scope="row">{escape(p["name"])}<small>n = {p["n"]}{_failed(p)}</small></th>'
        + "".join(_cell(p[key], sign=key == "gap", n=False) for key, _ in columns)
        + "</tr>"
        for p in audit["policies"]
    ]
    heads = "".join(f'<th class="right">{title}</th>' for _, title in columns)
    ranks = [
        f"{_words(audit['agreement'][kind]['spearman'])} by Spearman, {_words(audit['agreement'][kind]['kendall'])} by "
        f"Kendall, mean absolute gap {_words(audit['agreement'][kind]['mean_absolute_gap'])}, in {what}"
        for kind, what in (("plain", "plain dreams"), ("guarded", "guarded dreams"))
        if kind in audit["agreement"]
    ]
    return f"""<section>
<h2>What it believes of policies</h2>
<p class="lead">Share solved, the same tasks and seeds in each world. CR: solved by the dreamed actions in reality over
solved in reality; pairwise: of what was really solved, what the dreamed actions solve too. A guarded dream ends,
unsolved, where the model is unsure, so it believes too little by design.</p>
<div class="scroll"><table class="wide-table">
<thead><tr><td></td>{heads}</tr></thead>
<tbody>{"".join(lines)}</tbody>
</table></div>
<p>Rank agreement over {audit["agreement"]["plain"]["policies"]} policies: {"; ".join(ranks)}.</p>
</section>"""


def _footer(audit: Mapping[str, Any]) -> str:
    seeds = ", ".join(f"{name} {seed}" for name, seed in audit["seeds"].items())
    return f"""<footer><p class="note">Seeds: {escape(seeds)}. Episodes of at most {audit["horizon"]} turns. All numbers
are in the JSON file beside this page.</p></footer>"""


def _at(one: Mapping[str, Any], path: Sequence[str]) -> Estimate | None:
    value: Any = one
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _cell(estimate: Estimate | None, *, sign: bool = False, n: bool = True) -> str:
    if estimate is None or estimate["value"] is None:
        return '<td class="num right">–</td>'
    value = signed(estimate["value"]) if sign else number(estimate["value"], 3 if abs(estimate["value"]) < 0.1 else 2)
    size = f"<small>n = {estimate['n']:,}</small>" if n else ""
    return f'<td class="num right"><b>{value}</b><small>{interval(estimate["ci95"], with_sign=sign)}</small>{size}</td>'


def _words(estimate: Estimate) -> str:
    return f"{number(estimate['value'])} {interval(estimate['ci95'])} (n = {estimate['n']:,})"


def _failed(policy: Mapping[str, Any]) -> str:
    return f", {policy['failures']} failed" if policy["failures"] else ""


def terminal_audit(audit: Mapping[str, Any]) -> Table:
    """The targets for a terminal of 80 columns."""
    title = f"Audit of {audit['world_model']['name']}, seed {audit['seeds']['run']}"
    table = Table(title=Text(title, style="bold"), caption="95 % intervals in brackets")
    for name in ("", "measured", "n", "target", ""):
        table.add_column(name, justify="left" if not name else "right")
    for row in audit["targets"]:
        e = row["estimate"]
        table.add_row(
            Text(row["title"]),
            Text(f"{number(e['value'], digits_of(row))} {interval(e['ci95'])}"),
            f"{e['n']:,}",
            f"{row['bound']} {row['target']:g}",
            Text(WORDS[row["met"]], style={True: "green", False: "red", None: ""}[row["met"]]),
        )
    return table


def render_failures(audit: Mapping[str, Any]) -> str:
    """The section of the page, from what ``audit.json`` holds; empty where nothing is wrong."""
    parts = []
    for name in ("on_policies", "held_out"):
        one = audit["sets"].get(name)
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
    predicted_text = "nothing that could be read" if predicted is None else _answer(predicted)
    return f"""<div class="case"><div class="note">{escape(case["task"])} · after: {escape(before)}</div>
<div class="act"><code>&gt; {escape(case["action"])}</code>{sure}</div>
<div class="cells"><div class="in-dream"><b class="dream">predicted</b><div class="text">{predicted_text}</div></div>
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
