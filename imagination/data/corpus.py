"""The corpus of a base model: scripted agents of all skills in many worlds, in training tasks that are drawn anew.

It is endless: shard after shard is played and put into tokens while others train. Only the training fold of a world is
played, so that a base model has read no task by which anybody is judged.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from imagination.data.augmentation import with_renamed
from imagination.data.batches import copying_rows, epoch_batches, truncate
from imagination.data.examples import imitation_row
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.settings import UserError
from imagination.settings.models import CorpusWorld, Option, PretrainSettings
from imagination.settings.schema import build
from policy.lm.backbone import load_tokenizer
from policy.lm.batch import Row, RowBatch, collate
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import plain_tokens
from real_envs.env import Agent, EnvFailure, TaskSet
from real_envs.files import write_atomically
from real_envs.scripted_agents import deal
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory
from real_envs.world import UnknownWorld, find_world
from worldmodel.formats.full import FullObservation
from worldmodel.formats.memory import MemoryFormat, TaskMemory
from worldmodel.objective import world_model_row

INDEX = "corpus.json"
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
    settings: PretrainSettings, worlds: Mapping[str, CorpusWorld], seed: int, number: int
) -> dict[str, Played]:
    """What is played for a shard, by the name of the world, with about ``settings.shard_characters`` in all.

    Raises:
        UserError: a world has options that it cannot have.
    """
    total = sum(world.share for world in worlds.values())
    shard = {}
    for name, world in worlds.items():
        world_seed = derive_seed(f"corpus/{name}", seed, number)
        played = shard[name] = _play_world(world, settings.shard_characters * world.share / total, world_seed)
        if settings.renamed_share:
            rng = random.Random(derive_seed("corpus renamed", world_seed))
            copies = with_renamed(played.episodes, 1, world_seed)[len(played.episodes) :]
            pairs = zip(played.episodes, copies, strict=True)
            played.episodes = [copy if rng.random() < settings.renamed_share else episode for episode, copy in pairs]
    return shard


def _play_world(world: CorpusWorld, characters: float, seed: int) -> Played:
    rng = random.Random(derive_seed("corpus draws", seed))
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
    dealt = deal(agents, world.episodes * len(chosen), derive_seed("corpus agents", seed))
    episodes = [
        Episode(f"{task.id}/{k}", task, task.id, derive_seed("corpus play", seed, number, k))
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


Counts = dict[str, dict[str, int]]  # what is counted -> world -> how many
_COUNTED = ("episodes", "tokens", "real_steps", "broken", "fruitless")  # the latter three: see Played


@dataclass(slots=True)
class Shard:
    """A part of the corpus as rows, with its counts."""

    rows: list[Row] = field(default_factory=list)
    counts: Counts = field(default_factory=lambda: {what: {} for what in _COUNTED})

    def to_json(self) -> str:
        rows = [(list(r.ids), list(r.action_mask), r.source, list(r.ce_weight)) for r in self.rows]
        return json.dumps({"rows": rows, **self.counts})

    @staticmethod
    def from_json(text: str) -> Shard:
        data = json.loads(text)
        rows = [Row(ids, mask, Source(source), ce_weight=weights) for ids, mask, source, weights in data.pop("rows")]
        return Shard(rows, data)


def make_shard(
    settings: PretrainSettings, worlds: Mapping[str, CorpusWorld], tokenizer: Path, seed: int, number: int
) -> Shard:
    """The rows of a shard: each episode in the world model's view, those to imitate also in the policy's, and copying
    rows (``settings.copying_share``)."""
    chat = ChatFormat(load_tokenizer(tokenizer))
    shard = Shard()
    for name, played in play_shard(settings, worlds, seed, number).items():
        rows = [row for episode in played.episodes for row in _both_views(chat, episode, worlds[name], settings.agents)]
        kept = [short for short in (truncate(row, settings.model.context) for row in rows) if any(short.ce_weight)]
        shard.rows += kept
        tokens = sum(len(row.ids) for row in kept)
        numbers = (len(played.episodes), tokens, played.real_steps, played.broken, played.fruitless)
        for what, count in zip(_COUNTED, numbers, strict=True):
            shard.counts[what][name] = count
    if settings.copying_share:
        tokens = max(1, int(settings.copying_share * sum(shard.counts["tokens"].values())))
        shard.rows += copying_rows(
            plain_tokens(chat.tokenizer), tokens, random.Random(derive_seed("corpus copying", seed, number))
        )
    return shard


def _both_views(chat: ChatFormat, episode: Trajectory, world: CorpusWorld, agents: Sequence[str]) -> list[Row]:
    form = FullObservation()
    weights = [float(turn.reward is not None) for turn in episode.turns]
    with_facts = world.facts and derive_seed("corpus facts", episode.seed) % 2
    rows = [
        world_model_row(
            chat, episode, weights, MemoryFormat(TaskMemory([episode]), world.facts, form) if with_facts else form
        )
    ]
    if episode.agent.startswith(tuple(agents)):
        rows.append(imitation_row(chat, episode))
    return rows


class CorpusBatches:
    """The batch of a step; steps are asked for in order.

    A stopped run goes on in the shard where it was. The shards since its last training state are kept in files, because
    a world may play the same seeds in another way the next time.

    Args:
        make: makes a shard by its number, in ``executor``, ``settings.makers`` shards ahead.
        path: ``corpus.json``, the index: steps and counts of each shard so far.
        seed: of the order of the batches.
    """

    def __init__(
        self,
        make: Callable[[int], Shard],
        executor: Executor,
        settings: PretrainSettings,
        path: Path,
        seed: int,
        pad: int,
    ) -> None:
        self._make, self._executor, self._settings, self._path = make, executor, settings, path
        self._seed, self._pad = seed, pad
        self._index: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self._futures: dict[int, Future[Shard]] = {}
        self._first, self._batches = 0, list[list[Row]]()  # of the open shard: its first step, and a batch for each

    def __call__(self, step: int) -> RowBatch:
        """
        Raises:
            UserError: the shard of the step is not what it was when the run was stopped.
        """
        while not 0 <= step - self._first < len(self._batches):
            self._open(next((k for k in range(len(self._index)) if step < self._end(k)), len(self._index)))
        return collate(self._batches[step - self._first], self._pad)

    def _end(self, number: int) -> int:
        """The first step after a shard of the index."""
        return int(self._index[number]["first_step"] + self._index[number]["steps"])

    def _open(self, number: int) -> None:
        file = _shard_file(self._path, number)
        on_disk = file.exists()
        for later in range(number + on_disk, number + self._settings.makers + 1):
            if later not in self._futures:
                self._futures[later] = self._executor.submit(self._make, later)
        shard = Shard.from_json(file.read_text()) if on_disk else self._futures.pop(number).result()
        self._first = self._end(number - 1) if number else 0
        seeds = (derive_seed("corpus batches", self._seed, number, k) for k in range(self._settings.passes))
        rngs = map(random.Random, seeds)
        size = self._settings.batch_tokens
        self._batches = [batch for rng in rngs for batch in epoch_batches(shard.rows, size, rng)]
        entry = {"first_step": self._first, "steps": len(self._batches), **shard.counts}
        if number == len(self._index):
            write_atomically(file, shard.to_json())
            self._index.append(entry)
            write_atomically(self._path, json.dumps(self._index))
            for old in range(len(self._index)):
                if self._end(old) <= self._first - self._settings.save_every:
                    _shard_file(self._path, old).unlink(missing_ok=True)
        elif self._index[number] != entry:
            raise UserError(
                f"{self._path}: shard {number} was {self._index[number]} and now is {entry}: the worlds have changed "
                "since this run was stopped; begin with another run="
            )


def _shard_file(path: Path, number: int | str) -> Path:
    return path.with_name(f"{path.stem}-{number}.json")


def delete_shards(path: Path) -> None:
    """Deletes the files of shards beside the index ``path``; a run that then goes on makes them anew."""
    for file in path.parent.glob(_shard_file(path, "*").name):
        file.unlink()


def count_read(path: Path, steps: float = math.inf) -> Counts:
    """What was read in so many steps of the shards in the index ``path``; of the last shard its share."""
    total: dict[str, dict[str, float]] = {what: {} for what in _COUNTED}
    for entry in json.loads(path.read_text()) if path.exists() else []:  # time may end it before the first shard
        share = min(1.0, max(0.0, (steps - entry["first_step"]) / entry["steps"]))
        for what, counts in total.items():
            for name, count in entry[what].items():
                counts[name] = counts.get(name, 0.0) + share * count
    return {what: {name: round(count) for name, count in counts.items()} for what, counts in total.items()}
