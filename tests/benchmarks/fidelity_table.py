"""The tables, the picture and ``forecast.json`` of ``make fidelity``.

A part is one world model and one policy that learned in it, as ``part.json`` in its folder has it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
        settings: overrides.
        share: of the log that is kept (axis ``log``) or made wrong (``reward``, ``observation``, ``end``).
    """

    name: str
    axis: str
    settings: tuple[str, ...] = ()
    share: float = 0.0


FULL = Variant("full", "full")
VARIANTS = (
    FULL,
    Variant("rules-refuse", "rules", ("worldmodel.rules=refuse",)),
    Variant("rules-off", "rules", ("worldmodel.rules=off",)),
    Variant("log-10", "log", share=0.1),
    Variant("steps-10", "steps", ("fit.steps=10",)),
    Variant("reward-30", "reward", share=0.3),
    Variant("reward-60", "reward", share=0.6),
    Variant("observation-30", "observation", share=0.3),
    Variant("observation-60", "observation", share=0.6),
    Variant("end-30", "end", share=0.3),
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
POLICIES = ("clone", "trained")  # whose actions are judged
TOLD = (Measure("exact_heldout", "exact match, logged turns of held-out tasks", ()), *MEASURES)
ENOUGH = 0.9  # share of runs above a floor that must have gained
FEWEST = 5  # runs above a floor
AXES = dict(zip(("full", "rules", "log", "steps", "reward", "observation", "end"), COLOURS, strict=True))
MARKERS = ("o", "s", "^")  # worlds


@dataclass(frozen=True, slots=True)
class Part:
    """One policy that learned in one world model.

    Attributes:
        cloned, trained: real success on held-out tasks before and after, the same tasks and seeds.
        stopped_by: the tripwire that ended the training, or ``None``.
        measures: for the clone's and the trained policy's actions, each measure by key.
    """

    world: str
    variant: str
    axis: str
    seed: int
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
    for path in out.glob(f"*/seed-*/*/trained/{PART}"):
        found = json.loads(path.read_text(encoding="utf-8"))
        found |= {name: Proportion.from_json(found[name]) for name in ("cloned", "trained")}
        parts.append(Part(**{field.name: found[field.name] for field in fields(Part)}))
    order = [variant.name for variant in VARIANTS]
    return sorted(parts, key=lambda part: (part.world, order.index(part.variant), part.seed))


def pairs(parts: Iterable[Part], policy: str, key: str) -> list[tuple[float, float]]:
    """The measure and the gain of each part that has the measure."""
    found = [(part.measures[policy].get(key), part.gain) for part in parts]
    return [(value, gain) for value, gain in found if value is not None]


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


def by_world(parts: Sequence[Part]) -> dict[str, list[Part]]:
    return {world: [part for part in parts if part.world == world] for world in sorted({p.world for p in parts})}


def forecast_data(parts: Sequence[Part]) -> dict[str, Any]:
    """``forecast.json``, see ``imagination.evaluation.forecast``: the measures that tell in every world."""
    best: dict[str, Any] = {}
    for policy in POLICIES:
        telling = []
        for measure in MEASURES:
            told = {w: correlation(pairs(own, policy, measure.key)) for w, own in by_world(parts).items()}
            lows = [
                measure.better * found.ci95[0 if measure.better > 0 else 1] for found in told.values() if found.ci95
            ]
            if told and len(lows) == len(told) and min(lows) > 0:  # an interval of the right sign in every world
                cells = {w: {"spearman": found.value, "ci95": list(found.ci95 or ())} for w, found in told.items()}
                telling.append((min(lows), {"measure": measure.key, "worlds": cells}))
        if telling:
            best[policy] = max(telling, key=lambda one: one[0])[1]
    runs = [
        {
            "world": part.world,
            "variant": part.variant,
            "seed": part.seed,
            "gain": part.gain,
            **{policy: {m.key: part.measures[policy].get(m.key) for m in MEASURES} for policy in POLICIES},
        }
        for part in parts
    ]
    found = {"command": "make fidelity", "best": best, "runs": runs}
    return dict(json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 4)))


def table(parts: Sequence[Part]) -> str:
    """All tables as Markdown: variants and measures of each world."""
    tables = [f"{world}\n\n{_variants(own)}\n{_measures(own)}" for world, own in by_world(parts).items()]
    return "\n".join(tables)


def _variants(parts: Sequence[Part]) -> str:
    head = ["variant", "seeds", *(measure.title for measure in TOLD), "cloned", "trained", "gain", "stopped"]
    rows = []
    for variant in VARIANTS:
        own = [part for part in parts if part.variant == variant.name]
        if own:
            before, after = (pooled([getattr(p, which).to_json() for p in own]) for which in ("cloned", "trained"))
            told = [_mean(part.measures["clone"].get(measure.key) for part in own) for measure in TOLD]
            stopped = f"{sum(part.stopped_by is not None for part in own)}/{len(own)}"
            rows.append([variant.name, len(own), *told, before.cell, after.cell, difference(after, before), stopped])
    return markdown(head, rows)


def _mean(values: Iterable[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{math.fsum(there) / len(there):.2f}" if there else DASH


def _measures(parts: Sequence[Part]) -> str:
    head = ["measure", "Spearman with the gain, clone's actions", "trained policy's actions"]
    head += ["floor, clone's actions (gained of runs)"]
    rows = []
    for measure in TOLD:
        cells = [correlated(correlation(pairs(parts, policy, measure.key))) for policy in POLICIES]
        found = floor(pairs(parts, "clone", measure.key), measure.better)
        sign = "≥" if measure.better > 0 else "≤"
        cells.append(DASH if found is None else f"{sign} {found[0]:.2f} ({found[2]} of {found[1]})")
        rows.append([measure.title, *cells])
    return markdown(head, rows)


def correlated(found: Estimate) -> str:
    """``+0.61 [+0.20, +0.85] (15)``: the correlation, its interval, and of how many runs."""
    return DASH if found.value is None else f"{estimate(found.value, found.ci95, '+.2f')} ({found.n})"


def draw(parts: Sequence[Part], target: Path) -> None:
    """One panel a measure of the clone's own actions, one marker a world."""
    from matplotlib.lines import Line2D

    worlds = by_world(parts)
    with figure(target, 3, 3, dpi=110, figsize=(13, 11), sharey=True) as (picture, axes):
        for panel, measure in zip(axes.flat, TOLD, strict=True):
            titles = [measure.title]
            for marker, (world, own) in zip(MARKERS, worlds.items(), strict=False):
                for part in own:
                    value = part.measures["clone"].get(measure.key)
                    if value is not None:
                        panel.scatter(value, part.gain, s=34, color=AXES[part.axis], marker=marker, alpha=0.85)
                titles.append(f"{world}: {correlated(correlation(pairs(own, 'clone', measure.key)))}")
            panel.axhline(0, color="#999999", linewidth=1, zorder=0)
            panel.set_title("\n".join(titles), fontsize=10)
        for panel in axes[:, 0]:
            panel.set_ylabel("gain in real success, held-out tasks")
        marks = [Line2D([], [], marker="o", linestyle="", color=colour, label=axis) for axis, colour in AXES.items()]
        for marker, world in zip(MARKERS, worlds, strict=False):
            marks.append(Line2D([], [], marker=marker, linestyle="", color="#555555", label=world))
        picture.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
