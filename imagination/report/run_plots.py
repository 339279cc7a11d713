"""Curves of a run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from imagination.evaluation.costs import running_mean
from imagination.report.page import Plot
from imagination.report.plots import DREAM, EXPERT, INK, MUTED, PAPER, REAL, end_labels, finished, new_axes, styled
from worldmodel.evaluation.proportions import number

SOURCES = {"real": REAL, "dream": DREAM, "expert": EXPERT, "replay": MUTED}
FEW_AT_RISK = 5  # a share of fewer dreams than this is not drawn
MAX_POINTS = 240  # more than a screen can show; longer curves are averaged into as many bins
MANY_POINTS = 40  # more than this are drawn faintly, with their running mean on top
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


def trend(points: Sequence[Point]) -> list[Point]:
    """Running mean of nine points, centred; at both ends of what there is of the window. Few points as they are."""
    if len(points) <= MANY_POINTS:
        return list(points)
    result = []
    for i, (x, _) in enumerate(points):
        part = points[max(i - 4, 0) : i + 5]
        result.append((x, sum(y for _, y in part) / len(part)))
    return result


@styled
def metric_curve(metrics: Metrics, curve: Curve) -> Plot | None:
    """One metric over its stage: raw values faint and a running mean on top where there are many."""
    points = binned(series(metrics, curve.stage, curve.key))
    if len(points) < 2:
        return None
    axes = new_axes(curve.x, curve.unit, share=curve.share)
    _line(axes, points, curve.colour)
    if not curve.share and min(y for _, y in points) >= 0:
        axes.set_ylim(bottom=0)
    return finished(axes, curve.title, f"last: {trend(points)[-1][1]:.3g}", f"{curve.title}, {curve.unit}")


@styled
def success_curve(metrics: Metrics, report: Mapping[str, Any]) -> Plot | None:
    """Success per update in the world that was trained in, and real success with its interval where it was measured."""
    dreamed, played = series(metrics, "train", "dream_success"), series(metrics, "train", "real_success")
    name, colour, line = ("dream", DREAM, dreamed) if dreamed else ("real", REAL, played)  # or a run trained for real
    line = binned(line)
    if len(line) < 2:
        return None
    dots = _real_points(metrics if dreamed else (), report, end=line[-1][0])
    axes = new_axes("update", "share of episodes solved", wide=True)
    _line(axes, line, colour)
    for x, data in dots:
        if data["ci95"] is not None:
            axes.plot([x, x], data["ci95"], color=REAL, linewidth=2, alpha=0.6)
        axes.plot(x, data["success"], "o", color=REAL, markersize=8, markeredgecolor=PAPER, markeredgewidth=1.5)
    ends = [_end(name, trend(line)[-1][1], colour)]
    if dots and dots[-1][0] == line[-1][0] and dreamed:
        ends.append(_end("real", dots[-1][1]["success"], REAL))
    end_labels(axes, ends)
    note = "Dots: real success on training tasks, with 95 % intervals" if dots else ""
    return finished(axes, "Success while training", note, "Success per update, dreamed and real")


@styled
def truth_curve(report: Mapping[str, Any]) -> Plot | None:
    """Share of dreams still word for word true to reality after k turns."""
    points = [p for p in report["twins"]["still_true"] if p[2] >= min(FEW_AT_RISK, report["twins"]["n"])]
    if len(points) < 2:
        return None
    axes = new_axes("dreamed turns", "share still true to reality", wide=True)
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axes.step(xs, ys, where="post", color=DREAM)
    axes.fill_between(xs, ys, step="post", color=DREAM, alpha=0.12, linewidth=0)
    axes.set_xlim(0, xs[-1])
    n = report["twins"]["n"]
    note = f"{n} dreams replayed in the real game; share that has not parted from it yet (Kaplan–Meier)"
    return finished(axes, "How long a dream stays true", note, "Share of dreams true to reality by turn")


@styled
def share_areas(metrics: Metrics) -> Plot | None:
    """Realised shares of each source in the tokens trained on (``tokens_real``, ...), stacked to one."""
    rows = {source: dict(series(metrics, "train", f"tokens_{source}")) for source in SOURCES}
    steps = sorted({x for points in rows.values() for x in points})
    if len(steps) < 2:
        return None
    axes = new_axes("update", "share of trained tokens")
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
    axes.set_xlim(steps[0], steps[-1])
    axes.set_ylim(0, 1)
    return finished(axes, "What it trained on", "realised, by source", "Shares by source per update")


@styled
def loop_curve(report: Mapping[str, Any]) -> Plot | None:
    """Of a loop, real success while acting with its interval, and dreamed success, over real steps."""
    rounds: Sequence[Mapping[str, Any]] = report["loop"]["rounds"]
    real = [(r["charged"], r["real_success"]) for r in rounds if r["real_success"] and r["real_success"]["n"]]
    dreamed = [(r["charged"], r["dreamed_success"]) for r in rounds if r["dreamed_success"] is not None]
    if len(real) < 2:
        return None
    axes = new_axes("real steps", "share of episodes solved", wide=True)
    for steps, success in real:
        if success["ci95"] is not None:
            axes.plot([steps, steps], success["ci95"], color=REAL, linewidth=2, alpha=0.5)
    axes.plot([steps for steps, _ in real], [success["success"] for _, success in real], "o-", color=REAL)
    ends = [_end("real", real[-1][1]["success"], REAL)]
    if dreamed:
        axes.plot(*zip(*dreamed, strict=True), "o-", color=DREAM)
        ends.append(_end("dream", dreamed[-1][1], DREAM))
    end_labels(axes, ends)
    note = "Real: on the tasks of the round, with 95 % intervals. Dream: in the last update of the round"
    return finished(axes, "What it did and what it believed", note, "Success by real steps")


@styled
def control_curve(report: Mapping[str, Any]) -> Plot | None:
    """The control's success by real steps, and where on it the success of this run lies."""
    control = report["money"]["without_dreams"]
    if control is None or len(control["curve"]) < 2:
        return None
    steps, success = zip(*control["curve"], strict=True)
    mean, end = running_mean(success), control["within"]
    axes = new_axes("real steps of the control", "share of episodes solved", wide=True)
    axes.axhspan(*control["ci95"], color=DREAM, alpha=0.12, linewidth=0)
    axes.plot(steps, success, color=REAL, alpha=0.3, linewidth=1.2)
    axes.plot(steps[: len(mean)], mean, color=REAL)
    low, high = (end if step is None else step for step in control["steps_ci95"])
    axes.plot([low, high], [control["success"]] * 2, color=REAL, linewidth=8, alpha=0.4)
    axes.plot([0, end], [control["success"]] * 2, color=DREAM, linewidth=1.5)
    if control["steps"] is not None:
        axes.plot(control["steps"], control["success"], "o", color=REAL, markersize=8, markeredgecolor=PAPER)
    axes.set_xlim(0, end)
    end_labels(axes, [_end("control", float(mean[-1]), REAL), _end("this run", control["success"], DREAM)])
    note = (
        f"Line: mean of {control['window']} updates of the control. Dot and bar: where it comes to this run's "
        f"{number(control['success'])}, with the interval. Band: the interval of this run"
    )
    return finished(axes, "The control on its way", note, "Success of the control by real steps")


def _line(axes: Axes, points: Sequence[Point], colour: str) -> None:
    if len(points) > MANY_POINTS:
        axes.plot(*zip(*points, strict=True), color=colour, alpha=0.3, linewidth=1.2)
    axes.plot(*zip(*trend(points), strict=True), color=colour)


def _end(name: str, y: float, colour: str) -> tuple[str, float, str]:
    return f"{name} {y:.2f}", y, colour


def _real_points(metrics: Metrics, report: Mapping[str, Any], end: float) -> list[tuple[float, Mapping[str, Any]]]:
    """Real success by update: what training measured, the evaluation before at 0 and the one after at the end."""
    points: dict[float, Mapping[str, Any]] = {}
    for row in metrics:
        if row.get("stage") == "train" and row.get("real_success") is not None:
            points[float(row["step"])] = {"success": row["real_success"], "n": None, "ci95": None}
    for x, which in ((0.0, "before"), (end, "after")):
        measured = report["policy"][which]["train_tasks"]
        if measured is not None and measured["success"] is not None:
            points[x] = measured
    return sorted(points.items(), key=lambda point: point[0])
