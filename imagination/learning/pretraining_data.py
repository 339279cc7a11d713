"""Batches of a corpus that is never stored: shard after shard, each played and put into tokens while others train."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagination.learning.copying import copying_rows
from imagination.learning.corpus import play_shard
from imagination.learning.experience import imitation_row
from imagination.learning.stream import epoch_of
from imagination.learning.supervise import cut
from imagination.settings import UserError
from imagination.settings.models import CorpusWorld, PretrainSettings
from policy.lm.backbone import load_tokenizer
from policy.lm.batch import Row, TokenBatch, collate
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import plain_tokens
from real_envs.files import write_atomically
from real_envs.streams import stream_seed
from real_envs.trajectory import Source, Trajectory
from worldmodel.formats.full import FullObservation
from worldmodel.formats.memory import MemoryFormat, TaskMemory
from worldmodel.objective import world_model_row

INDEX = "corpus.json"
_COUNTED = ("episodes", "tokens", "real_steps", "broken", "fruitless")


@dataclass(slots=True)
class Shard:
    """A part of the corpus as rows.

    Attributes:
        episodes, tokens: how many of them the rows have, by world.
        real_steps, broken, fruitless: see ``Played``, by world.
    """

    rows: list[Row] = field(default_factory=list)
    episodes: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    real_steps: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    fruitless: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        rows = [(list(r.ids), list(r.action_mask), r.source, list(r.ce_weight)) for r in self.rows]
        return json.dumps({"rows": rows, **{what: getattr(self, what) for what in _COUNTED}})

    @staticmethod
    def from_json(text: str) -> Shard:
        data = json.loads(text)
        rows = [Row(ids, mask, Source(source), ce_weight=weights) for ids, mask, source, weights in data.pop("rows")]
        return Shard(rows, **data)


def make_shard(
    settings: PretrainSettings, worlds: Mapping[str, CorpusWorld], tokenizer: Path, seed: int, number: int
) -> Shard:
    """The rows of a shard: each episode as the world model reads it, those to imitate also as the policy does, and
    random tokens to copy (``settings.copying_share``)."""
    chat = ChatFormat(load_tokenizer(tokenizer))
    shard = Shard()
    for name, played in play_shard(worlds, settings.shard_characters, settings.renamed_share, seed, number).items():
        rows = [row for episode in played.episodes for row in _both_views(chat, episode, worlds[name], settings.agents)]
        kept = [short for short in (cut(row, settings.model.context) for row in rows) if any(short.ce_weight)]
        shard.rows += kept
        shard.episodes[name], shard.tokens[name] = len(played.episodes), sum(len(row.ids) for row in kept)
        for what in ("real_steps", "broken", "fruitless"):
            getattr(shard, what)[name] = getattr(played, what)
    if settings.copying_share:
        tokens = max(1, int(settings.copying_share * sum(shard.tokens.values())))
        shard.rows += copying_rows(
            plain_tokens(chat.tokenizer), tokens, random.Random(stream_seed("corpus copying", seed, number))
        )
    return shard


def _both_views(chat: ChatFormat, episode: Trajectory, world: CorpusWorld, agents: Sequence[str]) -> list[Row]:
    form = FullObservation()
    known = world.facts and stream_seed("corpus facts", episode.seed) % 2
    weights = [float(turn.reward is not None) for turn in episode.turns]
    shown = MemoryFormat(TaskMemory([episode]), world.facts, form) if known else form
    rows = [world_model_row(chat, episode, weights, shown)]
    if episode.agent.startswith(tuple(agents)):
        rows.append(imitation_row(chat, episode))
    return rows


class CorpusBatches:
    """The batch of a step, in the order of the steps.

    A stopped run goes on in the shard where it was. The shards since its last training state are kept in files, because
    a world may play the same seeds in another way the next time.

    Args:
        make: a shard by its number, called in ``executor``, for ``settings.makers`` shards ahead.
        path: of ``corpus.json``, which notes the shards.
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
        self._noted: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self._futures: dict[int, Future[Shard]] = {}
        self._first, self._batches = 0, list[list[Row]]()

    def __call__(self, step: int) -> TokenBatch:
        """
        Raises:
            UserError: the shard of the step is not what it was when the run was stopped.
        """
        while not 0 <= step - self._first < len(self._batches):
            ends = (noted["first_step"] + noted["steps"] for noted in self._noted)
            self._open(next((number for number, end in enumerate(ends) if step < end), len(self._noted)))
        return collate(self._batches[step - self._first], self._pad)

    def _open(self, number: int) -> None:
        kept = _file(self._path, number)
        there = kept.exists()
        for later in range(number + there, number + self._settings.makers + 1):
            if later not in self._futures:
                self._futures[later] = self._executor.submit(self._make, later)
        shard = Shard.from_json(kept.read_text()) if there else self._futures.pop(number).result()
        before = self._noted[number - 1] if number else {"first_step": 0, "steps": 0}
        self._first = before["first_step"] + before["steps"]
        seeds = (stream_seed("corpus batches", self._seed, number, k) for k in range(self._settings.passes))
        orders = map(random.Random, seeds)
        size = self._settings.batch_tokens
        self._batches = [batch for order in orders for batch in epoch_of(shard.rows, size, order)]
        note = {"first_step": self._first, "steps": len(self._batches), **{k: getattr(shard, k) for k in _COUNTED}}
        if number == len(self._noted):
            write_atomically(kept, shard.to_json())
            self._noted.append(note)
            write_atomically(self._path, json.dumps(self._noted))
            for old, noted in enumerate(self._noted):
                if noted["first_step"] + noted["steps"] <= self._first - self._settings.save_every:
                    _file(self._path, old).unlink(missing_ok=True)
        elif self._noted[number] != note:
            raise UserError(
                f"{self._path}: shard {number} was {self._noted[number]} and now is {note}: the worlds have changed "
                "since this run was stopped; begin with another run="
            )


def _file(path: Path, number: int | str) -> Path:
    return path.with_name(f"{path.stem}-{number}.json")


def forget_shards(path: Path) -> None:
    """Deletes the files of shards beside ``path``; a run that then goes on makes them anew."""
    for kept in path.parent.glob(_file(path, "*").name):
        kept.unlink()


def count_read(path: Path, steps: float = math.inf) -> dict[str, dict[str, int]]:
    """What so many steps have read of the shards that ``path`` notes, by world; of the last one its share."""
    total: dict[str, dict[str, float]] = {what: {} for what in _COUNTED}
    for note in json.loads(path.read_text()) if path.exists() else []:  # time may end it before the first shard
        share = min(1.0, max(0.0, (steps - note["first_step"]) / note["steps"]))
        for what, counts in total.items():
            for name, count in note[what].items():
                counts[name] = counts.get(name, 0.0) + share * count
    return {what: {name: round(count) for name, count in counts.items()} for what, counts in total.items()}
