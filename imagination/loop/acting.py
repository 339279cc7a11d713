"""Real episodes of a round: played in waves that cannot exceed the budget, and written down step by step."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagination.evaluation.costs import spent_before
from imagination.loop.journal import Journal, JournalEnv
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.runs.log import open_store
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import commands_of
from imagination.scale.ray_envs import real_tasks
from imagination.session import Session
from real_envs.env import Agent, TaskSet
from real_envs.screens import FOLDER
from real_envs.scripted_agents import deal
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory
from real_envs.world import find_world

POLICY = "policy"  # the name of the agent in the loop's real episodes; others are scripted
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between two tries in a world that answers nothing
_TRIES = 3  # of an episode that breaks before its first answer while others are answered


def round_of(episode: Trajectory) -> int | None:
    """The round in which the loop played an episode; ``None`` for others of the log."""
    parts = episode.id.split("/")
    return int(parts[1]) if parts[0] == "loop" else None


def own_episodes(log: Iterable[Sequence[Trajectory]], number: int) -> list[Trajectory]:
    """What the policy has played for real in a round, of all parts of a log."""
    return [t for part in log for t in part if round_of(t) == number and t.agent == POLICY]


def policy_folder(run: RunFolder, number: int) -> Path:
    """The policy that acts in a round and is improved in it."""
    return run.path / "loop" / "policies" / str(number)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a loop: real steps, seconds inside real requests, and money; 0 is no limit, except of steps."""

    steps: int
    seconds: float = 0.0
    price: float = 0.0
    step_price: float = 0.0

    def left(self, charged: int, seconds: float = 0.0) -> int:
        """Real steps that may still be taken after ``charged`` of them.

        Example: ``Budget(steps=100, price=5.0, step_price=0.25).left(8)`` is 12: money is for 20 steps.
        """
        if self.seconds and seconds >= self.seconds:
            return 0
        most = self.steps
        if self.price and self.step_price:
            most = min(most, int(self.price / self.step_price + 1e-9))  # 0.3 / 0.1 is below 3
        return max(0, most - charged)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the real episodes of a round."""

    budget: Budget
    charged: int  # of the budget, by earlier rounds
    seconds: float  # spent by them
    max_turns: int
    workers: int  # episodes at a time
    patience: float = 0.0  # seconds to wait in all for a world that does not answer

    def left(self, charged: int = 0, seconds: float = 0.0) -> int:
        """Real steps that may still be taken after these of this round."""
        return self.budget.left(self.charged + charged, self.seconds + seconds)


def limits_of(session: Session) -> Limits:
    """What the settings say, and what the rounds so far have spent."""
    config, run, loop = session.config, session.run, session.config.loop
    return Limits(
        Budget(loop.budget, loop.seconds, loop.price, config.env.price),
        run.summary["loop"]["charged"],
        spent_before(run, "loop").seconds,
        config.collect.max_turns,
        config.scale.real_processes(config.collect.workers),
        loop.patience,
    )


async def act(
    what: str,
    journal: Journal,
    episodes: Sequence[Episode],
    tasks: TaskSet,
    player_of: Callable[[Episode], tuple[Agent, Provenance]],
    limits: Limits,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Plays what the journal has not yet, as far as the budget goes.

    An episode that breaks before the world's first answer is tried again. Where a whole wave breaks so, the world is
    taken to be away for a while: it is asked again after a second, two, four, at most each minute.
    """
    by_seed = {episode.seed: episode for episode in episodes}
    at_once = limits.workers if limits.budget.seconds else None  # time is looked at between waves
    tries = Counter[str]()
    waited, wait = 0.0, _FIRST_WAIT

    with Bar(what, len(episodes), "turns") as bar:

        def keep(trajectory: Trajectory) -> None:
            journal.end(trajectory)
            bar.advance(len(journal.played))

        while True:
            left = limits.left(journal.charged, journal.spent.seconds)
            waiting = [e.id for e in episodes if e.id not in journal.played and tries[e.id] < _TRIES]
            turns = wave(waiting, left, limits.max_turns, at_once)
            if not turns:
                return

            now, charged = [e for e in episodes if e.id in turns], journal.charged
            await play_all(
                now,
                lambda: JournalEnv(tasks.make_env(), journal, by_seed, player_of),
                lambda episode: player_of(episode)[0],
                lambda episode: player_of(episode)[1],
                lambda episode, turns=turns: turns[episode.id],  # type: ignore[misc]
                limits.workers,
                keep,
                bar.count,
            )
            if journal.charged > charged:
                tries.update(list(turns))  # of a mapping, it would add its values
                wait = _FIRST_WAIT
                continue
            if journal.played >= set(turns):  # none came to a step, and the world is not to blame
                continue
            if waited >= limits.patience:
                return
            wait = min(wait, limits.patience - waited)
            print(f"note: the real world does not answer; waiting {wait:g} s ({journal.failed[-1]})", file=sys.stderr)
            await sleep(wait)
            waited, wait = waited + wait, min(2 * wait, _LONGEST_WAIT)


def wave(waiting: Sequence[str], left: int, longest: int, most: int | None = None) -> dict[str, int]:
    """The next episodes with their turn limits, which are no more than what is left if all are used up.

    So whatever they come to, and in whatever order they end, the budget is not exceeded. What they leave is for the
    next wave.

    Example: ``wave(["a", "b", "c"], left=20, longest=12)`` is {"a": 12, "b": 8}.

    At most ``most`` episodes of at most ``longest`` turns.
    """
    limits: dict[str, int] = {}
    for name in waiting[:most]:
        if left <= 0:
            break
        limits[name] = min(longest, left)
        left -= limits[name]
    return limits


async def play_round(session: Session) -> Journal:
    """Plays the real episodes of a round and puts them into the log; those of a killed process are not played again.

    No tasks are chosen in round 0, which scripted agents play as ``collect`` would.
    """
    config, run = session.config, session.run
    number, chosen = (run.summary["loop"][key] for key in ("round", "chosen"))
    scripted = number == 0
    tasks = real_tasks(session, scripted)
    try:
        store = open_store(run, config.env.name, tasks)
        journal = Journal(run.path / "loop" / f"round-{number:03d}.jsonl")
        version: str | None = None
        if scripted:
            episodes, agents = await _scripted(session, tasks)
        else:
            policy = session.policy(policy_folder(run, number))
            agent, version = session.agent(policy, name=POLICY), policy.version
            by_id = {task.id: task for task in tasks.tasks("train")}
            episodes = [
                Episode(
                    f"loop/{number}/{task}/{n}-{k}",
                    by_id[task],
                    f"loop/{number}/{task}/{n}",
                    derive_seed("loop episode", config.seed, number, n, k),
                )
                for n, task in enumerate(chosen)
                for k in range(config.loop.group_size)
            ]
            agents = {episode.id: agent for episode in episodes}

        def player_of(episode: Episode) -> tuple[Agent, Provenance]:
            agent = agents[episode.id]
            return agent, Provenance(Source.EXPERT if agent.name == "expert" else Source.REAL, version)

        await act(f"act, round {number}", journal, episodes, tasks, player_of, limits_of(session))
    finally:
        await tasks.close()
    if journal.charged:
        logged = store.ids()
        with store.writer(pictures=run.games / FOLDER) as writer:
            for episode in journal.episodes():
                if episode.id not in logged:
                    writer.add(episode)
    return journal


async def _scripted(session: Session, tasks: TaskSet) -> tuple[list[Episode], dict[str, Agent]]:
    """The first episodes of a run without a log: agents dealt as ``collect`` deals them, tasks in turn."""
    config, played = session.config, tasks.tasks("train")
    world = find_world(config.env.name)
    behaviours = world.behaviours(await commands_of(world, tasks))
    agents, episodes = {}, []
    for n, agent in enumerate(deal(behaviours, config.loop.first_episodes, derive_seed("agents/loop", config.seed))):
        task, seed = played[n % len(played)], derive_seed("loop episode", config.seed, 0, n)
        episodes.append(Episode(f"loop/0/{task.id}/{n}", task, f"{task.id}/{agent.name}", seed))
        agents[episodes[-1].id] = agent
    return episodes, agents
