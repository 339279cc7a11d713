"""The picture of ``make fidelity``: real gain over each measure, a point a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from tests.benchmarks.fidelity_table import ARMS, TOLD, Part, correlation, pairs

# Okabe and Ito's colours, which all common kinds of colour blindness keep apart
COLOURS = {
    "full": "#000000",
    "log": "#0072b2",
    "steps": "#56b4e9",
    "size": "#009e73",
    "reward": "#d55e00",
    "observation": "#cc79a7",
    "end": "#e69f00",
}


def draw(parts: Sequence[Part], target: Path) -> None:
    """One panel a measure of the clone's own actions; hollow points learned without guard and tripwires."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, axes = plt.subplots(2, 4, figsize=(15, 7), sharey=True, layout="constrained")
    for panel, measure in zip(axes.flat, TOLD, strict=True):
        for part in parts:
            value = part.measures["clone"].get(measure.key)
            if value is not None:
                colour = COLOURS[part.axis]
                fill = colour if part.arm == ARMS[0] else "none"
                panel.scatter(value, part.gain, s=34, facecolors=fill, edgecolors=colour, linewidths=1.3, alpha=0.85)
        found = correlation(pairs(parts, ARMS[0], "clone", measure.key))
        panel.axhline(0, color="#999999", linewidth=1, zorder=0)
        told = "" if found.value is None else f"Spearman {found.value:+.2f}"
        if found.ci95 is not None:
            told += f" [{found.ci95[0]:+.2f}, {found.ci95[1]:+.2f}]"
        panel.set_title(f"{measure.title}\n{told}", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("gain in real success, held-out tasks")
    marks = [Line2D([], [], marker="o", linestyle="", color=colour, label=axis) for axis, colour in COLOURS.items()]
    marks.append(Line2D([], [], marker="o", linestyle="", color="#555555", markerfacecolor="none", label="no guard"))
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    figure.savefig(target, dpi=110, facecolor="white")
    plt.close(figure)
