"""The ``manifest.json`` of a store: its fields, their check, and the atomic write. The format is told in ``store``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from real_envs.errors import UserError
from real_envs.rows import nearest

FORMAT, VERSION, READABLE_VERSIONS = "imagination-trajectories", 1, (1,)
MANIFEST = "manifest.json"
_KEYS = ("format", "version", "splits", "shards", "meta")
_ADVICE = "Restore it from a copy, or import the episodes into a new store; the format is told in real_envs/store.py."


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
    """What a manifest says. ``split_of`` maps a task id to its only split."""

    splits: dict[str, tuple[str, ...]]
    shards: tuple[Shard, ...]
    meta: dict[str, object]
    split_of: dict[str, str]

    def to_bytes(self) -> bytes:
        return dump(self.splits, self.meta, self.shards)


def dump(splits: Mapping[str, object], meta: Mapping[str, object], shards: tuple[Shard, ...] = ()) -> bytes:
    """The file's content.

    Raises:
        TypeError, ValueError: ``splits`` or ``meta`` hold what JSON cannot.
    """
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
