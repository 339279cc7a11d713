"""The Parquet files of a store: rows to bytes, and back from a file whose size and hash were checked."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from real_envs.files import write_atomically
from real_envs.manifest import MANIFEST, Shard, StoreError
from real_envs.rows import LATER, SCHEMA, encode
from real_envs.trajectory import Trajectory

DAMAGED = "Restore it from a copy, or import the episodes into a new store."


def to_parquet(rows: Sequence[dict[str, object]]) -> bytes:
    """The content of a shard.

    Raises:
        pa.ArrowException: the rows do not fit, such as one that holds more than 2 GiB of text.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink, compression="zstd", row_group_size=256)
    return bytes(sink.getvalue().to_pybytes())


def write_shard(folder: Path, file: str, trajectories: Sequence[Trajectory]) -> Shard:
    """Writes a file of these episodes. Returns what a manifest says of it.

    Raises:
        StoreError: the episodes do not fit into a file, or it cannot be written; what was there before is intact.
    """
    path = folder / file
    try:
        content = to_parquet([encode(trajectory) for trajectory in trajectories])
    except pa.ArrowException as error:
        raise StoreError.about(path, f"cannot be written: {error}", "Append fewer episodes.") from error
    write(path, content)
    turns = sum(len(t.turns) for t in trajectories)
    return Shard(file, len(trajectories), turns, len(content), hashlib.sha256(content).hexdigest())


def write(path: Path, content: bytes) -> None:
    """Writes a file of a store, whole or not at all.

    Raises:
        StoreError: it cannot be written; what was there before is intact.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        reason = f"cannot be written: {error}"
        raise StoreError.about(path, reason, "Look at space and rights; what was stored before is intact.") from error


def check_size(folder: Path, shard: Shard) -> None:
    """Raises a ``StoreError`` where the file is missing or of another size than the manifest says."""
    path = folder / shard.file
    try:
        size = path.stat().st_size
    except OSError:
        raise StoreError.about(path, f"is missing, but {MANIFEST} names it", DAMAGED) from None
    if size != shard.bytes:
        raise StoreError.about(path, f"has {size} bytes, not {shard.bytes}: it is truncated or changed", DAMAGED)


def check_hash(folder: Path, shard: Shard) -> None:
    """Raises a ``StoreError`` where the file's content is not what the manifest says."""
    path = folder / shard.file
    try:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise StoreError.about(path, f"cannot be read: {error}", "Check its rights.") from error
    if digest != shard.sha256.lower():
        raise StoreError.about(path, f"has the sha256 {digest}, not {shard.sha256}: it was changed", DAMAGED)


def read_rows(
    folder: Path, shard: Shard, columns: Sequence[str], skip_tasks: Collection[str] = ()
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
                advice = "Add it (nulls where it is optional); the format is told in real_envs/store.py."
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
