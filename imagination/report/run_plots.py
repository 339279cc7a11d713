"""Curves of a run as inline SVG.

Figures are drawn in placeholder colours that become CSS variables (``var(--dream)``), so one picture serves the light
and the dark page. Dream is blue and reality orange everywhere: two colours that all common kinds of colour blindness
keep apart (Okabe and Ito, 2008), and lines carry their names besides.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from imagination.report.page import Plot
from worldmodel.evaluation.proportions import Proportion

# placeholder -> CSS variable
COLOURS = {
    "#010101": "ink",
    "#020202": "muted",
    "#030303": "grid",
    "#040404": "dream",
    "#050505": "real",
    "#060606": "expert",
    "#070707": "paper",
}
INK, MUTED, GRID, DREAM, REAL, EXPERT, PAPER = COLOURS
SOURCES = {"real": REAL, "dream": DREAM, "expert": EXPERT, "replay": MUTED}
FEW_AT_RISK = 5  # a share of fewer dreams than this is not drawn
MAX_POINTS = 240  # more than a screen can show; longer curves are averaged into as many bins
MANY_POINTS = 40  # more than this are drawn faintly, with their running mean on top
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, and in the font of the page
    "svg.hashsalt": "imagination",  # the same run gives the same bytes
    "font.size": 13.0,
    "text.parse_math": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
}
Point = tuple[float, float]
Metrics = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Curve:
    """Which metric of which stage is drawn, and how its axes are called."""

    stage: str
    key: str
    title: str
    unit: str
    x: str
    colour: str
    share: bool = False  # the axis runs from 0 to 1


CURVES = (
    Curve("fit_world_model", "loss", "World model: loss", "nats per token", "optimiser step", DREAM),
    Curve("fit_world_model", "token_accuracy", "World model: next token", "share right", "optimiser step", DREAM, True),
    Curve(
        "fit_world_model", "exact_match", "World model: exact match", "share of turns", "optimiser step", DREAM, True
    ),
    Curve("clone", "loss", "Cloning: loss", "nats per token", "optimiser step", EXPERT),
    Curve("train", "kl", "KL", "nats per token", "update", INK),
    Curve("train", "kl_k3", "KL to the policy that played", "nats per token", "update", INK),
    Curve("train", "kl_reference", "KL to the reference policy", "nats per token", "update", INK),
    Curve("train", "clip_fraction", "Clip fraction", "share of tokens", "update", INK),
    Curve("train", "entropy", "Entropy", "nats per token", "update", INK),
    Curve("train", "grad_norm", "Gradient norm", "before clipping", "update", INK),
)


def draw_curves(metrics: Metrics, report: Mapping[str, Any]) -> list[Plot]:
    """All pictures for which the run logged something; success first, then the models, then the optimiser's health."""
    with matplotlib.rc_context(STYLE):
        plots = [success_curve(metrics, report), truth_curve(report)]
        plots += [*(metric_curve(metrics, curve) for curve in CURVES), share_areas(metrics)]
    return [plot for plot in plots if plot is not None]


def series(metrics: Metrics, stage: str, key: str) -> list[Point]:
    """``(step, value)`` of one metric in the order of steps; rows without it, or with NaN, are left out."""
    rows = [r for r in metrics if r.get("stage") == stage and isinstance(r.get(key), int | float)]
    return sorted((float(r.get("step", 0)), float(r[key])) for r in rows if r[key] == r[key])


def binned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` points: means of equally many neighbours each."""
    if len(points) <= limit:
        return list(points)
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    chunks = [points[a:b] for a, b in itertools.pairwise(edges)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]


def trend(points: Sequence[Point], window: int = 9) -> list[Point]:
    """Running mean of many points, few points as they are.

    Centred; at both ends it takes what there is of the window, so that the last point is a mean as well.
    """
    if len(points) <= MANY_POINTS:
        return list(points)
    result = []
    for i, (x, _) in enumerate(points):
        part = points[max(i - window // 2, 0) : i + window // 2 + 1]
        result.append((x, sum(y for _, y in part) / len(part)))
    return result


def metric_curve(metrics: Metrics, curve: Curve) -> Plot | None:
    """One metric over its stage: raw values faint and a running mean on top where there are many."""
    points = binned(series(metrics, curve.stage, curve.key))
    if len(points) < 2:
        return None
    figure, axes = new_axes(wide=False)
    _line(axes, points, curve.colour)
    finish(axes, curve.x, curve.unit, share=curve.share)
    if not curve.share and min(y for _, y in points) >= 0:
        axes.set_ylim(bottom=0)
    return Plot(curve.title, f"last: {trend(points)[-1][1]:.3g}", to_svg(figure, f"{curve.title}, {curve.unit}"))


def success_curve(metrics: Metrics, report: Mapping[str, Any]) -> Plot | None:
    """Success per update in the world that was trained in, and real success with its interval where it was measured."""
    dreamed, played = series(metrics, "train", "dream_success"), series(metrics, "train", "real_success")
    name, colour, line = ("dream", DREAM, dreamed) if dreamed else ("real", REAL, played)  # or a run trained for real
    line = binned(line)
    if len(line) < 2:
        return None
    dots = _real_points(metrics if dreamed else (), report, end=line[-1][0])
    figure, axes = new_axes(wide=True)
    _line(axes, line, colour)
    for x, data in dots:
        if data["ci95"] is not None:
            axes.plot([x, x], data["ci95"], color=REAL, linewidth=2, alpha=0.6)
        axes.plot(x, data["success"], "o", color=REAL, markersize=8, markeredgecolor=PAPER, markeredgewidth=1.5)
    finish(axes, "update", "share of episodes solved", share=True)
    ends = [(name, trend(line)[-1][1], colour)]
    if dots and dots[-1][0] == line[-1][0] and dreamed:
        ends.append(("real", dots[-1][1]["success"], REAL))
    end_labels(axes, ends)
    note = "Dots: real success on training tasks, with 95 % intervals" if dots else ""
    return Plot("Success while training", note, to_svg(figure, "Success per update, dreamed and real"), wide=True)


def truth_curve(report: Mapping[str, Any]) -> Plot | None:
    """Share of dreams still word for word true to reality after k turns."""
    points = [p for p in report["twins"]["still_true"] if p[2] >= min(FEW_AT_RISK, report["twins"]["n"])]
    if len(points) < 2:
        return None
    figure, axes = new_axes(wide=True)
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axes.step(xs, ys, where="post", color=DREAM)
    axes.fill_between(xs, ys, step="post", color=DREAM, alpha=0.12, linewidth=0)
    finish(axes, "dreamed turns", "share still true to reality", share=True)
    axes.set_xlim(0, xs[-1])
    note = (
        f"{report['twins']['n']} dreams replayed in the real game; share that has not parted from it yet (Kaplan–Meier)"
    )
    return Plot(
        "How long a dream stays true", note, to_svg(figure, "Share of dreams true to reality by turn"), wide=True
    )


def share_areas(metrics: Metrics) -> Plot | None:
    """Realised shares of each source in the tokens trained on (``tokens_real``, ...), stacked to one."""
    rows = {source: dict(series(metrics, "train", f"tokens_{source}")) for source in SOURCES}
    steps = sorted({x for points in rows.values() for x in points})
    if len(steps) < 2:
        return None
    figure, axes = new_axes(wide=False)
    floor = [0.0] * len(steps)
    for source, colour in SOURCES.items():
        if not rows[source]:
            continue
        top = [low + rows[source].get(x, 0.0) for low, x in zip(floor, steps, strict=True)]
        axes.fill_between(steps, floor, top, color=colour, alpha=0.8, linewidth=0)
        widths = [b - a for a, b in zip(floor, top, strict=True)]
        inner = range(len(steps) // 6, len(steps) - len(steps) // 6)  # keeps the name off the borders
        width, i = max((round(widths[i], 2), i) for i in inner)
        if width > 0.1:
            axes.text(steps[i], (floor[i] + top[i]) / 2, source, ha="center", va="center", color=PAPER, weight="bold")
        floor = top
    finish(axes, "update", "share of trained tokens", share=True)
    axes.set_xlim(steps[0], steps[-1])
    axes.set_ylim(0, 1)
    return Plot(
        "What it trained on",
        "realised, by source",
        to_svg(figure, "Shares by source per update"),
    )


def to_svg(figure: Figure, label: str) -> str:
    """The figure as an ``<svg>`` element that takes its colours and font from the page and scales with it."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib\.axis|[A-Z]\w*Collection)_\d+"', "", svg
    )
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows SVG without, and a page without addresses calls nobody
    svg = re.sub(r"font: ((?:bold |700 )?)([\d.]+)px [^;\"]*", r"font-weight: \1; font-size: \2px", svg)
    svg = svg.replace("font-weight: ; ", "")
    svg = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", svg, count=2)
    for placeholder, variable in COLOURS.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)).strip()


def new_axes(wide: bool) -> tuple[Figure, Axes]:
    """A figure of half the page or of a third of it."""
    figure = Figure(figsize=(5.8, 3.3) if wide else (4.4, 2.8), layout="constrained")  # 72 units an inch
    return figure, figure.add_subplot()


def _line(axes: Axes, points: Sequence[Point], colour: str) -> None:
    if len(points) > MANY_POINTS:
        axes.plot(*zip(*points, strict=True), color=colour, alpha=0.3, linewidth=1.2)
    axes.plot(*zip(*trend(points), strict=True), color=colour)


def finish(axes: Axes, x: str, y: str, *, share: bool) -> None:
    """Names of the axes and few ticks; ``share``: y runs from 0 to 1."""
    axes.set_xlabel(x)
    axes.set_title(y, loc="left", fontsize=13, color=MUTED)  # the unit lies above the axis: nobody tilts their head
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.margins(x=0.02)
    if share:
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])


def end_labels(axes: Axes, ends: Iterable[tuple[str, float, str]]) -> None:
    """Names at the right end of the lines, pushed apart where they would touch."""
    low, high = axes.get_ylim()
    gap, placed = 0.09 * (high - low), float("-inf")
    for name, y, colour in sorted(ends, key=lambda end: end[1]):
        placed = max(y, placed + gap)
        axes.annotate(
            f"{name} {y:.2f}", (1.0, placed), xycoords=("axes fraction", "data"), xytext=(8, 0),
            textcoords="offset points", va="center", color=colour, weight="bold", annotation_clip=False,
        )  # fmt: skip


def _real_points(metrics: Metrics, report: Mapping[str, Any], end: float) -> list[tuple[float, Mapping[str, Any]]]:
    """Real success by update: what training measured, the evaluation before at 0 and the one after at the end."""
    points: dict[float, Mapping[str, Any]] = {}
    for row in metrics:
        if row.get("stage") == "train" and row.get("real_success") is not None:
            n = row.get("real_n")
            data = {"success": row["real_success"], "n": n, "ci95": None}
            points[float(row["step"])] = data if not n else Proportion.from_json(data).to_json()
    for x, which in ((0.0, "before"), (end, "after")):
        measured = report["policy"][which]["train_tasks"]
        if measured is not None and measured["success"] is not None:
            points[x] = measured
    return sorted(points.items(), key=lambda point: point[0])
