"""What the rounds of the loop consist of: choosing tasks, playing them for real, refitting, and training in dreams."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from imagination.dreaming.dream_env import DreamEnv, Start
from imagination.dreaming.engines import Engines, make_agent
from imagination.dreaming.rollout import Episode, Provenance, plan
from imagination.dreaming.rollout_progress import play_with_bar
from imagination.dreaming.world_models import guard_of, load_world_model, member_folder
from imagination.learning.collector import NothingToLearn
from imagination.loop.acting import act
from imagination.loop.budget import Budget
from imagination.loop.choice import Evidence, choose, score
from imagination.loop.journal import Journal
from imagination.loop.promotion import no_worse
from imagination.loop.refit import refit, scores_of
from imagination.runs.fingerprint import fingerprint
from imagination.runs.log import read_log
from imagination.runs.models import load_model, weights_version
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import open_tasks
from imagination.settings import Config
from imagination.stages.collect import commands_of, open_store
from imagination.stages.train import train
from imagination.trust.evaluation import summarise
from imagination.trust.held_out import measure
from policy.agent import Agent, LanguageModelAgent
from real_envs.behaviours import deal
from real_envs.env import TaskSet
from real_envs.registry import find_world
from real_envs.screens import FOLDER
from real_envs.streams import stream_seed
from real_envs.trajectory import Source, Trajectory

POLICY = "policy"  # the name of the agent in the loop's real episodes; others are scripted
NOTHING_NEW = "not fitted again: no new episode to fit to"


def round_of(episode: Trajectory) -> int | None:
    """The round in which the loop played an episode; ``None`` for others of the log."""
    parts = episode.id.split("/")
    return int(parts[1]) if parts[0] == "loop" else None


def _policy(config: Config, run: RunFolder, number: int) -> tuple[LanguageModelAgent, str, Engines]:
    model, chat = load_model(run.path / "loop" / "policies" / str(number), "clone", config.policy)
    engines = Engines(config.engine)
    agent = make_agent(engines, model, chat, config.policy, config.max_action_tokens, 1.0, POLICY)
    return agent, weights_version(model), engines


# choose


def choose_tasks(config: Config, run: RunFolder, number: int) -> tuple[list[str], list[float]]:
    """The tasks that a round plays for real, with their scores; a function of seed, round, models and log."""
    tasks = open_tasks(run, config.env, config.collect.workers)
    names = [task.id for task in tasks.tasks("train")]
    asyncio.run(tasks.close())
    loop, seed = config.loop, stream_seed("loop choice", config.seed, number)
    if loop.candidates and len(names) > loop.candidates:
        names = sorted(
            random.Random(stream_seed("loop candidates", config.seed, number)).sample(names, loop.candidates)
        )
    if loop.choice == "uniform":
        scores = dict.fromkeys(names, 1.0)
    else:
        scores = {name: score(e, loop.weights) for name, e in _evidence(config, run, number, names).items()}
    chosen = choose(scores, loop.tasks, loop.epsilon, seed)
    return chosen, [round(scores[name], 6) for name in chosen]


def _evidence(config: Config, run: RunFolder, number: int, names: Sequence[str]) -> dict[str, Evidence]:
    """What log and dreams say of each task; the policy of now dreams each a few times, which costs no real step."""
    train, held = read_log(run, config.collect.validation)
    starts = {t.task_id: Start(t.task_id, t.start) for t in reversed(train)}
    agent, version, engines = _policy(config, run, number)
    world = load_world_model(engines, run, config.worldmodel, config.dream, config.dream.temperature, train)
    guard = guard_of(run, config.worldmodel, config.dream)
    tasks = open_tasks(run, config.env, config.collect.workers)
    known = [replace(t, spec={"start": t.id}) for t in tasks.tasks("train") if t.id in starts and t.id in names]
    asyncio.run(tasks.close())
    dreams = asyncio.run(
        play_with_bar(
            "look where to act",
            plan(known, config.loop.looks, f"look/{number}", stream_seed("loop looks", config.seed, number)),
            lambda: DreamEnv(world, starts, guard),
            agent,
            Provenance(Source.DREAM, version, world.version),
            config.dream.max_turns,
            concurrency=128,
        )
    )
    logged = Counter(t.task_id for t in (*train, *held))
    real = [t for t in (*train, *held) if round_of(t) is not None and t.agent == POLICY]
    return {
        name: Evidence(
            logged=logged[name],
            dreamed=_solved(dreams, name),
            real=_solved(real, name),
            confidences=_numbers(dreams, name, "confidence"),
            disagreements=_numbers(dreams, name, "disagreement"),
            members=config.worldmodel.members,
        )
        for name in names
    }


def _solved(episodes: Sequence[Trajectory], task: str) -> tuple[int, int]:
    success = summarise(t for t in episodes if t.task_id == task).success
    return success.successes, success.n


def _numbers(dreams: Sequence[Trajectory], task: str, key: str) -> list[float]:
    return [float(u.info[key]) for t in dreams if t.task_id == task for u in t.own_turns if key in u.info]


# act


async def play_round(
    config: Config, run: RunFolder, number: int, chosen: Sequence[str], budget: Budget, before: tuple[int, float]
) -> Journal:
    """Plays the real episodes of a round and puts them into the log; those of a killed process are not played again.

    Args:
        chosen: tasks; none are chosen in round 0, which scripted agents play as ``collect`` would.
        before: steps charged and seconds spent by earlier rounds.
    """
    scripted = number == 0
    tasks = open_tasks(run, config.env, config.collect.workers, scripted)
    try:
        store = open_store(run, config.env.name, tasks)
        journal = Journal(run.path / "loop" / f"round-{number:03d}.jsonl")
        if scripted:
            episodes, agents = await _scripted(config, tasks)
            version = None
        else:
            agent, version, _ = _policy(config, run, number)
            episodes = _chosen(config, tasks, number, chosen)
            agents = {episode.id: agent for episode in episodes}

        def stamp(episode: Episode) -> Provenance:
            expert = agents[episode.id].name == "expert"
            return Provenance(Source.EXPERT if expert else Source.REAL, version)

        await act(
            f"act, round {number}",
            journal,
            episodes,
            tasks,
            lambda episode: agents[episode.id],
            stamp,
            budget,
            before,
            config.collect.max_turns,
            config.collect.workers,
        )
    finally:
        await tasks.close()
    if journal.charged:
        known = store.ids()
        with store.writer(pictures=run.games / FOLDER) as writer:
            for episode in journal.episodes():
                if episode.id not in known:
                    writer.add(episode)
    return journal


def _chosen(config: Config, tasks: TaskSet, number: int, chosen: Sequence[str]) -> list[Episode]:
    known = {task.id: task for task in tasks.tasks("train")}
    groups = [(n, task, k) for n, task in enumerate(chosen) for k in range(config.loop.group_size)]
    return [
        Episode(
            f"loop/{number}/{task}/{n}-{k}",
            known[task],
            f"loop/{number}/{task}/{n}",
            stream_seed("loop episode", config.seed, number, n, k),
        )
        for n, task, k in groups
    ]


async def _scripted(config: Config, tasks: TaskSet) -> tuple[list[Episode], dict[str, Agent]]:
    """The first episodes of a run without a log: agents dealt as ``collect`` deals them, tasks in turn."""
    world, played = find_world(config.env.name), tasks.tasks("train")
    commands = await commands_of(tasks) if getattr(world, "elsewhere", True) else []
    dealt = deal(world.behaviours(commands), config.loop.first_episodes, stream_seed("agents/loop", config.seed))
    episodes = [
        Episode(
            f"loop/0/{task.id}/{n}",
            task,
            f"{task.id}/{agent.name}",
            stream_seed("loop episode", config.seed, 0, n),
        )
        for n, agent in enumerate(dealt)
        for task in [played[n % len(played)]]
    ]
    return episodes, dict(zip((episode.id for episode in episodes), dealt, strict=True))


# refit


def refit_round(config: Config, run: RunFolder, number: int, versions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fits a new version into ``loop/candidate`` and judges it; what ``summary.json`` says of it."""
    train, held = read_log(run, config.collect.validation)
    last = max(v["round"] for v in versions if v["promoted"])

    def is_new(episode: Trajectory) -> bool:
        played = round_of(episode)
        return played is not None and played > last

    new = {t.id for t in train if is_new(t)}
    told: dict[str, Any] = {
        "version": versions[-1]["version"] + 1,
        "round": number,
        "episodes": len(train),
        "new_episodes": len(new),
        "turns": sum(len(t.turns) for t in train),
    }
    if not any(round_of(t) == number for t in train):
        return {**told, "promoted": False, "why": NOTHING_NEW}
    candidates, settings = run.path / "loop" / "candidate", config.worldmodel
    refit(run, config.logger, settings, config.fit, config.loop, train, new, number, config.seed, candidates)
    kinds = {"old": [t for t in held if not is_new(t)], "new": [t for t in held if is_new(t)]}
    members, limit = range(settings.members), config.fit.micro_tokens
    before = scores_of([member_folder(run, m) for m in members], settings, train, kinds, limit)
    after = scores_of([candidates / str(m) for m in members], settings, train, kinds, limit)
    promoted = no_worse(before, after, config.loop.tolerance)
    why = "no worse on held-back episodes" if promoted else "not promoted: worse on held-back episodes"
    if not held:
        why = "not promoted: no episode is held back (collect.validation)"
    weights = [weights_version(load_model(candidates / str(m), "loop", settings)[0]) for m in members]
    return {
        **told,
        "held": {kind: len(episodes) for kind, episodes in kinds.items()},
        "weights": "+".join(weights),
        "before": before,
        "after": after,
        "promoted": promoted,
        "why": why,
    }


# improve


def train_round(config: Config, run: RunFolder, number: int, policy: Path, improved: Path) -> dict[str, Any]:
    """Trains ``policy`` in dreams of the run's world model, in a run folder of its own, and moves it to ``improved``.

    Returns:
        ``dreamed_success`` of its last update, ``dreamed_turns``, and ``stopped_by``, the tripwire that stopped it;
        ``real_success`` of the real episodes of the round, as ``Proportion.to_json``, or ``None``.
    """
    there = run.path / "loop" / f"round-{number:03d}"
    mine = deepcopy(config)
    mine.seed = stream_seed("loop", config.seed, number) % 2**31  # other starts each round; torch takes 32 bits
    mine.train.updates = config.loop.updates
    nested = RunFolder(there, mine.seed)
    train_log, held = read_log(run, config.collect.validation)
    if not improved.exists():
        for member in range(config.worldmodel.members):
            _link(nested.model(member_folder(run, member).name), member_folder(run, member))
        _link(nested.log, run.log)
        _link(nested.model("policy-clone"), policy)
        best = max([run.summary.get("best_return", 1.0), *(t.total_reward for t in train_log)])
        nested.update({"world_model_form": run.summary.get("world_model_form", "text"), "best_return": best})
        run.update({"best_return": best})
        if number and _calibrated(config):  # of version 0, the fit itself has measured it
            measure(run, config.worldmodel, config.dream, config.engine, train_log, held)
        try:
            if nested.summary.get("done", {}).get("train") != fingerprint(mine, "train"):
                train(mine, there)
            nested.model("policy").rename(improved)
        except NothingToLearn as error:  # of a world model that has seen little: the next real episodes are its cure
            print(f"note: the policy stays as it is in round {number}: {error}", file=sys.stderr)
            copy_folder(policy, improved)
    for name in ("models", "checkpoints", "log"):  # links and what is kept elsewhere; metrics and rollouts stay
        path = there / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    lines = [line for line in nested.metrics("train") if "dream_success" in line]
    real = [t for t in (*train_log, *held) if round_of(t) == number and t.agent == POLICY]
    return {
        "dreamed_success": lines[-1]["dream_success"] if lines else None,
        "dreamed_turns": nested.summary.get("dreamed_turns", 0),
        "stopped_by": nested.summary.get("tripwires", {}).get("stopped_by"),
        "real_success": summarise(real).success.to_json() if real else None,
    }


def _calibrated(config: Config) -> bool:
    """Whether dreams need the calibration of this very version."""
    dream = config.dream
    return dream.min_probability > 0 or dream.on_doubt == "downweight" or config.train.process.endswith("probability")


def copy_folder(source: Path, target: Path) -> None:
    """A copy that is whole; cut off, it can be made again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def _link(link: Path, target: Path) -> None:
    """A relative link, so that a run can be moved."""
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
