"""The corpus of a base model: scripted agents of all skills in many worlds, in training tasks that are drawn anew.

Each environment has its own shards, files of a quarter of a byte a token, which processes generate by seed and number.
Only the training fold of a world is played, so that a base model has read no task by which anybody is judged.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from imagination.data.augmentation import with_renamed
from imagination.data.batches import truncate
from imagination.data.examples import imitation_row
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.runs.progress_bar import Bar
from imagination.settings import UserError
from imagination.settings.models import CorpusWorld, Option, PretrainSettings
from imagination.settings.schema import build
from policy.lm.backbone import load_tokenizer
from policy.lm.batch import Row
from policy.lm.render import ChatFormat
from real_envs.env import Agent, EnvFailure, TaskSet
from real_envs.files import write_atomically
from real_envs.scripted_agents import deal
from real_envs.seeding import derive_seed
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, Trajectory
from real_envs.world import UnknownWorld, find_world
from worldmodel.formats.full import FullObservation
from worldmodel.formats.memory import MemoryFormat, TaskMemory
from worldmodel.objective import world_model_row

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SEEDS = (1_000, 400_000)  # of draws of tasks: runs have smaller ones, and TextWorld can have no larger ones
_FAILURES = 10  # draws in a row that give no episode, after which a world gives none at all


@dataclass(slots=True)
class Played:
    """What was played of one world."""

    episodes: list[Trajectory] = field(default_factory=list)  # without those that the world broke
    real_steps: int = 0  # those of broken episodes included
    broken: int = 0  # episodes
    left_out: int = 0  # episodes that begin as a task that is left out
    fruitless: int = 0  # draws of the options that gave no episode


def drawn(options: Mapping[str, Option], rng: random.Random) -> dict[str, Any]:
    """Options with lists and ranges as one of their values: ``{"game": ["coin", "twc"], "rooms": "2..4"}`` may become
    ``{"game": "twc", "rooms": 3}``."""
    chosen: dict[str, Any] = {}
    for key, option in options.items():
        value = rng.choice(option) if isinstance(option, list) else option
        if isinstance(value, str):
            text = _RANGE.sub(lambda match: str(rng.randint(int(match[1]), int(match[2]))), value)
            value = int(text) if _RANGE.fullmatch(value) else text
        chosen[key] = value
    return chosen


def known_worlds(worlds: Mapping[str, CorpusWorld]) -> dict[str, CorpusWorld]:
    """The worlds that can be played here, at least one; the share of the others goes to these, with a line each on
    standard error."""
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
    for line in missing:
        print(line, file=sys.stderr, flush=True)
    return here


def held_out_starts(folders: Sequence[str]) -> frozenset[str]:
    """First observations of the held-out tasks of these runs, as their logs have them; each must have some."""
    starts: set[str] = set()
    for folder in folders:
        log = TrajectoryStore.open(Path(folder) / "log")
        trained = set(log.splits.get("train", ()))
        others = {start for task, start in log.starts() if task not in trained}
        if not others:
            raise UserError(f"pretrain.leave_out: {log.folder} has no episode of a held-out task")
        starts |= others
    return frozenset(starts)


def _play_world(world: CorpusWorld, characters: float, seed: int, left_out: Collection[str]) -> Played:
    rng = random.Random(derive_seed("corpus draws", seed))
    played = Played()
    length = in_a_row = 0
    while length < characters:
        episodes: list[Trajectory] = []
        why = "the world broke in each episode, or each begins as a task of pretrain.leave_out"
        try:
            episodes = _play_tasks(world, drawn(world.options, rng), rng.randrange(*_SEEDS))
        except (ValueError, EnvFailure) as error:  # such a draw of the options may not have so many different tasks
            why = str(error)
        whole = [t for t in episodes if t.turns and not t.stop.is_failure]
        played.real_steps += sum(len(t.turns) for t in episodes)
        played.broken += len(episodes) - len(whole)
        kept = [t for t in whole if t.start not in left_out]
        played.left_out += len(whole) - len(kept)
        played.fruitless += not kept
        in_a_row = 0 if kept else in_a_row + 1
        if in_a_row == _FAILURES:
            raise UserError(f"pretrain.worlds: env={world.env} gave no episode in {_FAILURES} draws: {why}")
        before = len(played.episodes)
        played.episodes += [replace(t, id=f"{before + k}/{t.id}") for k, t in enumerate(kept)]
        length += sum(_length(t) for t in kept)
    return played


def _play_tasks(world: CorpusWorld, options: Mapping[str, Any], seed: int) -> list[Trajectory]:
    """A few training tasks with the same options, each played by a few agents. Raises ``ValueError``: there are not so
    many different tasks.
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
COUNTED = ("episodes", "tokens", "real_steps", "broken", "left_out", "fruitless")  # the latter four: see Played


@dataclass(frozen=True, slots=True)
class CorpusShard:
    """Rows of one environment as arrays of all their tokens, one row after the other.

    ``counts`` says what was played for it, by ``COUNTED``.
    """

    ids: np.ndarray  # [tokens]
    trained: np.ndarray  # [tokens], whether the model learns to say it
    lengths: np.ndarray  # [rows]
    counts: dict[str, int]

    @staticmethod
    def of(rows: Sequence[Row], counts: dict[str, int]) -> CorpusShard:
        """``counts`` lacks the tokens."""
        ids = np.concatenate([row.ids.numpy().astype(np.int32) for row in rows] or [np.empty(0, np.int32)])
        trained = np.concatenate([row.ce_weight.numpy() != 0 for row in rows] or [np.empty(0, bool)])
        return CorpusShard(ids, trained, np.array([len(row) for row in rows]), counts | {"tokens": len(ids)})

    def rows(self) -> list[Row]:
        """Views of the arrays."""
        lengths = self.lengths.tolist()
        ids = torch.from_numpy(self.ids).split(lengths)
        weights = torch.from_numpy(self.trained.astype(np.float32)).split(lengths)
        return [Row(i, (), Source.REAL, ce_weight=w) for i, w in zip(ids, weights, strict=True)]

    def save(self, path: Path) -> None:
        buffer = io.BytesIO()
        counts = np.array([self.counts[what] for what in COUNTED])
        np.savez_compressed(buffer, ids=self.ids, trained=self.trained, lengths=self.lengths, counts=counts)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())

    @staticmethod
    def load(path: Path) -> CorpusShard:
        """The shard of a file; ``UserError`` where that is torn."""
        try:
            with np.load(path) as file:
                counts = dict(zip(COUNTED, file["counts"].tolist(), strict=True))
                return CorpusShard(file["ids"], file["trained"], file["lengths"], counts)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{path}: not a shard of a corpus, or torn; delete it, and it is made anew") from error


@dataclass(frozen=True, slots=True)
class Corpus:
    """How a corpus is made; ``folder`` gets ``<world>/00000.npz`` and so on, and lies beside the tokenizer.

    Attributes:
        left_out: first observations of tasks of which no episode is read.
    """

    settings: PretrainSettings
    worlds: Mapping[str, CorpusWorld]
    folder: Path
    seed: int
    left_out: Collection[str] = ()

    def play(self, name: str, number: int) -> Played:
        """What is played for a shard of ``worlds[name]``: its share of about ``settings.shard_characters``.

        Raises:
            UserError: the world has options that it cannot have.
        """
        world, renamed = self.worlds[name], self.settings.renamed_share
        seed = derive_seed(f"corpus/{name}", self.seed, number)
        share = world.share / sum(other.share for other in self.worlds.values())
        played = _play_world(world, self.settings.shard_characters * share, seed, self.left_out)
        if renamed:
            rng = random.Random(derive_seed("corpus renamed", seed))
            copies = with_renamed(played.episodes, 1, seed)[len(played.episodes) :]
            pairs = zip(played.episodes, copies, strict=True)
            played.episodes = [copy if rng.random() < renamed else episode for episode, copy in pairs]
        return played

    def make_shard(self, name: str, number: int) -> None:
        """Writes a shard: each episode in the world model's view, those to imitate also in the policy's."""
        chat, played = ChatFormat(load_tokenizer(self.folder.parent / "tokenizer")), self.play(name, number)
        rows = [
            truncate(row, self.settings.model.context)
            for episode in played.episodes
            for row in _both_views(chat, episode, self.worlds[name], self.settings.agents)
        ]
        counts = {"episodes": len(played.episodes)} | {what: getattr(played, what) for what in COUNTED[2:]}
        CorpusShard.of([row for row in rows if row.ce_weight.any()], counts).save(self._file(name, number))

    def make(self, makers: Executor) -> None:
        """Makes the shards that are not there yet, ``settings.shards`` a world."""
        wanted = [(name, number) for number in range(self.settings.shards) for name in self.worlds]
        missing = [shard for shard in wanted if not self._file(*shard).exists()]
        bar = Bar("corpus", len(wanted), "shards")
        bar.start(len(wanted) - len(missing))
        futures = [makers.submit(self.make_shard, *shard) for shard in missing]
        try:
            for future in as_completed(futures):
                future.result()
                bar.count()
                bar.step()
        finally:
            for future in futures:
                future.cancel()
            bar.stop()

    def declare(self, vocab_size: int) -> None:
        """Writes down in ``corpus.json`` by which settings its tokenizer and its shards are made. Raises ``UserError``:
        what is there was made by others.
        """
        made_by = {
            "seed": self.seed,
            "vocab_size": vocab_size,
            "shard_characters": self.settings.shard_characters,
            "agents": self.settings.agents,
            "renamed_share": self.settings.renamed_share,
            "leave_out": self.settings.leave_out,
            "context": self.settings.model.context,
            "worlds": {name: asdict(world) for name, world in self.worlds.items()},
        }
        note = self.folder / "corpus.json"
        before = json.loads(note.read_text()) if note.exists() else made_by
        if differing := [key for key in made_by if before.get(key) != made_by[key]]:
            raise UserError(
                f"{self.folder} was generated by other settings ({', '.join(differing)}); take another run="
            )
        write_atomically(note, json.dumps(made_by, indent=1))

    def _file(self, name: str, number: int) -> Path:
        return self.folder / name / f"{number:05d}.npz"


def declared(folder: Path) -> dict[str, Any]:
    """What ``Corpus.declare`` wrote. Raises ``UserError``: it is not there, or torn."""
    note = folder / "corpus.json"
    try:
        made_by: dict[str, Any] = json.loads(note.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{note}: missing or torn; it lies beside the shards that `imagine pretrain` made") from error
    return made_by


def load_corpus(folder: Path, worlds: Mapping[str, CorpusWorld]) -> tuple[list[Row], Counts]:
    """All rows of these environments, and what was counted of each, of those with shards. Raises ``UserError``: there
    is no shard, or one is torn.
    """
    rows: list[Row] = []
    counts: Counts = {what: {} for what in COUNTED}
    for name in worlds:
        shards = [CorpusShard.load(path) for path in sorted((folder / name).glob("*.npz"))]
        rows += [row for shard in shards for row in shard.rows()]
        for what in COUNTED if shards else ():
            counts[what][name] = sum(shard.counts[what] for shard in shards)
    if not rows:
        raise UserError(f"{folder} has no shard of {', '.join(worlds)}; `imagine pretrain` generates them")
    return rows, counts


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
