"""The files of a store, ``manifest.json`` and Parquet shards, in the format that ``real_envs.store`` describes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from real_envs.errors import UserError
from real_envs.files import write_atomically
from real_envs.store.codec import LATER, nearest, to_table
from real_envs.trajectory import Trajectory

FORMAT, VERSION, READABLE_VERSIONS = "imagination-trajectories", 1, (1,)
MANIFEST = "manifest.json"
_KEYS = ("format", "version", "splits", "shards", "meta")
_ADVICE = (
    "Restore it from a copy, or import the episodes into a new store; real_envs/store/__init__.py describes the format."
)


class StoreError(UserError):
    """Logged episodes cannot be read or written: which file, where in it, why, and what to do about it."""

    @classmethod
    def about(cls, path: Path, reason: str, advice: str) -> StoreError:
        return cls(f"{path}: {reason}. {advice}")


@dataclass(frozen=True, slots=True)
class Shard:
    """An entry of ``shards``."""

    file: str
    episodes: int
    turns: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``split_of`` maps a task id to its only split."""

    splits: dict[str, tuple[str, ...]]
    shards: tuple[Shard, ...]
    meta: dict[str, object]
    split_of: dict[str, str]

    def to_bytes(self) -> bytes:
        return dump(self.splits, self.meta, self.shards)


def dump(splits: Mapping[str, object], meta: Mapping[str, object], shards: tuple[Shard, ...] = ()) -> bytes:
    """Raises ``TypeError`` or ``ValueError`` for ``splits`` or ``meta`` that JSON cannot hold."""
    values = (FORMAT, VERSION, dict(splits), [asdict(shard) for shard in shards], dict(meta))
    return (json.dumps(dict(zip(_KEYS, values, strict=True)), indent=1, allow_nan=False) + "\n").encode()


def parse(path: Path, content: bytes, advice: str = _ADVICE) -> Manifest:
    """What the file at ``path`` says. ``advice`` ends the messages of most errors.

    Raises:
        StoreError: it is no JSON, of another format or version, or a field is wrong.
    """

    def check(holds: bool, reason: str, advice: str = advice) -> None:
        if not holds:
            raise StoreError.about(path, reason, advice)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        data = json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise StoreError.about(path, f"is no JSON: {error}", advice) from None
    check(isinstance(data, dict), "is no JSON object")
    check(data.get("format") == FORMAT, f"field 'format' is {data.get('format')!r}, not '{FORMAT}'")
    version, readable = data.get("version"), ", ".join(map(str, READABLE_VERSIONS))
    known = type(version) is int and version in READABLE_VERSIONS
    check(known, f"format version {version!r} is unknown; readable: {readable}", "Use the release that wrote it.")
    for key in _KEYS:
        check(key in data, f"field '{key}' is missing")
    for key in data:
        check(key in _KEYS, f"field '{key}' is unknown; {nearest(key, _KEYS)}", "What is yours goes into 'meta'.")
    splits, shards, meta = data["splits"], data["shards"], data["meta"]

    check(isinstance(splits, dict) and len(splits) > 0, "field 'splits' is no object with at least one split")
    split_of: dict[str, str] = {}
    for split, tasks in splits.items():
        check(isinstance(tasks, list), f"field 'splits.{split}' is {tasks!r:.60}, not a list of task ids")
        for i, task in enumerate(tasks):
            at = f"field 'splits.{split}[{i}]'"
            check(isinstance(task, str) and task != "", f"{at} is {task!r:.60}, not a task id")
            reason = f"{at}: task '{task}' is in split '{split_of.get(task)}' already"
            check(task not in split_of, reason, "Each task belongs to one split, once.")
            split_of[task] = split

    check(isinstance(shards, list), f"field 'shards' is {shards!r:.60}, not a list")
    entries: dict[str, Shard] = {}
    for i, shard in enumerate(shards):
        at = f"field 'shards[{i}]"
        check(isinstance(shard, dict), f"{at}' is {shard!r:.60}, not an object")
        names = [item.name for item in fields(Shard)]
        check(sorted(shard) == sorted(names), f"{at}' has the keys {sorted(shard)}, not {sorted(names)}")
        for name in ("episodes", "turns", "bytes"):
            good = type(shard[name]) is int and shard[name] >= 0
            check(good, f"{at}.{name}' is {shard[name]!r:.60}, not a count")
        for name in ("file", "sha256"):
            check(isinstance(shard[name], str), f"{at}.{name}' is {shard[name]!r:.60}, not text")
        file = shard["file"]
        plain = file not in ("", ".", "..", MANIFEST) and not set(file) & set("/\\\0")
        check(plain, f"{at}.file' is {file!r:.60}, not the name of a file in the same folder")
        check(file not in entries, f"{at}.file' is '{file}', which is there twice")
        entries[file] = Shard(**shard)

    check(isinstance(meta, dict), f"field 'meta' is {meta!r:.60}, not an object")
    return Manifest({split: tuple(tasks) for split, tasks in splits.items()}, tuple(entries.values()), meta, split_of)


DAMAGED = "Restore it from a copy, or import the episodes into a new store."


def to_parquet(trajectories: Sequence[Trajectory]) -> bytes:
    """Raises ``pa.ArrowException`` for episodes that do not fit, such as one with more than 2 GiB of text."""
    sink = pa.BufferOutputStream()
    pq.write_table(to_table(trajectories), sink, compression="zstd", row_group_size=256)
    return bytes(sink.getvalue().to_pybytes())


def write_shard(folder: Path, file: str, trajectories: Sequence[Trajectory]) -> Shard:
    """Returns what a manifest says of the file.

    Raises:
        StoreError: the episodes do not fit into a file, or it cannot be written; what was there before is intact.
    """
    path = folder / file
    try:
        content = to_parquet(trajectories)
    except pa.ArrowException as error:
        raise StoreError.about(path, f"cannot be written: {error}", "Append fewer episodes.") from error
    write(path, content)
    turns = sum(len(t.turns) for t in trajectories)
    return Shard(file, len(trajectories), turns, len(content), hashlib.sha256(content).hexdigest())


def write(path: Path, content: bytes) -> None:
    """Whole or not at all; raises ``StoreError``."""
    try:
        write_atomically(path, content)
    except OSError as error:
        reason = f"cannot be written: {error}"
        raise StoreError.about(path, reason, "Look at space and rights; what was stored before is intact.") from error


def check_size(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    try:
        size = path.stat().st_size
    except OSError:
        raise StoreError.about(path, f"is missing, but {MANIFEST} names it", DAMAGED) from None
    if size != shard.bytes:
        raise StoreError.about(path, f"has {size} bytes, not {shard.bytes}: it is truncated or changed", DAMAGED)


def check_hash(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    try:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise StoreError.about(path, f"cannot be read: {error}", "Check its rights.") from error
    if digest != shard.sha256.lower():
        raise StoreError.about(path, f"has the sha256 {digest}, not {shard.sha256}: it was changed", DAMAGED)


def read_rows(
    folder: Path, shard: Shard, columns: Sequence[str], skip_tasks: Collection[str]
) -> Iterator[tuple[int, dict[str, object]]]:
    """The rows with their numbers, counted from 0; a few are in memory at a time. The values are not checked.

    Rows of ``skip_tasks`` are left out before they cost anything; that needs the column ``task_id``.
    """
    path, first = folder / shard.file, 0
    try:
        with pq.ParquetFile(path) as file:
            there = [name for name in columns if name in file.schema_arrow.names]
            missing = [name for name in columns if name not in there and name not in LATER]
            if missing:
                advice = "Add it (nulls where it is optional); real_envs/store/__init__.py describes the format."
                raise StoreError.about(path, f"has no column '{missing[0]}'", advice)
            if file.metadata.num_rows != shard.episodes:
                reason = f"has {file.metadata.num_rows} rows, but {MANIFEST} says {shard.episodes} episodes"
                raise StoreError.about(path, reason, DAMAGED)
            for batch in file.iter_batches(batch_size=64, columns=there):
                kept, size = list(range(batch.num_rows)), batch.num_rows
                if skip_tasks:
                    tasks = batch.column("task_id").to_pylist()
                    kept = [i for i in kept if not (isinstance(tasks[i], str) and tasks[i] in skip_tasks)]
                    batch = batch.take(pa.array(kept, pa.int64()))
                yield from zip((first + i for i in kept), batch.to_pylist(), strict=True)
                first += size
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError.about(path, f"is no readable Parquet: {error}", DAMAGED) from error
