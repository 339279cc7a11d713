"""The pictures of an audit, in the colours and the form of the report's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from imagination.report.page import Plot
from imagination.report.run_plots import DREAM, EXPERT, GRID, INK, MUTED, REAL, STYLE, new_axes, to_svg

NAMES = {"held_out": "log", "on_policy": "own actions", "on_policies": "all policies"}
FEW = 5  # a share of fewer is not drawn


def draw_audit(audit: Mapping[str, Any]) -> list[Plot]:
    """All pictures for which there are numbers, in the order of the page."""
    with matplotlib.rc_context(STYLE):
        own = next((audit["sets"][name] for name in ("on_policies", "held_out") if name in audit["sets"]), None)
        plots = [drift(audit["sets"]), policies(audit["policies"])]
        if own is not None:
            plots += [
                reliability(own["calibration"]["whole"], "Confidence in the whole answer"),
                reliability(own["calibration"]["deciding"], "Confidence where it pays or ends"),
                bars(own["by_step"], "Exact match by turn", "turn of the episode", first=1),
                bars(own["by_changes"], "Exact match by size of change", "lines added and removed"),
            ]
    return [plot for plot in plots if plot is not None]


def drift(sets: Mapping[str, Any]) -> Plot | None:
    """Open-loop exact match by turn with its interval, along the log and along the policy's own actions."""
    figure, axes = new_axes(wide=True)
    ends: list[tuple[float, float, str, str]] = []
    for name, colour in (("held_out", EXPERT), ("on_policy", DREAM)):
        at = sets.get(name, {}).get("drift", {}).get("exact_at", {})
        points = [(int(k), e["value"], *e["ci95"]) for k, e in at.items() if e["n"] >= FEW]
        if len(points) < 2:
            continue
        xs, ys, low, high = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour)
        axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        ends.append((xs[-1], ys[-1], NAMES[name], colour))
    if not ends:
        return None
    _finish(axes, "dreamed turns", "share right at this turn")
    placed = -1.0
    for x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        placed = max(y, placed + 0.1)
        axes.annotate(
            name, (x, placed), xytext=(6, 0), textcoords="offset points", va="center", color=colour, weight="bold",
            annotation_clip=False,
        )  # fmt: skip
    return Plot(
        "How long a dream stays true",
        "Its own words fed back along real actions, with 95 % intervals",
        to_svg(figure, "Open-loop exact match by turn"),
        wide=True,
    )


def policies(rows: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Dreamed against real success, a dot a policy: on the diagonal the dream tells the truth."""
    points = [p for p in rows if p["dream"]["value"] is not None and p["real"]["value"] is not None]
    if len(points) < 2:
        return None
    figure, axes = new_axes(wide=True)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.2, linestyle=(0, (4, 4)))
    for p in points:
        axes.plot([p["real"]["value"]] * 2, [p["real"]["value"], p["dream"]["value"]], color=GRID, linewidth=1.6)
    axes.plot(
        [p["real"]["value"] for p in points], [p["dream"]["value"] for p in points], "o", color=DREAM, markersize=8,
        markeredgecolor=REAL, markeredgewidth=1.2, alpha=0.85,
    )  # fmt: skip
    _finish(axes, "real success", "dreamed success, without the guard")
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    return Plot(
        "What it believes of policies",
        f"{len(points)} policies; above the dashed line the dream is too optimistic",
        to_svg(figure, "Dreamed and real success of each policy"),
        wide=True,
    )


def reliability(calibration: Mapping[str, Any], title: str) -> Plot | None:
    """The reliability diagram: dots as large as their bins; on the dashed line its confidence can be believed."""
    bins = calibration["bins"]
    if not bins:
        return None
    figure, axes = new_axes(wide=False)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.2, linestyle=(0, (4, 4)))
    most = max(b["n"] for b in bins)
    axes.plot([b["confidence"] for b in bins], [b["right"] for b in bins], color=DREAM, linewidth=1.4, alpha=0.5)
    axes.scatter(
        [b["confidence"] for b in bins],
        [b["right"] for b in bins],
        s=[18 + 160 * b["n"] / most for b in bins],
        color=DREAM,
        zorder=3,
        clip_on=False,
    )
    _finish(axes, "its confidence", "share right")
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    error = calibration["ece"]
    return Plot(title, f"calibration error {error['value']:.3f}, n = {error['n']:,}", to_svg(figure, title))


def bars(by: Mapping[str, Any], title: str, x: str, first: int = 0) -> Plot | None:
    """A share with its interval for each name, and how often there was one."""
    shown = [(name, e) for name, e in by.items() if e["n"] >= FEW]
    if len(shown) < 2:
        return None
    figure, axes = new_axes(wide=False)
    for k, (_, e) in enumerate(shown):
        axes.bar(k, e["value"], color=DREAM, alpha=0.35, width=0.7)
        if e["ci95"] is not None:
            axes.plot([k, k], e["ci95"], color=DREAM, linewidth=1.8)
        axes.plot(k, e["value"], "o", color=DREAM, markersize=5)
    _finish(axes, x, "share right")
    labels = [str(int(name) + first) if name.isdigit() else name for name, _ in shown]
    axes.set_xticks(range(len(shown)), labels)
    axes.tick_params(axis="x", labelcolor=INK)
    return Plot(title, "words, reward and end", to_svg(figure, title))


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_title(y, loc="left", fontsize=13, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
