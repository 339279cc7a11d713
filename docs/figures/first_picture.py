"""The first picture of the README, from the folder of a run: success over updates, and a dream beside reality.

Run it as ``python docs/figures/first_picture.py outputs/demo``; it writes ``docs/figures/first-picture.png``.
"""

from __future__ import annotations

import json
import sys
import textwrap
from itertools import dropwhile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DREAM, REAL, INK, PALE = "#7b5cd6", "#1a7f5a", "#24292f", "#6e7781"


def main(folder: Path, target: Path) -> None:
    """Draws the run in ``folder``."""
    summary = json.loads((folder / "summary.json").read_text())
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plt.rcParams.update({"font.size": 10, "text.color": INK, "axes.edgecolor": PALE, "axes.labelcolor": INK})
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.4), width_ratios=[1, 1.25], layout="constrained")
    curve(left, [line for line in lines if line["stage"] == "train"], summary)
    pair(right, rollouts)
    figure.savefig(target, dpi=130, facecolor="white")


def curve(axes: Any, updates: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Dreamed success at each update, real success before and after with 95 % intervals."""
    shown = [(line["step"], line["dream_success"]) for line in updates if "dream_success" in line]
    axes.plot(*zip(*shown, strict=True), color=DREAM, lw=2)
    axes.text(0.3, 0.7, "in dreams", transform=axes.transAxes, color=DREAM)
    for which, at, side in (("before", -0.6, "left"), ("after", len(updates) - 0.4, "right")):
        real = summary["policy"][which]["heldout_tasks"]
        low, high = real["ci95"]
        spread = [[real["success"] - low], [high - real["success"]]]
        axes.errorbar([at], [real["success"]], yerr=spread, fmt="o", color=REAL, capsize=4, ms=7)
        words = f"{real['success']:.2f} in real games\nnever seen, {which}\n(n = {real['n']})"
        place = (34, 0) if side == "left" else (8, -72)
        line = {"arrowstyle": "-", "color": REAL, "lw": 0.7}
        axes.annotate(words, (at, low), place, textcoords="offset points", ha=side, color=REAL, arrowprops=line)
    axes.set(ylim=(0, 1.05), xlabel="policy update, all played in dreams", ylabel="success rate")
    axes.set_title(f"Real success rises with {summary['real_steps']['train']} real steps in training", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def pair(axes: Any, rollouts: list[dict[str, Any]]) -> None:
    """A solved dream beside the same actions in the real game."""
    dreams = {row["id"]: row for row in rollouts if row["source"] == "dream"}
    twins = [(dreams[row["twin_of"]], row) for row in rollouts if row.get("which") == "replay"]
    solved = [(d, r) for d, r in twins if d["solved"] and r["solved"]]
    dream, real = min(solved, key=lambda both: (len(both[0]["turns"]), len(both[0]["start"]), both[0]["id"]))
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_title("One episode: what was dreamed, and what the game then said", loc="left")
    height = 0.985
    goal, _, place = dream["start"].partition("\n")
    for line in textwrap.wrap(goal, 96):
        axes.text(0, height, line, style="italic", va="top", color=PALE, fontsize=9)
        height -= 0.05
    axes.text(0.02, height - 0.005, "world model", color=DREAM, weight="bold", va="top", fontsize=9)
    axes.text(0.52, height - 0.005, "real game", color=REAL, weight="bold", va="top", fontsize=9)
    height -= 0.055
    known = {dream["start"], goal, place}
    both = zip(dream["turns"], real["turns"], strict=False)
    # looking around and asking for the task, with which it begins, answer what stands above
    for imagined, happened in dropwhile(lambda two: {turn["observation"] for turn in two} <= known, both):
        axes.text(0, height, f"> {imagined['action']}", family="monospace", va="top", fontsize=8.5, weight="bold")
        height -= 0.047
        columns = [wrapped(turn["observation"]) for turn in (imagined, happened)]
        for x, text in zip((0.02, 0.52), columns, strict=True):
            axes.text(x, height, "\n".join(text), family="monospace", va="top", fontsize=7, linespacing=1.15)
        height -= 0.034 * max(map(len, columns)) + 0.022


def wrapped(text: str, width: int = 47, most: int = 3) -> list[str]:
    lines = textwrap.wrap(" ".join(text.split()), width)
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1][: width - 2] + " …"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).with_name("first-picture.png"))
