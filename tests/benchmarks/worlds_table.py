"""What the parts of ``make worlds`` have found, as Markdown: a line a part, success by kind of task. Pure functions.

A part is what its run folder holds; what it does not hold yet is a dash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.transfer import pooled
from worldmodel.evaluation.proportions import Proportion, difference_ci95

MEASURED = "world.json"  # in the run folder: what only this benchmark measures
DASH = "–"
ARMS = ("random", "cloned", "dream-trained", "expert")
HEAD = (
    "| world | seed | real steps/s | dreamed turns/s | ratio | world model exact | reward precision | reward recall "
    "| random | cloned | dream-trained | rise | expert | n | optimism gap | Spearman (checkpoints) |\n"
    + "|---" * 16
    + "|"
)
KINDS_HEAD = "| world | kind of task | tasks | " + " | ".join(ARMS) + " |\n" + "|---" * 7 + "|"
_INSTANCE = re.compile(r"[-/_.]s?\d+$")  # what tells one task of a kind from the next


@dataclass(frozen=True, slots=True)
class Part:
    """One world and one seed.

    Attributes:
        report: ``report.json``; ``None`` where it is not there.
        audit: ``audit.json``, likewise.
        measured: ``world.json``, likewise.
    """

    world: str
    seed: int
    report: Mapping[str, Any] | None = None
    audit: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None

    def arm(self, name: str) -> Proportion | None:
        """Success on held-out tasks; ``None`` where it was not measured."""
        if name in ("random", "expert"):
            return Proportion.from_json(self.measured[name]) if self.measured else None
        which = "before" if name == "cloned" else "after"
        found = (self.report or {}).get("policy", {}).get(which, {}).get("heldout_tasks")
        return Proportion.from_json(found) if found else None


def read_part(world: str, seed: int, folder: Path) -> Part:
    """What is there of a part."""
    texts = [folder / name for name in ("report.json", "audit.json", MEASURED)]
    found = [json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in texts]
    return Part(world, seed, *found)


def kind_of(task_id: str) -> str:
    """What kind of task it is, by its id: the family or type, without what tells one instance from the next.

    Example::

        kind_of("alfworld/valid_seen/pick_and_place_simple-Mug-None-Desk-308/trial_T2019_4")  # pick_and_place_simple
        kind_of("sw-find-animal-12")                                                          # find-animal
        kind_of("BabyAI-GoToLocal-v0-s77")                                                    # BabyAI-GoToLocal-v0
    """
    family = _INSTANCE.sub("", task_id).split("/")
    if len(family) > 2:
        return family[2].partition("-")[0]
    return family[-1].removeprefix("sw-")


def by_kind(found: Proportion) -> dict[str, Proportion]:
    """A proportion taken apart, kinds in order of their names."""
    kinds: dict[str, dict[str, tuple[int, int]]] = {}
    for task, counts in found.by_task.items():
        kinds.setdefault(kind_of(task), {})[task] = counts
    return {
        kind: Proportion(sum(good for good, _ in of.values()), sum(n for _, n in of.values()), by_task=of)
        for kind, of in sorted(kinds.items())
    }


def table(parts: Sequence[Part]) -> str:
    """Both tables; where several seeds of a world are there, also a line with all of them."""
    lines: list[str] = []
    kinds: list[str] = []
    for world in dict.fromkeys(part.world for part in parts):
        mine = [part for part in parts if part.world == world]
        lines += map(line, mine)
        lines += [together(world, mine)] if sum(part.report is not None for part in mine) > 1 else []
        kinds += kind_lines(world, mine)
    found = "\n".join([HEAD, *lines]) + "\n"
    return found + (f"\n{KINDS_HEAD}\n" + "\n".join(kinds) + "\n" if kinds else "")


def line(part: Part) -> str:
    """One part's line of the table."""
    measured, audit, report = part.measured or {}, part.audit or {}, part.report or {}
    speed, judged = measured.get("speed"), measured.get("world_model", {})
    cells = [DASH] * 3
    if speed:
        real, dreamed = speed["real_steps_per_second"], speed["dreamed_turns_per_second"]
        cells = [_rate(real), _rate(dreamed), f"{dreamed / real:.1f}"]
    cells += [_estimate(judged.get(key)) for key in ("exact", "reward_precision", "reward_recall")]
    arms = {name: part.arm(name) for name in ARMS}
    cells += [*map(_success, (arms["random"], arms["cloned"], arms["dream-trained"]))]
    cells += [_rise(arms["cloned"], arms["dream-trained"]), _success(arms["expert"])]
    cells.append(str(arms["dream-trained"].n) if arms["dream-trained"] else DASH)
    gap, interval = (report.get(key, {}).get("after") for key in ("optimism_gap", "optimism_gap_ci95"))
    cells.append(DASH if gap is None else f"{gap:+.2f}{_interval(interval, signed=True)}")
    ranks = audit.get("agreement", {}).get("plain", {}).get("spearman")
    cells.append(f"{_estimate(ranks)} ({ranks['n']})" if ranks else DASH)
    return f"| {' | '.join([part.world, str(part.seed), *cells])} |"


def together(world: str, parts: Sequence[Part]) -> str:
    """All seeds of a world: proportions over the tasks of all, means of the rest."""
    measured = [part.measured for part in parts if part.measured]
    speeds = [m["speed"]["dreamed_turns_per_second"] / m["speed"]["real_steps_per_second"] for m in measured]
    cells = [DASH, DASH, _mean(speeds, ".1f")]
    cells += [
        _mean([v for m in measured if (v := m["world_model"][key]["value"]) is not None])
        for key in ("exact", "reward_precision", "reward_recall")
    ]
    arms = {name: _pooled(part.arm(name) for part in parts) for name in ARMS}
    cells += [*map(_success, (arms["random"], arms["cloned"], arms["dream-trained"]))]
    cells += [_rise(arms["cloned"], arms["dream-trained"]), _success(arms["expert"])]
    cells.append(str(arms["dream-trained"].n) if arms["dream-trained"] else DASH)
    gaps = [gap for part in parts if part.report and (gap := part.report["optimism_gap"]["after"]) is not None]
    ranks = [(p.audit or {}).get("agreement", {}).get("plain", {}).get("spearman") for p in parts]
    cells += [_mean(gaps, "+.2f"), _mean([r["value"] for r in ranks if r and r["value"] is not None])]
    return f"| {' | '.join([world, '**all**', *cells])} |"


def kind_lines(world: str, parts: Sequence[Part]) -> list[str]:
    """Success by kind of task, over all seeds; nothing for a world of one kind."""
    arms: dict[str, dict[str, list[Proportion]]] = {name: {} for name in ARMS}
    for name, found in arms.items():
        for whole in filter(None, (part.arm(name) for part in parts)):
            for kind, some in by_kind(whole).items():
                found.setdefault(kind, []).append(some)
    kinds = sorted({kind for found in arms.values() for kind in found})
    lines = []
    for kind in kinds if len(kinds) > 1 else ():
        cells = [_pooled(found.get(kind, ())) for found in arms.values()]
        tasks = max(len(cell.by_task) for cell in cells if cell is not None)
        lines.append(f"| {world} | {kind} | {tasks} | {' | '.join(map(_success, cells))} |")
    return lines


def _pooled(found: Iterable[Proportion | None]) -> Proportion | None:
    """Of several seeds; each has tasks of its own, and where two drew the same one it counts twice."""
    there = [one.to_json() for one in found if one is not None]
    return pooled(there) if there else None


def _success(found: Proportion | None) -> str:
    return DASH if found is None else found.cell


def _rise(before: Proportion | None, after: Proportion | None) -> str:
    if before is None or after is None or before.rate is None or after.rate is None:
        return DASH
    return f"{after.rate - before.rate:+.2f}{_interval(difference_ci95(after, before), signed=True)}"


def _estimate(found: Mapping[str, Any] | None) -> str:
    return DASH if not found or found["value"] is None else f"{found['value']:.2f}{_interval(found['ci95'])}"


def _interval(ends: Sequence[float] | None, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return "" if ends is None else f" [{ends[0]:{sign}.2f}, {ends[1]:{sign}.2f}]"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _mean(values: Sequence[float], form: str = ".2f") -> str:
    return f"{sum(values) / len(values):{form}}" if values else DASH
