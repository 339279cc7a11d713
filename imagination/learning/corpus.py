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
from dataclasses import replace
from pathlib import Path
from typing import Any

from imagination.dreaming.rollout import Episode, Provenance, play_all
from imagination.learning.renaming import with_renamed
from imagination.settings import UserError
from imagination.settings.pretraining import CorpusWorld, Option
from imagination.settings.schema import build
from real_envs.behaviours import Agent, deal
from real_envs.env import EnvFailure, TaskSet
from real_envs.registry import UnknownWorld, find_world
from real_envs.streams import stream_seed
from real_envs.trajectory import Source, Trajectory

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SEEDS = (1_000, 400_000)  # of draws of tasks: runs have smaller ones, and TextWorld can have no larger ones
_FAILURES = 3  # draws in a row that give no episode, after which a world gives none at all


def drawn(options: Mapping[str, Option], rng: random.Random) -> dict[str, Any]:
    """Options with lists and ranges as one of their values, such as ``env.options`` takes.

    Example::

        drawn({"game": ["coin", "twc"], "rooms": "2..4"}, rng)  # {"game": "twc", "rooms": 3}
    """
    found: dict[str, Any] = {}
    for key, option in options.items():
        value = rng.choice(option) if isinstance(option, list) else option
        if isinstance(value, str):
            text = _RANGE.sub(lambda match: str(rng.randint(int(match[1]), int(match[2]))), value)
            value = int(text) if _RANGE.fullmatch(value) else text
        found[key] = value
    return found


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
) -> dict[str, list[Trajectory]]:
    """The episodes of a shard by the name of their world, with about ``characters`` of text in all.

    Raises:
        UserError: a world has options that it cannot have.
    """
    total = sum(world.share for world in worlds.values())
    shard = {}
    for name, world in worlds.items():
        mine = stream_seed(f"corpus/{name}", seed, number)
        episodes = _play_world(world, characters * world.share / total, mine)
        rng = random.Random(stream_seed("corpus renamed", mine))
        copies = with_renamed(episodes, 1, mine)[len(episodes) :] if renamed_share else episodes
        shard[name] = [
            other if rng.random() < renamed_share else told for told, other in zip(episodes, copies, strict=True)
        ]
    return shard


def _play_world(world: CorpusWorld, characters: float, seed: int) -> list[Trajectory]:
    rng = random.Random(stream_seed("corpus draws", seed))
    episodes: list[Trajectory] = []
    failures: list[str] = []
    length = 0
    while length < characters:
        played: list[Trajectory] = []
        why = "the world broke in each episode"
        try:
            played = _play_tasks(world, drawn(world.options, rng), rng.randrange(*_SEEDS))
        except (ValueError, EnvFailure) as error:  # such a draw of the options may not have so many different tasks
            why = str(error)
        failures = [] if played else [*failures, why]
        if len(failures) == _FAILURES:
            raise UserError(f"pretrain.worlds: env={world.env} gave no episode in {_FAILURES} draws: {failures[-1]}")
        episodes += [replace(t, id=f"{len(episodes) + k}/{t.id}") for k, t in enumerate(played)]
        length += sum(_length(t) for t in played)
    return episodes


def _play_tasks(world: CorpusWorld, options: Mapping[str, Any], seed: int) -> list[Trajectory]:
    """A few training tasks with the same options, each played by a few agents; those that the world broke are not told.

    Raises:
        ValueError: there are not so many different tasks.
    """
    found = find_world(world.env)
    settings = build(found.settings, dict(options), "pretrain.worlds.options")
    with tempfile.TemporaryDirectory(prefix="corpus-") as place:
        found.generate(Path(place), {"train": world.tasks}, seed, settings, lambda done, total: None, 1)
        tasks = found.open(Path(place), True, 1)
        played = asyncio.run(_play(world, tasks, found.behaviours([]), seed))
    return [t for t in played if t.turns and not t.stop.is_failure]


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
