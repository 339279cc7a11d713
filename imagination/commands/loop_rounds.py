"""What a round of the loop does in the real world: choosing tasks, and playing them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from imagination.commands.collect import commands_of, open_store
from imagination.loop.acting import Budget, Limits, act
from imagination.loop.choice import Evidence, choose, score
from imagination.loop.journal import Journal
from imagination.loop.origin import first_looks, of_new_tasks, roots, take_over
from imagination.rollout.dream_env import DreamEnv, starts_from_log
from imagination.rollout.play import Episode, Provenance, plan, play_with_bar
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from policy.agent import LanguageModelAgent
from real_envs.env import Agent, Task, TaskSet
from real_envs.screens import FOLDER
from real_envs.scripted_agents import deal
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory
from real_envs.world import find_world
from worldmodel.evaluation.proportions import summarise

POLICY = "policy"  # the name of the agent in the loop's real episodes; others are scripted


def round_of(episode: Trajectory) -> int | None:
    """The round in which the loop played an episode; ``None`` for others of the log."""
    parts = episode.id.split("/")
    return int(parts[1]) if parts[0] == "loop" else None


def policy_folder(run: RunFolder, number: int) -> Path:
    """The policy that acts in a round and is improved in it."""
    return run.path / "loop" / "policies" / str(number)


def journal_of(run: RunFolder, number: int) -> Path:
    return run.path / "loop" / f"round-{number:03d}.jsonl"


def _agent(session: Session, number: int) -> tuple[LanguageModelAgent, str]:
    policy = session.policy(policy_folder(session.run, number))
    return session.agent(policy, name=POLICY), policy.version


def own_episodes(log: Sequence[Trajectory], number: int) -> list[Trajectory]:
    """What the policy has played for real in a round."""
    return [t for t in log if round_of(t) == number and t.agent == POLICY]


# begin


def begin(config: Config, run: RunFolder) -> None:
    """Takes over another run's models and log, looks at each task of this one, and makes an empty log for it."""

    async def look() -> None:
        tasks = Session(config, run).tasks()
        try:
            await first_looks(run, tasks)
            open_store(run, config.env.name, tasks)
        finally:
            await tasks.close()

    take_over(run, config.loop.origin, config.loop.policy, config.env.name, Path(config.output))
    asyncio.run(look())


# choose


def choose_tasks(config: Config, run: RunFolder, number: int) -> tuple[list[str], list[float]]:
    """The tasks that a round plays for real, with their scores; a function of seed, round, models and log."""
    tasks = Session(config, run).tasks()
    known = {task.id: task for task in tasks.tasks("train")}
    asyncio.run(tasks.close())
    names, loop, seed = list(known), config.loop, derive_seed("loop choice", config.seed, number)
    if loop.candidates and len(names) > loop.candidates:
        names = sorted(
            random.Random(derive_seed("loop candidates", config.seed, number)).sample(names, loop.candidates)
        )
    if loop.choice == "uniform":
        scores = dict.fromkeys(names, 1.0)
    else:
        found = _evidence(config, run, number, {name: known[name] for name in names})
        scores = {name: score(evidence, loop.weights) for name, evidence in found.items()}
    chosen = choose(scores, loop.tasks, loop.epsilon, seed)
    return chosen, [round(scores[name], 6) for name in chosen]


def _evidence(config: Config, run: RunFolder, number: int, tasks: Mapping[str, Task]) -> dict[str, Evidence]:
    """What log and dreams say of each task; the policy of now dreams each a few times, which costs no real step."""
    session = Session(config, run)
    train, held = session.log
    own = of_new_tasks([*train, *held])
    starts = roots(run) | starts_from_log(of_new_tasks(train), branch=False)
    first = {start.task_id: name for name, start in starts.items()}
    agent, version = _agent(session, number)
    world, guard = session.world_model(), session.guard()
    known = [replace(task, spec={"start": first[name]}) for name, task in tasks.items() if name in first]
    dreams = asyncio.run(
        play_with_bar(
            "look where to act",
            plan(known, config.loop.looks, f"look/{number}", derive_seed("loop looks", config.seed, number)),
            lambda: DreamEnv(world, starts, guard),
            agent,
            Provenance(Source.DREAM, version, world.version),
            config.dream.max_turns,
            concurrency=128,
        )
    )
    logged = Counter(t.task_id for t in own)
    real = [t for t in own if round_of(t) is not None and t.agent == POLICY]
    return {
        name: Evidence(
            logged=logged[name],
            dreamed=_solved(dreams, name),
            real=_solved(real, name),
            confidences=_numbers(dreams, name, "confidence"),
            disagreements=_numbers(dreams, name, "disagreement"),
            members=config.worldmodel.members,
        )
        for name in tasks
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
    session = Session(config, run)
    tasks = session.tasks(scripted)
    try:
        store = open_store(run, config.env.name, tasks)
        journal = Journal(journal_of(run, number))
        if scripted:
            episodes, agents = await _scripted(config, tasks)
            version = None
        else:
            agent, version = _agent(session, number)
            episodes = _chosen(config, tasks, number, chosen)
            agents = {episode.id: agent for episode in episodes}

        def player_of(episode: Episode) -> tuple[Agent, Provenance]:
            agent = agents[episode.id]
            return agent, Provenance(Source.EXPERT if agent.name == "expert" else Source.REAL, version)

        await act(
            f"act, round {number}",
            journal,
            episodes,
            tasks,
            player_of,
            Limits(budget, *before, config.collect.max_turns, config.collect.workers, config.loop.patience),
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
            derive_seed("loop episode", config.seed, number, n, k),
        )
        for n, task, k in groups
    ]


async def _scripted(config: Config, tasks: TaskSet) -> tuple[list[Episode], dict[str, Agent]]:
    """The first episodes of a run without a log: agents dealt as ``collect`` deals them, tasks in turn."""
    world, played = find_world(config.env.name), tasks.tasks("train")
    commands = await commands_of(world, tasks)
    dealt = deal(world.behaviours(commands), config.loop.first_episodes, derive_seed("agents/loop", config.seed))
    episodes = [
        Episode(
            f"loop/0/{task.id}/{n}",
            task,
            f"{task.id}/{agent.name}",
            derive_seed("loop episode", config.seed, 0, n),
        )
        for n, agent in enumerate(dealt)
        for task in [played[n % len(played)]]
    ]
    return episodes, dict(zip((episode.id for episode in episodes), dealt, strict=True))
