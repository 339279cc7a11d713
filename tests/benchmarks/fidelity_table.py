"""The tables, the picture and ``forecast.json`` of ``make fidelity``.

A part is one world model and one policy that learned in it, as ``part.json`` in its folder has it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from imagination.evaluation.forecast import MEASURES, Measure
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn
from tests.benchmarks.study import COLOURS, DASH, difference, estimate, figure, markdown, pooled
from worldmodel.evaluation.agreement import spearman
from worldmodel.evaluation.intervals import Estimate, bootstrap, sums_by_cluster
from worldmodel.evaluation.proportions import Proportion

T = TypeVar("T")
Place = tuple[int, int]  # episode, turn


@dataclass(frozen=True, slots=True)
class Variant:
    """One world model.

    Attributes:
        axis: what is made worse.
        settings: overrides of the fit.
        share: of the log that is kept (axis ``log``) or made wrong (``reward``, ``observation``, ``end``).
        free: also train without guard and tripwires.
    """

    name: str
    axis: str
    settings: tuple[str, ...] = ()
    share: float = 0.0
    free: bool = False


FULL = Variant("full", "full", free=True)
VARIANTS = (
    FULL,
    Variant("log-30", "log", share=0.3),
    Variant("log-10", "log", share=0.1, free=True),
    Variant("steps-300", "steps", ("fit.steps=300",)),
    Variant("steps-100", "steps", ("fit.steps=100",), free=True),
    Variant("size-64", "size", ("worldmodel.hidden=64", "worldmodel.mlp=192")),
    Variant("size-32", "size", ("worldmodel.hidden=32", "worldmodel.mlp=96"), free=True),
    Variant("reward-10", "reward", share=0.1),
    Variant("reward-30", "reward", share=0.3, free=True),
    Variant("observation-10", "observation", share=0.1),
    Variant("observation-30", "observation", share=0.3, free=True),
    Variant("end-10", "end", share=0.1),
    Variant("end-30", "end", share=0.3, free=True),
)
PLANTED = ("log", "reward", "observation", "end")


def planted(log: Sequence[Trajectory], axis: str, share: float, seed: int) -> list[Trajectory]:
    """A log made worse; the given one stays as it is. The same seed chooses the same, and a larger share adds to it.

    - ``log``: that share of the episodes, and nothing else.
    - ``reward``: that share of the rewarded turns earns nothing, and as many others earn what those did.
    - ``observation``: that share of the turns has the observation of another of them.
    - ``end``: that share of the turns has the wrong end flag; the episode goes on as it did.

    Args:
        log: real episodes.
        axis: one of ``PLANTED``.
        share: in [0, 1].

    Raises:
        ValueError: there is no such axis.
    """
    if axis not in PLANTED:
        raise ValueError(f"nothing is planted for {axis!r}; one of {', '.join(PLANTED)} is")
    chance = random.Random(derive_seed(f"fidelity/{axis}", seed))
    if axis == "log":
        kept = sorted(_drawn(range(len(log)), share, chance))
        return [log[place] for place in kept]
    turns = {(e, k): turn for e, episode in enumerate(log) for k, turn in enumerate(episode.turns)}
    if axis == "reward":
        changed = _rewards(turns, share, chance)
    elif axis == "end":
        changed = {p: replace(turns[p], terminated=not turns[p].terminated) for p in _drawn(list(turns), share, chance)}
    else:
        chosen = _drawn(list(turns), share, chance)
        donors = [*chosen[1:], *chosen[:1]]  # the next one's: nobody keeps its own
        changed = {
            p: replace(turns[p], observation=turns[donor].observation) for p, donor in zip(chosen, donors, strict=True)
        }
    return [
        replace(episode, turns=tuple(changed.get((e, k), turn) for k, turn in enumerate(episode.turns)))
        for e, episode in enumerate(log)
    ]


def _rewards(turns: dict[Place, Turn], share: float, chance: random.Random) -> dict[Place, Turn]:
    paid = [p for p, turn in turns.items() if turn.reward]
    losers = _drawn(paid, share, chance)
    unpaid = [p for p, turn in turns.items() if turn.reward == 0]
    chance.shuffle(unpaid)
    changed = {p: replace(turns[p], reward=0.0) for p in losers}
    # a log in which nearly every turn is paid has fewer that can gain one
    return changed | {p: replace(turns[p], reward=turns[q].reward) for p, q in zip(unpaid, losers, strict=False)}


def _drawn(places: Sequence[T], share: float, chance: random.Random) -> list[T]:
    """That share of them, rounded, in random order; all are shuffled, so that a smaller share is part of a larger."""
    order = list(places)
    chance.shuffle(order)
    return order[: round(share * len(order))]


PART = "part.json"
ARMS = ("guarded", "free")  # with guard and tripwires, without
POLICIES = ("clone", "trained")  # whose actions are judged
TOLD = (Measure("exact_heldout", "exact match, logged turns of held-out tasks", ()), *MEASURES)
ENOUGH = 0.9  # share of runs above a floor that must have gained
FEWEST = 5  # runs above a floor
AXES = dict(zip(("full", "log", "reward", "size", "observation", "end", "steps"), COLOURS, strict=True))


@dataclass(frozen=True, slots=True)
class Part:
    """One policy that learned in one world model.

    Attributes:
        cloned, trained: real success on held-out tasks before and after, the same tasks and seeds.
        stopped_by: the tripwire that ended the training, or ``None``.
        measures: for the clone's and the trained policy's actions, each measure by key.
    """

    variant: str
    axis: str
    seed: int
    arm: str
    cloned: Proportion
    trained: Proportion
    stopped_by: str | None
    measures: Mapping[str, Mapping[str, float | None]]

    @property
    def gain(self) -> float:
        return (self.trained.rate or 0.0) - (self.cloned.rate or 0.0)


def read_parts(out: Path) -> list[Part]:
    """All parts that are there, in order of variants and seeds."""
    parts = []
    for path in out.glob(f"seed-*/*/*/{PART}"):
        found = json.loads(path.read_text(encoding="utf-8"))
        success = [Proportion.from_json(found[name]) for name in ("cloned", "trained")]
        variant, axis, seed, arm = (found[name] for name in ("variant", "axis", "seed", "arm"))
        parts.append(Part(variant, axis, seed, arm, success[0], success[1], found["stopped_by"], found["measures"]))
    order = [variant.name for variant in VARIANTS]
    return sorted(parts, key=lambda part: (order.index(part.variant), ARMS.index(part.arm), part.seed))


def pairs(parts: Iterable[Part], arm: str, policy: str, key: str) -> list[tuple[float, float]]:
    """The measure and the gain of each part of that arm that has the measure."""
    mine = [(part.measures[policy].get(key), part.gain) for part in parts if part.arm == arm]
    return [(value, gain) for value, gain in mine if value is not None]


def correlation(found: Sequence[tuple[float, float]], seed: int = 0, cluster: Sequence[str] | None = None) -> Estimate:
    """Spearman's rank correlation of measure and gain, with its bootstrap interval over runs, or clusters of them.

    Runs of a seed share the clone and the held-out tasks, which the interval over runs does not know of.
    """
    x, y = [value for value, _ in found], [gain for _, gain in found]
    value = spearman(x, y) if found else None

    def of(counts: np.ndarray) -> float | None:
        times = counts.astype(int)
        return spearman(np.repeat(x, times).tolist(), np.repeat(y, times).tolist())

    if value is None:
        return Estimate(None, len(found))
    sums = sums_by_cluster(np.eye(len(found)).tolist(), cluster or [str(run) for run in range(len(found))])
    return Estimate(value, len(found), bootstrap(sums, of, seed, (-1.0, 1.0)))


def floor(found: Sequence[tuple[float, float]], better: int = 1) -> tuple[float, int, int] | None:
    """The smallest value (the largest, where less is better) from which on nine runs in ten gained.

    Returns:
        the value, how many runs are at least as good, and how many of these gained; ``None`` where there is no value
        with ``FEWEST`` runs for which that holds.
    """
    for value in sorted({value for value, _ in found}, key=lambda value: better * value):
        gains = [gain for other, gain in found if better * other >= better * value]
        if len(gains) >= FEWEST and sum(gain > 0 for gain in gains) >= ENOUGH * len(gains):
            return value, len(gains), sum(gain > 0 for gain in gains)
    return None


def forecast_data(parts: Sequence[Part], env: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``forecast.json``, see ``imagination.evaluation.forecast``: the runs with guard and tripwires."""
    best: dict[str, Any] = {}
    for policy in POLICIES:
        told = [(measure, correlation(pairs(parts, ARMS[0], policy, measure.key))) for measure in MEASURES]
        known = [(measure, found) for measure, found in told if found.value is not None and found.ci95 is not None]
        if known:
            measure, found = max(known, key=lambda one: one[0].better * (one[1].value or 0.0))
            best[policy] = {"measure": measure.key, "spearman": found.value, "ci95": list(found.ci95 or ())}
    runs = [
        {
            "variant": part.variant,
            "seed": part.seed,
            "gain": part.gain,
            **{policy: {m.key: part.measures[policy].get(m.key) for m in MEASURES} for policy in POLICIES},
        }
        for part in parts
        if part.arm == ARMS[0]
    ]
    rounded = json.loads(json.dumps(runs), parse_float=lambda text: round(float(text), 4))
    return {"env": env, "options": dict(options), "command": "make fidelity", "best": best, "runs": rounded}


def table(parts: Sequence[Part]) -> str:
    """All tables as Markdown: variants, then measures."""
    return f"{_variants(parts)}\n{_measures(parts)}"


def _variants(parts: Sequence[Part]) -> str:
    head = ["variant", "seeds", *(measure.title for measure in TOLD), "cloned", "trained", "gain", "stopped"]
    head += ["trained, no guard", "gain, no guard"]
    rows = []
    for variant in VARIANTS:
        guarded, free = ([p for p in parts if p.variant == variant.name and p.arm == arm] for arm in ARMS)
        if guarded or free:
            rows.append([variant.name, *_cells(guarded, free)])
    return markdown(head, rows)


def _cells(guarded: Sequence[Part], free: Sequence[Part]) -> list[str]:
    there = guarded or free
    seeds = len({part.seed for part in there})
    cells = [str(seeds), *(_mean(part.measures["clone"].get(measure.key) for part in there) for measure in TOLD)]
    cells += [_together(there, "cloned").cell, *_success(guarded)]
    cells += [f"{sum(part.stopped_by is not None for part in guarded)}/{len(guarded)}", *_success(free)]
    return cells


def _success(parts: Sequence[Part]) -> list[str]:
    if not parts:
        return [DASH, DASH]
    before, after = _together(parts, "cloned"), _together(parts, "trained")
    return [after.cell, difference(after, before)]


def _together(parts: Sequence[Part], which: str) -> Proportion:
    """Of several seeds; each has tasks of its own."""
    return pooled([getattr(part, which).to_json() for part in parts])


def _mean(values: Iterable[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{math.fsum(there) / len(there):.2f}" if there else DASH


def _measures(parts: Sequence[Part]) -> str:
    columns = [(ARMS[0], "clone"), (ARMS[0], "trained"), (ARMS[1], "clone")]
    head = ["measure", "Spearman with the gain, clone's actions", "trained policy's actions", "clone's, no guard"]
    head += ["floor, clone's actions (gained of runs)"]
    rows = []
    for measure in TOLD:
        cells = [correlated(correlation(pairs(parts, *column, measure.key))) for column in columns]
        found = floor(pairs(parts, *columns[0], measure.key), measure.better)
        sign = "≥" if measure.better > 0 else "≤"
        cells.append(DASH if found is None else f"{sign} {found[0]:.2f} ({found[2]} of {found[1]})")
        rows.append([measure.title, *cells])
    return markdown(head, rows)


def correlated(found: Estimate) -> str:
    """``+0.61 [+0.20, +0.85] (15)``: the correlation, its interval, and of how many runs."""
    return DASH if found.value is None else f"{estimate(found.value, found.ci95, '+.2f')} ({found.n})"


def draw(parts: Sequence[Part], target: Path) -> None:
    """One panel a measure of the clone's own actions; hollow points learned without guard and tripwires."""
    from matplotlib.lines import Line2D

    with figure(target, 2, 4, dpi=110, figsize=(15, 7), sharey=True) as (picture, axes):
        for panel, measure in zip(axes.flat, TOLD, strict=True):
            for part in parts:
                value = part.measures["clone"].get(measure.key)
                if value is not None:
                    colour = AXES[part.axis]
                    fill = colour if part.arm == ARMS[0] else "none"
                    panel.scatter(
                        value, part.gain, s=34, facecolors=fill, edgecolors=colour, linewidths=1.3, alpha=0.85
                    )
            found = correlation(pairs(parts, ARMS[0], "clone", measure.key))
            panel.axhline(0, color="#999999", linewidth=1, zorder=0)
            rank = "" if found.value is None else f"Spearman {estimate(found.value, found.ci95, '+.2f')}"
            panel.set_title(f"{measure.title}\n{rank}", fontsize=10)
        for panel in axes[:, 0]:
            panel.set_ylabel("gain in real success, held-out tasks")
        marks = [Line2D([], [], marker="o", linestyle="", color=colour, label=axis) for axis, colour in AXES.items()]
        marks.append(
            Line2D([], [], marker="o", linestyle="", color="#555555", markerfacecolor="none", label="no guard")
        )
        picture.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
