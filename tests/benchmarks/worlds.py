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

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from imagination.commands.audit import audited_before, run_audit
from imagination.commands.compare import compare
from imagination.commands.experiments.demo import run_stages
from imagination.commands.experiments.seed_runs import seed_config
from imagination.commands.report import report
from imagination.evaluation.world_model_eval import heldout_tasks, in_reach
from imagination.rollout.dream_env import DreamEnv, Start
from imagination.rollout.play import Episode, Provenance, plan, play_all, replay_all
from imagination.runs.lifecycle import open_run
from imagination.runs.log import read_log
from imagination.runs.memory import give_back_memory
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
from tests.benchmarks.arguments import going_on, options_and_settings, settings_of
from tests.benchmarks.worlds_table import MEASURED, read_part, table
from worldmodel.evaluation.proportions import summarise
from worldmodel.evaluation.transitions import judge, outcome_metrics, transition_metrics

WORLDS = ("textworld", "gymnasium", "scienceworld", "alfworld", "miniwob")
REAL_EPISODES = 24  # whose actions are done again for real, to see how fast that world is
SCRIPTED = {"random": "random", "expert": "expert"}  # column -> name of the scripted agent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/worlds"))
    parser.add_argument("--worlds", nargs="+", default=[name for name in WORLDS if _preset(name).exists()])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    options, settings = options_and_settings(parser, "all worlds or, such as alfworld:env.options.data=..., of one")
    failed: list[str] = []
    if unknown := [name for name in options.worlds if not _preset(name).exists()]:
        print(f"error: there is no preset={unknown[0]} (configs/preset/{unknown[0]}.yaml)", file=sys.stderr)
        return 2
    parts = [(world, seed) for seed in options.seeds for world in options.worlds]
    for world, seed in [] if options.table else parts:
        print(f"== {world}, seed {seed}", flush=True)
        with going_on(f"{world}, seed {seed}", failed):
            make_part(part_config(world, seed, settings), part_folder(options.out, world, seed))
        write_table(options.out, parts)
    print(write_table(options.out, parts))
    return int(bool(failed))


def _preset(world: str) -> Path:
    return config_folder() / "preset" / f"{world}.yaml"


def part_folder(out: Path, world: str, seed: int) -> Path:
    return out / world / f"seed-{seed}"


def part_config(world: str, seed: int, overrides: list[str]) -> Config:
    """The world's preset with the overrides of all worlds and its own; checkpoints are kept for the audit."""
    mine = settings_of(world, overrides, WORLDS)
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


def write_table(out: Path, parts: Iterable[tuple[str, int]]) -> str:
    """``table.md`` of these parts and of all others that are there; what it says."""
    there = {(path.parent.name, int(path.name.removeprefix("seed-"))) for path in out.glob("*/seed-*")}
    known = {name: place for place, name in enumerate(WORLDS)}
    wanted = sorted({*parts, *there}, key=lambda part: (known.get(part[0], len(known)), *part))
    found = table([read_part(world, seed, part_folder(out, world, seed)) for world, seed in wanted])
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "table.md", found)
    return found


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


if __name__ == "__main__":
    sys.exit(main())
