"""The corpus of a base model: scripted agents of all skills in many worlds, in training tasks that are drawn anew.

It is endless and never stored: a shard of it is a function of the settings, the seed and the shard's number. Only the
training fold of a world is played, so that a base model has read no task by which anybody is judged.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from imagination.learning.renaming import with_renamed
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.settings import UserError
from imagination.settings.models import CorpusWorld, Option
from imagination.settings.schema import build
from real_envs.behaviours import Agent, deal
from real_envs.env import EnvFailure, TaskSet
from real_envs.registry import UnknownWorld, find_world
from real_envs.streams import stream_seed
from real_envs.trajectory import Source, Trajectory

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SEEDS = (1_000, 400_000)  # of draws of tasks: runs have smaller ones, and TextWorld can have no larger ones
_FAILURES = 3  # draws in a row that give no episode, after which a world gives none at all


@dataclass(slots=True)
class Played:
    """What was played of one world.

    Attributes:
        episodes: without those that the world broke.
        real_steps: that were taken, those of broken episodes included.
        broken: how many episodes it broke.
        fruitless: draws of the options that gave no episode.
    """

    episodes: list[Trajectory] = field(default_factory=list)
    real_steps: int = 0
    broken: int = 0
    fruitless: int = 0


def drawn(options: Mapping[str, Option], rng: random.Random) -> dict[str, Any]:
    """Options with lists and ranges as one of their values, such as ``env.options`` takes.

    Example::

        drawn({"game": ["coin", "twc"], "rooms": "2..4"}, rng)  # {"game": "twc", "rooms": 3}
    """
    chosen: dict[str, Any] = {}
    for key, option in options.items():
        value = rng.choice(option) if isinstance(option, list) else option
        if isinstance(value, str):
            text = _RANGE.sub(lambda match: str(rng.randint(int(match[1]), int(match[2]))), value)
            value = int(text) if _RANGE.fullmatch(value) else text
        chosen[key] = value
    return chosen


def known_worlds(worlds: Mapping[str, CorpusWorld]) -> tuple[dict[str, CorpusWorld], list[str]]:
    """The worlds that can be played here, and a line for each of the others, whose share goes to these.

    Raises:
        UserError: there is none.
    """
    here: dict[str, CorpusWorld] = {}
    missing: list[str] = []
    for name, world in worlds.items():
        try:
            find_world(world.env)
        except UnknownWorld as error:
            missing.append(f"pretrain.worlds.{name} is left out: {error}")
        else:
            if world.share:
                here[name] = world
    if not here:
        raise UserError("; ".join(["no world of pretrain.worlds can be played", *missing]))
    return here, missing


def play_shard(
    worlds: Mapping[str, CorpusWorld], characters: int, renamed_share: float, seed: int, number: int
) -> dict[str, Played]:
    """What is played for a shard, by the name of the world, with about ``characters`` of text in all.

    Raises:
        UserError: a world has options that it cannot have.
    """
    total = sum(world.share for world in worlds.values())
    shard = {}
    for name, world in worlds.items():
        world_seed = stream_seed(f"corpus/{name}", seed, number)
        played = shard[name] = _play_world(world, characters * world.share / total, world_seed)
        if renamed_share:
            rng = random.Random(stream_seed("corpus renamed", world_seed))
            copies = with_renamed(played.episodes, 1, world_seed)[len(played.episodes) :]
            pairs = zip(played.episodes, copies, strict=True)
            played.episodes = [copy if rng.random() < renamed_share else episode for episode, copy in pairs]
    return shard


def _play_world(world: CorpusWorld, characters: float, seed: int) -> Played:
    rng = random.Random(stream_seed("corpus draws", seed))
    played = Played()
    length = in_a_row = 0
    while length < characters:
        episodes: list[Trajectory] = []
        why = "the world broke in each episode"
        try:
            episodes = _play_tasks(world, drawn(world.options, rng), rng.randrange(*_SEEDS))
        except (ValueError, EnvFailure) as error:  # such a draw of the options may not have so many different tasks
            why = str(error)
        kept = [t for t in episodes if t.turns and not t.stop.is_failure]
        played.real_steps += sum(len(t.turns) for t in episodes)
        played.broken += len(episodes) - len(kept)
        played.fruitless += not kept
        in_a_row = 0 if kept else in_a_row + 1
        if in_a_row == _FAILURES:
            raise UserError(f"pretrain.worlds: env={world.env} gave no episode in {_FAILURES} draws: {why}")
        before = len(played.episodes)
        played.episodes += [replace(t, id=f"{before + k}/{t.id}") for k, t in enumerate(kept)]
        length += sum(_length(t) for t in kept)
    return played


def _play_tasks(world: CorpusWorld, options: Mapping[str, Any], seed: int) -> list[Trajectory]:
    """A few training tasks with the same options, each played by a few agents.

    Raises:
        ValueError: there are not so many different tasks.
    """
    env = find_world(world.env)
    settings = build(env.settings, dict(options), "pretrain.worlds.options")
    with tempfile.TemporaryDirectory(prefix="corpus-") as place:
        env.generate(Path(place), {"train": world.tasks}, seed, settings, lambda done, total: None, 1)
        tasks = env.open(Path(place), True, 1)
        return asyncio.run(_play(world, tasks, env.behaviours([]), seed))


async def _play(
    world: CorpusWorld, tasks: TaskSet, agents: Sequence[tuple[Agent, float]], seed: int
) -> list[Trajectory]:
    chosen = tasks.tasks("train")
    dealt = deal(agents, world.episodes * len(chosen), stream_seed("corpus agents", seed))
    episodes = [
        Episode(f"{task.id}/{k}", task, task.id, stream_seed("corpus play", seed, number, k))
        for number, task in enumerate(chosen)
        for k in range(world.episodes)
    ]
    who = {episode.id: agent for episode, agent in zip(episodes, dealt, strict=True)}
    stamp = Provenance(Source.REAL)
    try:
        return await play_all(
            episodes, tasks.make_env, lambda episode: who[episode.id], stamp, world.max_turns, concurrency=1
        )
    finally:
        await tasks.close()


def _length(episode: Trajectory) -> int:
    return len(episode.start) + sum(len(turn.action) + len(turn.observation) for turn in episode.turns)
