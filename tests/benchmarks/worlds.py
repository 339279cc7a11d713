"""Real worlds side by side: what a world model of each is worth, and what policies learn in its dreams.

    python -m tests.benchmarks.worlds --worlds gymnasium scienceworld --seeds 0 1 2
    python -m tests.benchmarks.worlds --worlds alfworld --seeds 0 alfworld:env.options.data=/data/json_2.1.1

A part is one world (the preset of its name) and one seed. It goes through the stages of the demo, the audit and the
comparison, and is then measured in what these do not measure: scripted agents on the held-out tasks, the world model on
held-out tasks with intervals over tasks, and the speed of both worlds. Nothing of that chooses anything.

Speed is that of the same logged actions, done again in the real world and in dreams, without a policy, as fast as each
world goes on as many cores as torch has threads; resets are part of it, the start of processes is not.

Writes ``<out>/table.md`` after every part, with all parts that are there. What a run folder holds already is not done
again; a part that was interrupted goes on where it stopped, and one that cannot be made is a line of dashes.
``--table`` only reads.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from imagination.commands.audit import audited_before, run_audit
from imagination.commands.compare import compare
from imagination.commands.experiments.arms import seed_config
from imagination.commands.experiments.demo import run_stages
from imagination.commands.report import report
from imagination.evaluation.world_model_eval import heldout_tasks, in_reach
from imagination.rollout.dream_env import DreamEnv, Start
from imagination.rollout.play import Episode, Provenance, plan, play_all, replay_all
from imagination.runs.lifecycle import open_run
from imagination.runs.log import read_log
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import open_tasks
from imagination.session import Session
from imagination.settings import Config
from imagination.settings.compose import config_folder, load_config
from real_envs.env import Agent
from real_envs.errors import UserError
from real_envs.files import write_atomically
from real_envs.trajectory import Source, Trajectory
from real_envs.world import find_world
from tests.benchmarks import study
from worldmodel.evaluation.proportions import Proportion, summarise
from worldmodel.evaluation.transitions import judge, outcome_metrics, transition_metrics

WORLDS = ("textworld", "gymnasium", "scienceworld", "alfworld", "miniwob")
REAL_EPISODES = 24  # whose actions are done again for real, to see how fast that world is
SCRIPTED = {"random": "random", "expert": "expert"}  # column -> name of the scripted agent
MEASURED = "world.json"  # in the run folder: what only this benchmark measures
ARMS = ("random", "cloned", "dream-trained", "expert")
HEAD = (
    *("world", "seed", "real steps/s", "dreamed turns/s", "ratio", "world model exact", "reward precision"),
    *("reward recall", "random", "cloned", "dream-trained", "rise", "expert", "n", "optimism gap"),
    "Spearman (checkpoints)",
)
KINDS_HEAD = ("world", "kind of task", "tasks", *ARMS)
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


def main() -> int:
    parser = study.make_parser(__doc__, "outputs/worlds", [0, 1, 2])
    parser.add_argument("--worlds", nargs="+", default=[name for name in WORLDS if _preset(name).exists()])
    options, settings = study.options_and_settings(
        parser, "all worlds or, such as alfworld:env.options.data=..., of one"
    )
    if unknown := [name for name in options.worlds if not _preset(name).exists()]:
        print(f"error: there is no preset={unknown[0]} (configs/preset/{unknown[0]}.yaml)", file=sys.stderr)
        return 2
    parts = [(world, seed) for seed in options.seeds for world in options.worlds]

    def make(world: str, seed: int) -> None:
        make_part(part_config(world, seed, settings), part_folder(options.out, world, seed))

    named = [(f"{world}, seed {seed}", partial(make, world, seed)) for world, seed in parts]
    return study.run_parts(options, named, lambda: write_table(options.out, parts))


def _preset(world: str) -> Path:
    return config_folder() / "preset" / f"{world}.yaml"


def part_folder(out: Path, world: str, seed: int) -> Path:
    return out / world / f"seed-{seed}"


def part_config(world: str, seed: int, overrides: list[str]) -> Config:
    """The world's preset with the overrides of all worlds and its own; checkpoints are kept for the audit."""
    mine = study.settings_of(world, overrides, WORLDS)
    return seed_config(load_config([f"preset={world}", *mine, f"seed={seed}"], Config), seed)


def make_part(config: Config, folder: Path) -> None:
    """Every stage, the audit, the comparison and the measurements, as far as they are not there yet."""
    run_stages(config, folder)
    report(config, folder, partial=False)
    trained = (folder / "models" / "policy" / "config.json").stat().st_mtime
    if audited_before(config, folder) is None:
        run_audit(config, folder)
        give_back_memory()
    for name, stage in (("compare.json", compare), (MEASURED, measure)):
        path = folder / name
        if not path.exists() or path.stat().st_mtime < trained:
            print(f"{name.removesuffix('.json')} ...", flush=True)
            stage(config, folder)
            give_back_memory()


def write_table(out: Path, made: Iterable[tuple[str, int]]) -> str:
    """``table.md`` of these parts and of all others that are there; what it says."""
    there = {(path.parent.name, int(path.name.removeprefix("seed-"))) for path in out.glob("*/seed-*")}
    known = {name: place for place, name in enumerate(WORLDS)}
    wanted = sorted({*made, *there}, key=lambda part: (known.get(part[0], len(known)), *part))
    parts = [read_part(world, seed, part_folder(out, world, seed)) for world, seed in wanted]
    return study.write_files(out, table=table(parts))


def measure(config: Config, folder: Path) -> None:
    """Writes ``world.json``, see the top of this file.

    Raises:
        UserError: the log has no episode of a held-out task.
    """
    run = open_run(config, folder)
    if not heldout_tasks(run):
        raise UserError(f"{run.log} has no held-out episodes: collect.heldout_episodes must be at least 1")
    found = asyncio.run(_measure(config, run))
    write_atomically(folder / MEASURED, json.dumps(found, indent=1))


async def _measure(config: Config, run: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": config.seed, "max_turns": config.evaluate.max_turns}
    for column, name in SCRIPTED.items():
        agent = next(a for a, _ in find_world(config.env.name).behaviours(()) if a.name == name)
        found[column] = summarise(await _scripted(config, run, agent)).success.to_json()
    found["world_model"] = await _judged(config, run)
    found["speed"] = await _speed(config, run)
    return found


async def _scripted(config: Config, run: RunFolder, agent: Agent) -> list[Trajectory]:
    """One episode of each held-out task."""
    tasks = open_tasks(run, config.env, config.collect.workers, privileged=True)
    episodes = plan(tasks.tasks("heldout"), 1, f"real/{agent.name}/heldout", config.seed)
    try:
        return await play_all(
            episodes, tasks.make_env, agent, Provenance(Source.REAL), config.evaluate.max_turns, config.collect.workers
        )
    finally:
        await tasks.close()


async def _judged(config: Config, run: RunFolder) -> dict[str, Any]:
    """The world model's greedy predictions of logged turns of held-out tasks, as estimates with intervals over tasks.

    A model that reads facts is judged as it is dreamed in: with those of the task, see ``held_out.measure``.
    """
    train, _ = read_log(run, config.collect.validation)
    episodes = heldout_tasks(run)
    reach: list[Trajectory] = []
    if config.worldmodel.facts:
        reach, episodes = in_reach(episodes)
    world = Session(config, run).world_model([*train, *reach], temperature=0.0, served=False)
    judged = await judge(world.excluding(episodes), episodes)
    reward = outcome_metrics(judged, config.seed)["reward"]
    words = transition_metrics(judged, config.seed)
    return {
        "n": words["n"],
        "tasks": words["tasks"],
        "exact": words["exact"],
        "reward_precision": reward["precision"],
        "reward_recall": reward["recall"],
    }


async def _speed(config: Config, run: RunFolder) -> dict[str, Any]:
    """The actions of logged held-out episodes done again, in the real world and in dreams."""
    log = heldout_tasks(run)
    cores = torch.get_num_threads()
    tasks = open_tasks(run, config.env, cores)
    known = {task.id: task for task in tasks.tasks("heldout")}
    again = {f"again/{t.id}": t for t in log}
    episodes = [Episode(name, known[t.task_id], name, config.seed) for name, t in again.items()]
    try:
        await replay_all(again, episodes[:cores], tasks.make_env, cores)  # processes start
        real = await _timed(lambda: replay_all(again, episodes[:REAL_EPISODES], tasks.make_env, cores))
    finally:
        await tasks.close()
    train, _ = read_log(run, config.collect.validation)
    world = Session(config, run).world_model(train, temperature=1.0)
    starts = {t.task_id: Start(t.task_id, t.start) for t in log}
    dreams = [replace(e, task=replace(e.task, spec={"start": e.task.id})) for e in episodes]
    dreamed = await _timed(lambda: replay_all(again, dreams, lambda: DreamEnv(world, starts), 128))
    return {
        "cores": cores,
        "real_steps_per_second": real,
        "real_episodes": len(episodes[:REAL_EPISODES]),
        "dreamed_turns_per_second": dreamed,
        "dreamed_episodes": len(dreams),
    }


async def _timed(play: Any) -> float:
    """Turns per second."""
    begin = time.perf_counter()
    turns = sum(len(t.turns) for t in await play())
    return turns / (time.perf_counter() - begin)


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
    rows: list[Sequence[object]] = []
    kinds: list[Sequence[object]] = []
    for world in dict.fromkeys(part.world for part in parts):
        own = [part for part in parts if part.world == world]
        rows += map(_row, own)
        rows += [_row_of_all(world, own)] if sum(part.report is not None for part in own) > 1 else []
        kinds += _kind_rows(world, own)
    return study.markdown(HEAD, rows) + (f"\n{study.markdown(KINDS_HEAD, kinds)}" if kinds else "")


def _row(part: Part) -> list[object]:
    measured, audit, report = part.measured or {}, part.audit or {}, part.report or {}
    speed, judged = measured.get("speed"), measured.get("world_model", {})
    cells = [study.DASH] * 3
    if speed:
        real, dreamed = speed["real_steps_per_second"], speed["dreamed_turns_per_second"]
        cells = [_rate(real), _rate(dreamed), f"{dreamed / real:.1f}"]
    cells += [_estimate(judged.get(key)) for key in ("exact", "reward_precision", "reward_recall")]
    arms = {name: part.arm(name) for name in ARMS}
    cells += _arm_cells(arms)
    gap, ends = (report.get(key, {}).get("after") for key in ("optimism_gap", "optimism_gap_ci95"))
    cells.append(study.estimate(gap, ends, "+.2f"))
    ranks = audit.get("agreement", {}).get("plain", {}).get("spearman")
    cells.append(f"{_estimate(ranks)} ({ranks['n']})" if ranks else study.DASH)
    return [part.world, part.seed, *cells]


def _arm_cells(arms: Mapping[str, Proportion | None]) -> list[str]:
    cells = [_success(arms[name]) for name in ("random", "cloned", "dream-trained")]
    cells += [study.difference(arms["dream-trained"], arms["cloned"]), _success(arms["expert"])]
    return [*cells, str(arms["dream-trained"].n) if arms["dream-trained"] else study.DASH]


def _row_of_all(world: str, parts: Sequence[Part]) -> list[object]:
    """All seeds of a world: proportions over the tasks of all, means of the rest."""
    measured = [part.measured for part in parts if part.measured]
    speeds = [m["speed"]["dreamed_turns_per_second"] / m["speed"]["real_steps_per_second"] for m in measured]
    cells = [study.DASH, study.DASH, _mean(speeds, ".1f")]
    cells += [
        _mean([v for m in measured if (v := m["world_model"][key]["value"]) is not None])
        for key in ("exact", "reward_precision", "reward_recall")
    ]
    arms = {name: _pooled(part.arm(name) for part in parts) for name in ARMS}
    cells += _arm_cells(arms)
    gaps = [gap for part in parts if part.report and (gap := part.report["optimism_gap"]["after"]) is not None]
    ranks = [(p.audit or {}).get("agreement", {}).get("plain", {}).get("spearman") for p in parts]
    cells += [_mean(gaps, "+.2f"), _mean([r["value"] for r in ranks if r and r["value"] is not None])]
    return [world, "**all**", *cells]


def _kind_rows(world: str, parts: Sequence[Part]) -> list[list[object]]:
    """Success by kind of task, over all seeds; nothing for a world of one kind."""
    arms: dict[str, dict[str, list[Proportion]]] = {name: {} for name in ARMS}
    for name, found in arms.items():
        for whole in filter(None, (part.arm(name) for part in parts)):
            for kind, some in by_kind(whole).items():
                found.setdefault(kind, []).append(some)
    kinds = sorted({kind for found in arms.values() for kind in found})
    rows: list[list[object]] = []
    for kind in kinds if len(kinds) > 1 else ():
        cells = [_pooled(found.get(kind, ())) for found in arms.values()]
        tasks = max(len(cell.by_task) for cell in cells if cell is not None)
        rows.append([world, kind, tasks, *map(_success, cells)])
    return rows


def _pooled(found: Iterable[Proportion | None]) -> Proportion | None:
    """Of several seeds; each has tasks of its own, and where two drew the same one it counts twice."""
    there = [one.to_json() for one in found if one is not None]
    return study.pooled(there) if there else None


def _success(found: Proportion | None) -> str:
    return study.DASH if found is None else found.cell


def _estimate(found: Mapping[str, Any] | None) -> str:
    return study.estimate(found["value"], found.get("ci95")) if found else study.DASH


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _mean(values: Sequence[float], form: str = ".2f") -> str:
    return f"{sum(values) / len(values):{form}}" if values else study.DASH


if __name__ == "__main__":
    sys.exit(main())
