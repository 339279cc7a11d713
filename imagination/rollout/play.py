"""The only turn loop. One episode is one coroutine; batching hides in the engine, isolation in the environment."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from imagination.runs.log import RESET
from imagination.runs.progress_bar import Bar
from policy.lm.engine import ContextFull, EngineFailure
from real_envs.env import Actor, Agent, Env, EnvFailure, Task
from real_envs.errors import printable
from real_envs.seeding import derive_seed
from real_envs.trajectory import Observation, Source, StopReason, Trajectory, Turn
from worldmodel.evaluation.transitions import Judged, judge
from worldmodel.world_model import WorldModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Episode:
    """What to play: a task, under which names, from which seed."""

    id: str
    task: Task
    group_id: str
    seed: int


def plan(tasks: Sequence[Task], count: int, prefix: str, seed: int) -> list[Episode]:
    """``count`` episodes of each task, ``<prefix>/<task>/<k>``; their seeds depend on run, task and k alone."""
    return [
        Episode(f"{prefix}/{task.id}/{k}", task, f"{prefix}/{task.id}", derive_seed("plan", seed, n, k))
        for n, task in enumerate(tasks)
        for k in range(count)
    ]


def reset_only(task: Task) -> Episode:
    """A reset of a task that nobody plays: an episode without a turn."""
    return Episode(f"{task.id}{RESET}", task, f"{task.id}{RESET}", 0)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What is stamped on every trajectory of a rollout."""

    source: Source
    policy_version: str | None = None
    world_model_version: str | None = None
    # total reward from which an episode is solved, where it is another than that of all our worlds, 1
    solved_at: float | None = None


async def play(
    env: Env,
    agent: Agent,
    episode: Episode,
    provenance: Provenance,
    max_turns: int,
    on_turn: Callable[[], None] | None = None,
) -> Trajectory:
    """Plays one episode, real or dreamed.

    Faults of environment or engine do not raise: they become a typed trajectory (``stop``), which no loss reads unless
    an action provoked it. ``max_turns`` counts the turns of this episode, not those of a logged history before it, but
    those of a dream that it goes on from.
    """
    turns: list[Turn] = []
    observation = Observation("")
    actor: Actor | None = None
    stop, failure = StopReason.TURN_LIMIT, None
    try:
        observation = await env.reset(episode.task, episode.seed)
        actor = agent.start(observation, episode.seed)
        for _ in range(max_turns - len(episode.task.dreamed)):
            action = await actor.act()
            result = await env.step(action)
            if on_turn is not None:
                on_turn()
            if result.stop is StopReason.CONTEXT_LIMIT:
                stop = result.stop  # the world could not answer: there is no turn to record
                break
            turns.append(Turn(action, result.observation.text, result.reward, result.terminated, result.info))
            if result.terminated:
                stop = StopReason.TERMINATED
                break
            actor.observe(result.observation)  # also where we cut: a critic bootstraps from the state after it
            if result.truncated:
                stop = result.stop or StopReason.TURN_LIMIT
                break
    except ContextFull:
        stop = StopReason.CONTEXT_LIMIT
    except (EnvFailure, EngineFailure) as error:
        stop, failure = error.reason, str(error)
    trace = actor.trace() if actor is not None else None
    if actor is not None:
        actor.close()
    played = Trajectory(
        id=episode.id,
        task_id=episode.task.id,
        group_id=episode.group_id,
        source=provenance.source,
        agent=agent.name,
        seed=episode.seed,
        start=observation.text,
        turns=(*observation.history, *turns),
        stop=stop,
        prefix_turns=max(0, len(observation.history) - len(episode.task.dreamed)),
        policy_version=provenance.policy_version,
        world_model_version=provenance.world_model_version,
        trace=trace,
        failure=failure,
        world_facts=episode.task.world_facts,
    )
    if provenance.solved_at is None or stop.is_failure:
        return played
    return replace(played, success=played.earned(provenance.solved_at))


async def play_all(
    episodes: Sequence[Episode],
    make_env: Callable[[], Env],
    agent: Agent | Callable[[Episode], Agent],
    provenance: Provenance | Callable[[Episode], Provenance],
    max_turns: int | Callable[[Episode], int],
    concurrency: int = 64,
    on_done: Callable[[Trajectory], None] | None = None,
    on_turn: Callable[[], None] | None = None,
) -> list[Trajectory]:
    """Plays many episodes, at most ``concurrency`` at a time; the result keeps the order of ``episodes``.

    ``on_done`` is called after each episode, ``on_turn`` after each turn.
    """
    results: list[Trajectory | None] = [None] * len(episodes)
    queue: Iterable[tuple[int, Episode]] = iter(enumerate(episodes))

    async def worker() -> None:
        env = make_env()
        try:
            for index, episode in queue:
                player = agent(episode) if callable(agent) else agent
                stamp = provenance(episode) if callable(provenance) else provenance
                limit = max_turns(episode) if callable(max_turns) else max_turns
                results[index] = trajectory = await play(env, player, episode, stamp, limit, on_turn)
                if on_done is not None:
                    on_done(trajectory)
        finally:
            await env.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(episodes))):
            group.create_task(worker())
    return [trajectory for trajectory in results if trajectory is not None]


async def play_with_bar(
    what: str,
    episodes: Sequence[Episode],
    make_env: Callable[[], Env],
    agent: Agent | Callable[[Episode], Agent],
    stamp: Provenance,
    max_turns: int | Callable[[Episode], int],
    concurrency: int,
) -> list[Trajectory]:
    """``play_all`` with a progress bar and ``note_broken`` on standard error."""
    with Bar(what, len(episodes), "turns") as bar:
        played = await play_all(episodes, make_env, agent, stamp, max_turns, concurrency, bar.step, bar.count)
    note_broken(played)
    return played


def note_broken(played: Sequence[Trajectory], advice: str = "") -> None:
    """Says on standard error how many real episodes broke, and of what most of them did."""
    broken = Counter(
        t.failure.strip().splitlines()[-1].partition(": (")[0]  # a traceback's end, without the action
        for t in played
        if t.failure and t.source is not Source.DREAM
    )
    if broken:
        why, times = broken.most_common(1)[0]
        note = f"note: {broken.total()} of {len(played)} episodes broke, {times} of them so: {why}{advice}"
        print(printable(note), file=sys.stderr)


async def judge_with_bar(
    what: str, model: WorldModel, episodes: Sequence[Trajectory], failed: list[tuple[str, int]] | None = None
) -> list[Judged]:
    """``judge`` with a progress bar on standard error: a large model takes minutes."""
    with Bar(what, len(episodes), "turns") as bar:

        def count(episode: Trajectory) -> None:
            bar.count(len(episode.turns))
            bar.step()

        return await judge(model, episodes, failed=failed, on_episode=count)


@dataclass(frozen=True, slots=True)
class Replay:
    """An ``Agent`` that plays ``actions`` and must not be asked for more: limit its turns to their number."""

    actions: tuple[str, ...]
    name: str = "replay"

    def start(self, observation: Observation, seed: int) -> ReplayActor:
        return ReplayActor(list(self.actions))


@dataclass(slots=True)
class ReplayActor:
    """One episode of a ``Replay``."""

    actions: list[str]

    async def act(self) -> str:
        return self.actions.pop(0)

    def observe(self, observation: Observation) -> None:
        pass

    def trace(self) -> None:
        return None

    def close(self) -> None:
        pass


async def replay_all(
    dreams: Mapping[str, Trajectory], episodes: Sequence[Episode], make_env: Callable[[], Env], concurrency: int = 64
) -> list[Trajectory]:
    """Does in the real world what dreams did, turn for turn, in the order of ``episodes``.

    ``dreams`` are by the id of the episode that repeats it; each has at least one turn.
    """
    return await play_all(
        episodes,
        make_env,
        lambda e: Replay(tuple(turn.action for turn in dreams[e.id].turns)),
        Provenance(Source.REAL),
        lambda e: len(dreams[e.id].turns),
        concurrency,
    )


# --- how long it took ---


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of one clock.

    Example: ``Span(0.0, 3.0).both(Span(1.0, 5.0))`` is 2.0.
    """

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def both(self, other: Span) -> float:
        """For how long both ran."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


async def timed(work: Awaitable[T]) -> tuple[T, Span]:
    """The result of the work, and from when to when it ran."""
    begin = time.perf_counter()
    result = await work
    return result, Span(begin, time.perf_counter())
