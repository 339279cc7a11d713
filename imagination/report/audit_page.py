"""The audit as a page with its pictures, and as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table
from rich.text import Text

from imagination.evaluation.verdict import digits_of
from imagination.report.page import Plot, render
from imagination.report.plots import (
    DREAM,
    EXPERT,
    GRID,
    INK,
    MUTED,
    REAL,
    SHARES,
    end_labels,
    finished,
    new_axes,
    styled,
)
from worldmodel.evaluation.proportions import interval, number

SET_TITLES = {"held_out": "log, held out", "on_policy": "own actions", "on_policies": "all policies"}
FEW = 5  # a share of fewer is not drawn
MET = {True: "met", False: "missed", None: "unknown"}
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
    ("Users: words", "of a message, more than logged users say there", ("users", "words", "difference")),
    ("Users: agree", "share that begins with yes, sure or thanks, more than logged", ("users", "agrees", "difference")),
    ("Users: tell", "names and numbers they tell first, more than logged", ("users", "told", "difference")),
    (
        "Users: invent",
        "share with what they cannot know, more than logged",
        ("users", "invented", "difference"),
    ),
    ("Users: end", "share that ends the dialogue, more than logged", ("users", "ends", "difference")),
    ("Malformed", "predictions that could not be read; they count as wrong", ("malformed",)),
)

SIGNED = ("behr", "users")  # differences


def render_audit(audit: Mapping[str, Any]) -> str:
    """The whole page, from what ``audit.json`` holds."""
    sets = {SET_TITLES[name]: one for name in SET_TITLES if (one := audit["sets"].get(name)) and one["n"]}
    rows = [(t, meaning, [_at(one, path) for one in sets.values()], path[0] in SIGNED) for t, meaning, path in MEASURES]
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


@styled
def draw_audit(audit: Mapping[str, Any]) -> list[Plot]:
    """All pictures for which there are numbers, in the order of the page."""
    own = next((audit["sets"][name] for name in ("on_policies", "held_out") if name in audit["sets"]), None)
    plots = [_drift(audit["sets"]), _policies(audit["policies"])]
    if own is not None:
        plots += [
            _reliability(own["calibration"]["whole"], "Confidence in the whole answer"),
            _reliability(own["calibration"]["deciding"], "Confidence where it pays or ends"),
            _bars(own["by_step"], "Exact match by turn", "turn of the episode", first=1),
            _bars(own["by_changes"], "Exact match by size of change", "lines added and removed"),
        ]
    return [plot for plot in plots if plot is not None]


def _drift(sets: Mapping[str, Any]) -> Plot | None:
    """Open-loop exact match by turn with its interval, along the log and along the policy's own actions."""
    axes, ends = new_axes("dreamed turns", "share right at this turn", wide=True), []
    for name, title, colour in (("held_out", "log", EXPERT), ("on_policy", "own actions", DREAM)):
        at = sets.get(name, {}).get("drift", {}).get("exact_at", {})
        points = [(int(k), e["value"], *e["ci95"]) for k, e in at.items() if e["n"] >= FEW]
        if len(points) < 2:
            continue
        xs, ys, low, high = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour)
        axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        ends.append((title, ys[-1], colour))
    if not ends:
        return None
    end_labels(axes, ends)
    note = "Its own words fed back along real actions, with 95 % intervals"
    return finished(axes, "How long a dream stays true", note, "Open-loop exact match by turn")


def _policies(rows: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Dreamed against real success, a dot a policy: on the diagonal the dream tells the truth."""
    points = [
        (p["real"]["value"], p["dream"]["value"]) for p in rows if None not in (p["dream"]["value"], p["real"]["value"])
    ]
    if len(points) < 2:
        return None
    axes = new_axes("real success", "dreamed success, without the guard", wide=True)
    _diagonal(axes)
    for real, dream in points:
        axes.plot([real] * 2, [real, dream], color=GRID, linewidth=1.6)
    dots: dict[str, Any] = {"markersize": 8, "markeredgecolor": REAL, "markeredgewidth": 1.2}
    axes.plot(*zip(*points, strict=True), "o", color=DREAM, alpha=0.85, **dots)
    note = f"{len(points)} policies; above the dashed line the dream is too optimistic"
    return finished(axes, "What it believes of policies", note, "Dreamed and real success of each policy")


def _reliability(calibration: Mapping[str, Any], title: str) -> Plot | None:
    """The reliability diagram: dots as large as their bins; on the dashed line its confidence can be believed."""
    bins = calibration["bins"]
    if not bins:
        return None
    axes = new_axes("its confidence", "share right")
    _diagonal(axes)
    most = max(b["n"] for b in bins)
    xs, ys, sizes = zip(*((b["confidence"], b["right"], 18 + 160 * b["n"] / most) for b in bins), strict=True)
    axes.plot(xs, ys, color=DREAM, linewidth=1.4, alpha=0.5)
    axes.scatter(xs, ys, s=sizes, color=DREAM, zorder=3, clip_on=False)
    error = calibration["ece"]
    return finished(axes, title, f"calibration error {error['value']:.3f}, n = {error['n']:,}")


def _diagonal(axes: Axes) -> None:
    """Where both shares are equal."""
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.2, linestyle=(0, (4, 4)))
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks(*SHARES)


def _bars(by: Mapping[str, Any], title: str, x: str, first: int = 0) -> Plot | None:
    """A share with its interval for each name, and how often there was one."""
    shown = [(name, e) for name, e in by.items() if e["n"] >= FEW]
    if len(shown) < 2:
        return None
    axes = new_axes(x, "share right")
    for k, (_, e) in enumerate(shown):
        axes.bar(k, e["value"], color=DREAM, alpha=0.35, width=0.7)
        if e["ci95"] is not None:
            axes.plot([k, k], e["ci95"], color=DREAM, linewidth=1.8)
        axes.plot(k, e["value"], "o", color=DREAM, markersize=5)
    labels = [str(int(name) + first) if name.isdigit() else name for name, _ in shown]
    axes.set_xticks(range(len(shown)), labels)
    axes.tick_params(axis="x", labelcolor=INK)
    return finished(axes, title, "words, reward and end")
