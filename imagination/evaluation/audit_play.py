"""The policies that an audit ranks, and how each is played: in the dream, from there in reality, and in reality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imagination.rollout.dream_env import NO_GUARD, DreamEnv, Guard, Start
from imagination.rollout.play import Episode, Provenance, plan, play_all, replay_all
from policy.agent import LanguageModelAgent
from real_envs.env import Env, Task
from real_envs.trajectory import Source, Trajectory
from worldmodel.evaluation.success import Triple
from worldmodel.world_model import WorldModel


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy that can play."""

    agent: LanguageModelAgent
    model: Any
    version: str


@dataclass(frozen=True, slots=True)
class RankedPolicy:
    """A policy to be ranked; ``load`` is called once and what it gives is dropped when it has played."""

    name: str
    load: Callable[[], LoadedPolicy]


@dataclass(frozen=True, slots=True)
class PolicyCandidate:
    """A folder with a policy and the temperature at which it plays."""

    name: str
    folder: Path
    temperature: float


def find_candidates(
    models: Path, temperature: float, wanted: int, temperatures: Sequence[float]
) -> list[PolicyCandidate]:
    """The policies of a run by age: those kept while cloning, the clone, those kept while training, the last one.

    Where these are fewer than ``wanted``, the last policy and the clone also play at other temperatures. Those differ
    less in quality than checkpoints do, so rank agreement says less about them; the audit notes how many there are.
    """
    kept = models / "kept"
    folders = [*sorted(kept.glob("clone-*")), models / "policy-clone", *sorted(kept.glob("train-*")), models / "policy"]
    there = [folder for folder in folders if (folder / "config.json").exists()]
    found = [PolicyCandidate(folder.name, folder, temperature) for folder in there]
    return fill_up(found, [f for f in reversed(there) if f.parent == models], wanted, temperatures)


def fill_up(
    found: Sequence[PolicyCandidate], folders: Sequence[Path], wanted: int, temperatures: Sequence[float]
) -> list[PolicyCandidate]:
    """``found``, and before them the same ``folders`` at other temperatures until there are ``wanted`` in all."""
    own = {(c.folder, c.temperature) for c in found}
    others = [PolicyCandidate(f"{f.name}@{t:g}", f, t) for t in temperatures for f in folders if (f, t) not in own]
    return [*others[: max(0, wanted - len(found))], *found]


@dataclass(frozen=True, slots=True)
class PlaySetup:
    """Where policies play.

    Attributes:
        dream: the world model as it is dreamed in.
        guard: of guarded dreams; ``None`` plays none.
        starts: by task id, the real beginning of each task.
        tasks: real tasks, all of which have a start.
        make_env: makes a real environment.
        episodes: per task and kind.
        max_turns: of an episode.
        seed: of the run.
    """

    dream: WorldModel
    guard: Guard | None
    starts: Mapping[str, Start]
    tasks: Sequence[Task]
    make_env: Callable[[], Env]
    episodes: int
    max_turns: int
    seed: int


@dataclass(frozen=True, slots=True)
class PolicyEpisodes:
    """What one policy did: a ``Triple`` per task and seed, and the real episodes and dreams behind it."""

    triples: list[Triple]
    real: list[Trajectory]
    dreams: list[Trajectory]


async def play_three_ways(arena: PlaySetup, name: str, loaded: LoadedPolicy) -> PolicyEpisodes:
    """Plays one policy.

    The same task and seed give the policy the same chance in each world, so what differs is the world's doing.
    """
    dreaming = Provenance(Source.DREAM, loaded.version, arena.dream.version)

    async def dreams(kind: str, guard: Guard) -> list[Trajectory]:
        return await play_all(
            _plan(arena, f"{kind}/{name}"),
            lambda: DreamEnv(arena.dream, arena.starts, guard),
            loaded.agent,
            dreaming,
            arena.max_turns,
            concurrency=128,
        )

    dreamed = await dreams("dream", NO_GUARD)
    guarded: Sequence[Trajectory | None] = [None] * len(dreamed)
    if arena.guard is not None:
        guarded = await dreams("guarded", arena.guard)
    real = await play_all(
        _plan(arena, f"real/{name}"),
        arena.make_env,
        loaded.agent,
        Provenance(Source.REAL, loaded.version),
        arena.max_turns,
        concurrency=64,
    )
    replays = await _replay(arena, dreamed, name)
    return PolicyEpisodes(
        [_triple(name, *four) for four in zip(dreamed, replays, real, guarded, strict=True)], real, dreamed
    )


async def _replay(arena: PlaySetup, dreamed: Sequence[Trajectory], name: str) -> list[Trajectory | None]:
    """The dreamed actions in the real environment; nothing where the dream failed or did nothing."""
    beside = zip(_plan(arena, f"replay/{name}"), dreamed, strict=True)
    asked = {e.id: (e, dream) for e, dream in beside if dream.turns and not dream.stop.is_failure}
    dreams = {key: dream for key, (_, dream) in asked.items()}
    twins = await replay_all(dreams, [episode for episode, _ in asked.values()], arena.make_env)
    found = {dreams[twin.id].id: twin for twin in twins}
    return [found.get(dream.id) for dream in dreamed]


def _plan(arena: PlaySetup, prefix: str) -> list[Episode]:
    tasks = [replace(task, spec={**task.spec, "start": task.id}) for task in arena.tasks]
    return plan(tasks, arena.episodes, prefix, arena.seed)


def _triple(
    name: str, dream: Trajectory, replay: Trajectory | None, real: Trajectory, guarded: Trajectory | None
) -> Triple:
    return Triple(name, dream.task_id, dream.seed, _solved(dream), _solved(replay), _solved(real), _solved(guarded))


def _solved(episode: Trajectory | None) -> bool | None:
    return None if episode is None or episode.stop.is_outage else episode.solved
