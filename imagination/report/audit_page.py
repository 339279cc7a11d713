"""The audit as a page, and as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from imagination.evaluation.verdict import digits_of
from imagination.report.audit_plots import draw_audit
from imagination.report.page import render
from worldmodel.evaluation.proportions import interval, number

SET_TITLES = {"held_out": "log, held out", "on_policy": "own actions", "on_policies": "all policies"}
MET = {True: "met", False: "missed", None: "not measured"}
# title, meaning, path in a set of audit.json
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


def render_audit(audit: Mapping[str, Any]) -> str:
    """The whole page, from what ``audit.json`` holds."""
    sets = {SET_TITLES[name]: one for name in SET_TITLES if (one := audit["sets"].get(name)) and one["n"]}
    rows = [(t, meaning, [_at(one, path) for one in sets.values()], path[0] == "behr") for t, meaning, path in MEASURES]
    own = [audit["sets"][name] for name in ("on_policies", "held_out") if name in audit["sets"]]
    return render(
        "audit.html",
        f"{audit['run']} · audit of {audit['world_model']['name']}",
        css="audit.css",
        audit={"forecast": None, **audit},
        met=MET,
        plots=draw_audit(audit),
        plots_about=own[0]["about"] if own else "",
        sets=sets,
        sizes=[f"{one['n']:,} turns" for one in sets.values()],
        measures=[row for row in rows if any(estimate is not None for estimate in row[2])],
        failures=[one for one in own if one["failures"]["wrong"]],
    )


def _at(one: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = one
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


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
            Text(MET[row["met"]], style={True: "green", False: "red", None: ""}[row["met"]]),
        )
    return table
