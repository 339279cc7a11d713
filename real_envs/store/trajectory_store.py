"""Reads and appends to a store; the format is described in ``real_envs.store``."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from types import TracebackType

from real_envs.screens import FOLDER, copy_screens, screens_of
from real_envs.store.codec import SCHEMA, FieldError, decode, encode, nearest
from real_envs.store.shards import (
    DAMAGED,
    MANIFEST,
    Shard,
    StoreError,
    check_hash,
    check_size,
    dump,
    parse,
    read_rows,
    write,
    write_shard,
)
from real_envs.trajectory import StopReason, Trajectory


@dataclass(slots=True)
class Tally:
    """Counts over episodes. ``judged`` ones did not fail and have a success or a reward; only they can be solved."""

    episodes: int = 0
    turns: int = 0
    judged: int = 0
    solved: int = 0
    failures: dict[StopReason, int] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.turns += len(trajectory.turns)
        if trajectory.stop.is_failure:
            self.failures[trajectory.stop] = self.failures.get(trajectory.stop, 0) + 1
        elif trajectory.success is not None or any(turn.reward is not None for turn in trajectory.turns):
            self.judged += 1
            self.solved += trajectory.solved


@dataclass(slots=True)
class Summary:
    """All in all, by split (those without episodes, too), and by agent."""

    total: Tally
    by_split: dict[str, Tally]
    by_agent: dict[str, Tally]


_CHARACTERS = 1 << 24  # of a shard, so that long observations do not fill the memory


class Staging:
    """Episodes on their way into a store, in a folder of their own until ``TrajectoryStore.adopt`` takes them.

    What an earlier process left in the folder, which is ours alone, is removed.

    Args:
        shard_turns: turns of a shard, or fewer where these are long.
    """

    def __init__(self, folder: Path, shard_turns: int = 4096) -> None:
        self.folder, self.shards = folder, list[Shard]()
        self.tasks, self.ids = set[str](), set[str]()
        self._shard_turns = shard_turns
        self._pending: list[Trajectory] = []
        self._turns = self._characters = 0
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, trajectory: Trajectory) -> None:
        """Takes an episode that ``codec.decode`` made: it is not checked once more."""
        self._pending.append(trajectory)
        self.tasks.add(trajectory.task_id)
        self.ids.add(trajectory.id)
        self._turns += max(1, len(trajectory.turns))
        self._characters += len(trajectory.start) + sum(len(t.action) + len(t.observation) for t in trajectory.turns)
        if self._turns >= self._shard_turns or self._characters >= _CHARACTERS:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self.shards.append(write_shard(self.folder, f"shard-{len(self.shards):05d}.parquet", self._pending))
        self._pending, self._turns, self._characters = [], 0, 0

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


_LONGEST_WAIT = 60.0  # seconds that a finished episode is in memory alone


def is_validation(trajectory_id: str, share: float) -> bool:
    """Whether an episode is held out from its split: about ``share`` of all ids, always the same ones.

    The first 48 bits of the id's SHA-256, read as a fraction, lie below ``share``. A larger share only adds episodes.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must lie between 0 and 1, not {share}")
    digest = hashlib.sha256(trajectory_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 < share


class TrajectoryStore:
    """Episodes in a folder, from ``create`` or ``open``. Every fault is a ``StoreError`` and changes nothing on disk.

    Example::

        store = TrajectoryStore.create("logs/tw", splits={"train": ["tw-7"], "test": ["tw-9"]}, meta={"seed": 0})
        with store.writer(shard_turns=4096) as writer:  # Ctrl-C loses the running episode only
            writer.add(trajectory)
        train = [t for t in store.read("train") if not is_validation(t.id, 0.1)]
    """

    def __init__(self, folder: Path, manifest: bytes) -> None:
        self.folder = folder
        self._path = folder / MANIFEST
        self._on_disk = manifest  # to notice another writer
        self._manifest = parse(self._path, manifest)
        self._verified: set[str] = set()  # files whose hash was right; they are not hashed again
        self._ids: set[str] | None = None  # of all episodes, once somebody asked

    @property
    def splits(self) -> Mapping[str, tuple[str, ...]]:
        return self._manifest.splits

    @property
    def meta(self) -> Mapping[str, object]:
        return self._manifest.meta

    @classmethod
    def create(
        cls, folder: str | Path, splits: Mapping[str, Sequence[str]], meta: Mapping[str, object] | None = None
    ) -> TrajectoryStore:
        """In a new folder, or in one that holds no store yet."""
        folder = Path(folder)
        path = folder / MANIFEST
        try:
            content = dump(splits, meta or {})
            parse(path, content, "Nothing was created.")
        except StoreError:
            raise
        except (TypeError, ValueError) as error:
            raise StoreError.about(path, f"splits or meta cannot be JSON: {error}", "Use plain values.") from None
        store = cls(folder, content)
        if path.exists() or any(folder.glob("shard-*.parquet")):
            raise StoreError.about(folder, "there is a store already", "Open it, or create one in another folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError.about(folder, f"cannot be made: {error}", "Give another folder.") from error
        write(path, content)
        return store

    @classmethod
    def open(cls, folder: str | Path) -> TrajectoryStore:
        """A store that exists. Looks at the manifest and the sizes of the shards; ``read`` checks their content."""
        folder = Path(folder)
        path = folder / MANIFEST
        if not folder.is_dir():
            raise StoreError.about(folder, "no such folder", "Check the path, or collect episodes into it first.")
        try:
            store = cls(folder, path.read_bytes())
        except FileNotFoundError:
            advice = "Check the path; TrajectoryStore.create makes a new store."
            raise StoreError.about(path, "no such file, so its folder is no store", advice) from None
        except OSError as error:
            raise StoreError.about(path, f"cannot be read: {error}", "Check its rights.") from error
        for shard in store._manifest.shards:
            check_size(folder, shard)
        return store

    def tasks(self, split: str) -> tuple[str, ...]:
        if split not in self.splits:
            raise StoreError.about(self._path, f"unknown split '{split}'", nearest(split, self.splits))
        return self.splits[split]

    def ids(self) -> frozenset[str]:
        return frozenset(self._known_ids())

    def starts(self) -> Iterator[tuple[str, str]]:
        """Task and start of every episode; nothing else is read."""
        for shard in self._manifest.shards:
            for _, row in self._rows(shard, ["task_id", "start"], ()):
                yield str(row["task_id"]), str(row["start"])

    def add_tasks(self, splits: Mapping[str, Sequence[str]]) -> None:
        """Puts further tasks into splits, old or new. A task that is in a split already is an error."""
        merged = {split: list(tasks) for split, tasks in self.splits.items()}
        for split, tasks in splits.items():
            merged.setdefault(split, []).extend(tasks)
        self._check_unchanged()
        content = dump(merged, self.meta, self._manifest.shards)
        manifest = parse(self._path, content, "Nothing was changed.")
        write(self._path, content)
        self._manifest, self._on_disk = manifest, content

    def append(self, trajectories: Iterable[Trajectory]) -> None:
        """Adds one shard, all or nothing. An id that is there already or a task that is in no split is an error."""
        checked: dict[str, Trajectory] = {}
        for trajectory in trajectories:
            self._admit(trajectory, checked)
        self._append(list(checked.values()))

    def adopt(self, incoming: Staging) -> None:
        """Takes over the shards that were written apart, all or none, and removes their folder.

        An id that is there already or a task that is in no split is an error.
        """
        incoming.flush()
        self._check_unchanged()
        if strange := incoming.tasks - self._manifest.split_of.keys():
            reason = f"an episode's field 'task_id' is '{min(strange)}', which is in no split"
            raise StoreError.about(self.folder, reason, nearest(min(strange), self._manifest.split_of))
        if twice := incoming.ids & self._known_ids():
            raise StoreError.about(
                self.folder, f"episode '{min(twice)}' is there already", "Give each one an id of its own."
            )
        shards = [replace(shard, file=name) for shard, name in zip(incoming.shards, self._free_names(), strict=False)]
        try:
            for shard, moved in zip(incoming.shards, shards, strict=True):
                os.replace(incoming.folder / shard.file, self.folder / moved.file)
        except OSError as error:
            raise StoreError.about(self.folder, f"cannot take a shard: {error}", "Look at space and rights.") from error
        self._commit(shards, incoming.ids)
        incoming.discard()

    def writer(self, shard_turns: int = 4096, pictures: Path | None = None) -> Writer:
        """Appends a shard whenever ``shard_turns`` turns have come together, and at its end.

        Episodes do not wait longer than a minute for others, so that a slow world loses little to a power cut. Pictures
        that turns name (``real_envs.screens``) are copied from the folder ``pictures``.
        """
        return Writer(self, shard_turns, pictures)

    def read(self, split: str | None = None, *, require_actions: bool = True) -> Iterator[Trajectory]:
        """The episodes of a split, or all, streamed in the order in which they were appended.

        Names, emptiness and a log without actions are errors of this call; later shards are checked when they are read.
        ``require_actions=False`` is for those who look at failures.
        """
        tasks = None if split is None else frozenset(self.tasks(split))
        episodes, head = self._scan(tasks), []
        for trajectory in episodes:
            head.append(trajectory)
            if not require_actions or any(turn.action.strip() for turn in trajectory.turns):
                return chain(head, episodes)
        what = "the store" if split is None else f"split '{split}'"
        if not head:
            raise StoreError.about(self._path, f"{what} has no episodes", "Collect some, or ask for another split.")
        reason = f"no episode of {what} has an action ({len(head)} episodes, {sum(len(t.turns) for t in head)} turns)"
        broken = next((f"; the first one broke: {t.failure.strip().splitlines()[-1]}" for t in head if t.failure), "")
        raise StoreError.about(self._path, reason, f"Nothing can be learned from it{broken}")

    def of_tasks(self, tasks: Collection[str]) -> Iterator[Trajectory]:
        """Streamed in the order in which they were appended; none is no error."""
        return self._scan(frozenset(tasks))

    def summary(self) -> Summary:
        """Reads all shards, but no traces."""
        summary = Summary(Tally(), {split: Tally() for split in self.splits}, {})
        for trajectory in self._scan(None, [name for name in SCHEMA.names if name != "trace"]):
            by_agent = summary.by_agent.setdefault(trajectory.agent, Tally())
            for tally in (summary.total, summary.by_split[self._manifest.split_of[trajectory.task_id]], by_agent):
                tally.add(trajectory)
        return summary

    # writing

    def _known_ids(self) -> set[str]:
        if self._ids is None:
            self._ids = {str(row["id"]) for shard in self._manifest.shards for _, row in self._rows(shard, ["id"], ())}
        return self._ids

    def _admit(self, trajectory: Trajectory, pending: dict[str, Trajectory]) -> None:
        """Puts an episode that reads back as it is into ``pending``, by id."""
        try:
            checked = decode(encode(trajectory))
        except FieldError as error:
            raise StoreError.about(self.folder, f"episode '{trajectory.id}', {error}", "Nothing was written.") from None
        if checked.task_id not in self._manifest.split_of:
            reason = f"episode '{checked.id}', field 'task_id' is '{checked.task_id}', which is in no split"
            raise StoreError.about(self.folder, reason, nearest(checked.task_id, self._manifest.split_of))
        if checked.id in pending or checked.id in self._known_ids():
            raise StoreError.about(
                self.folder, f"episode '{checked.id}' is there already", "Give each one an id of its own."
            )
        pending[checked.id] = checked

    def _check_unchanged(self) -> None:
        try:
            unchanged = self._path.read_bytes() == self._on_disk
        except OSError:
            unchanged = False
        if not unchanged:
            raise StoreError.about(
                self._path, "was changed by someone else since it was opened", "Open the store again."
            )

    def _append(self, trajectories: Sequence[Trajectory]) -> None:
        if not trajectories:
            return
        self._check_unchanged()
        shard = write_shard(self.folder, next(self._free_names()), trajectories)
        self._commit([shard], {t.id for t in trajectories})

    def _free_names(self) -> Iterator[str]:
        used = {shard.file for shard in self._manifest.shards}
        names = (f"shard-{number:05d}.parquet" for number in count(len(used)))
        return (name for name in names if name not in used)

    def _commit(self, shards: Sequence[Shard], ids: Collection[str]) -> None:
        """Names shards whose files are there; from here on, they count."""
        manifest, known = replace(self._manifest, shards=(*self._manifest.shards, *shards)), self._known_ids()
        content = manifest.to_bytes()
        write(self._path, content)
        self._manifest, self._on_disk = manifest, content
        known.update(ids)

    # reading

    def _rows(
        self, shard: Shard, columns: Sequence[str], skip: Collection[str]
    ) -> Iterator[tuple[int, dict[str, object]]]:
        check_size(self.folder, shard)
        if shard.file not in self._verified:
            check_hash(self.folder, shard)
            self._verified.add(shard.file)
        return read_rows(self.folder, shard, columns, skip)

    def _scan(self, tasks: frozenset[str] | None, columns: Sequence[str] = tuple(SCHEMA.names)) -> Iterator[Trajectory]:
        """The episodes of some tasks, or all. A task that is in no split is an error in any case."""
        skip = frozenset() if tasks is None else self._manifest.split_of.keys() - tasks
        seen: set[str] = set()
        for shard in self._manifest.shards:
            for number, row in self._rows(shard, columns, skip):
                try:
                    trajectory = decode(row)
                    if trajectory.task_id not in self._manifest.split_of:
                        raise FieldError("task_id", f"is '{trajectory.task_id}', which is in no split")
                    if trajectory.id in seen:
                        raise FieldError("id", f"is '{trajectory.id}', like that of an earlier row")
                except FieldError as error:
                    advice = f"Correct the program that wrote it (rows count from 0). {DAMAGED}"
                    raise StoreError.about(self.folder / shard.file, f"row {number}, {error}", advice) from None
                seen.add(trajectory.id)
                yield trajectory


class Writer:
    """Appends episodes shard by shard. Leaving the ``with`` block, in whatever way, appends the rest."""

    def __init__(self, store: TrajectoryStore, shard_turns: int, pictures: Path | None = None) -> None:
        self._store, self._shard_turns, self._pictures = store, shard_turns, pictures
        self._pending: dict[str, Trajectory] = {}
        self._turns = 0
        self._flushed = time.monotonic()

    def add(self, trajectory: Trajectory) -> None:
        """Takes a finished episode; a bad one is an error here and now, and is not taken."""
        self._store._admit(trajectory, self._pending)
        self._turns += max(1, len(trajectory.turns))
        if self._turns >= self._shard_turns or time.monotonic() - self._flushed > _LONGEST_WAIT:
            self.flush()

    def flush(self) -> None:
        if self._pictures is not None:
            copy_screens(screens_of(self._pending.values()), self._pictures, self._store.folder / FOLDER)
        self._store._append(list(self._pending.values()))
        self._pending, self._turns = {}, 0
        self._flushed = time.monotonic()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.flush()
