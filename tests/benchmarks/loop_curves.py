"""What the arms of ``make loop-table`` have found: success over real steps, and the steps that a level of it takes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from tests.benchmarks.loop_arms import ARMS, REAL_ONLY, Arm
from tests.benchmarks.transfer import pooled
from worldmodel.evaluation.proportions import Proportion

CURVE = "curve.json"
DASH = "–"
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's
SHOWN = ("real-only", "real-only-small", "dream-then-real", "loop", "uniform", "frozen", "fit-only")


@dataclass(frozen=True, slots=True)
class Curve:
    """One arm of one seed.

    Attributes:
        points: real steps and success on held-out tasks after them, in the order of the steps.
        seconds: wall time of everything that the arm did, judging left out.
    """

    arm: str
    seed: int
    points: tuple[tuple[int, Proportion], ...]
    seconds: float

    def steps_to(self, level: float) -> int | None:
        """Real steps after which a judged policy succeeds at least so often, or ``None``: no such policy.

        Example::

            of points (0, 0.2), (1000, 0.5), (2000, 0.7): steps_to(0.6) is 2000
        """
        return next((steps for steps, success in self.points if (success.rate or 0.0) >= level), None)

    def to_json(self) -> dict[str, Any]:
        points = [[steps, success.to_json() | {"by_task": None}] for steps, success in self.points]
        return {"arm": self.arm, "seed": self.seed, "seconds": round(self.seconds), "points": points}


def read_curves(out: Path) -> list[Curve]:
    """All that are there, in order of arms and seeds."""
    order, curves = [arm.name for arm in ARMS], []
    for path in out.glob(f"seed-*/*/{CURVE}"):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["arm"] != path.parent.name:
            continue  # an arm that goes on from the common round, and has not been judged yet
        points = [(int(p["real_steps"]), Proportion.from_json(p["success"])) for p in found["points"]]
        curves.append(Curve(found["arm"], found["seed"], tuple(sorted(points, key=lambda p: p[0])), found["seconds"]))
    return sorted(curves, key=lambda curve: (order.index(curve.arm), curve.seed))


def table(curves: Sequence[Curve], levels: Sequence[float]) -> str:
    """A line an arm. Success is that of all seeds together, with its interval over their tasks."""
    head = ["arm", "seeds", "n", "real steps", "success", "seconds"]
    head += [f"real steps to {level:g}" for level in levels] + [f"fewer than real only, {level:g}" for level in levels]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm in ARMS:
        mine = [curve for curve in curves if curve.arm == arm.name]
        if mine:
            lines.append(f"| {' | '.join(_cells(arm, mine, curves, levels))} |")
    return "\n".join(lines) + "\n"


def _cells(arm: Arm, mine: Sequence[Curve], curves: Sequence[Curve], levels: Sequence[float]) -> list[str]:
    last = pooled([curve.points[-1][1].to_json() for curve in mine])
    steps = statistics.mean(curve.points[-1][0] for curve in mine)
    seconds = statistics.mean(curve.seconds for curve in mine)
    cells = [arm.title, str(len(mine)), str(last.n), f"{steps:,.0f}", last.cell, f"{seconds:,.0f}"]
    cells += [", ".join(_told(curve.steps_to(level), curve) for curve in mine) for level in levels]
    return cells + [_ratios(mine, curves, level) for level in levels]


def _told(steps: int | None, curve: Curve) -> str:
    return f"> {curve.points[-1][0]:,}" if steps is None else f"{steps:,}"


def _ratios(mine: Sequence[Curve], curves: Sequence[Curve], level: float) -> str:
    """Seed by seed, how often the steps of this arm go into those of the better real-only one."""
    told = []
    for curve in mine:
        steps = curve.steps_to(level)
        others = [one.steps_to(level) for one in curves if one.arm in REAL_ONLY and one.seed == curve.seed]
        known = [other for other in others if other is not None]
        told.append(DASH if steps is None or not known else f"{min(known) / steps:.1f}x" if steps else "without any")
    return DASH if set(told) == {DASH} or curve.arm in REAL_ONLY else ", ".join(told)


def draw(curves: Sequence[Curve], target: Path) -> None:
    """Success over real steps: a thin line a seed, a thick one for their mean where all seeds have been."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, panel = plt.subplots(figsize=(9, 5), layout="constrained")
    for name, colour in zip(SHOWN, COLOURS, strict=True):
        mine = [curve for curve in curves if curve.arm == name]
        if not mine:
            continue
        title = next(arm.title for arm in ARMS if arm.name == name)
        lines = [np.array([(steps, success.rate or 0.0) for steps, success in curve.points]).T for curve in mine]
        for x, y in lines:
            panel.plot(x, y, color=colour, linewidth=0.7, alpha=0.45)
        grid = np.linspace(0, min(x[-1] for x, _ in lines), 60)
        mean = np.mean([np.interp(grid, x, y) for x, y in lines], axis=0)
        panel.plot(grid, mean, color=colour, linewidth=2.4, label=f"{title} ({len(mine)} seeds)")
    panel.set(xlabel="real steps on the new tasks", ylabel="success on held-out tasks, real world", ylim=(0, 1))
    panel.spines[["top", "right"]].set_visible(False)
    if panel.lines:
        panel.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(target, dpi=120, facecolor="white")
    plt.close(figure)
