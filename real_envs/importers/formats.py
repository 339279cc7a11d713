"""All formats that ``imagine import`` reads: how files are recognised, and the loop over the records of one.

A record that is no episode becomes a ``RejectedRecord`` that names file, record and field; the rest goes on.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from real_envs.errors import UserError
from real_envs.importers.agentgym import AgentGymFormat
from real_envs.importers.browser_use import PAGES, BrowserUse, task_folders
from real_envs.importers.commands import Commands
from real_envs.importers.drafts import Format, Reading, finish
from real_envs.importers.intercode import InterCode
from real_envs.importers.jsonl import OwnJsonLines
from real_envs.importers.minari import Minari, datasets
from real_envs.importers.openai_chat import OpenaiChat
from real_envs.importers.react import React
from real_envs.importers.records import Sample, json_records, open_bytes, plain_suffix
from real_envs.importers.tables import PARQUET, Tables, grouped, parquet_records
from real_envs.store.codec import FieldError, nearest
from real_envs.trajectory import Trajectory

AUTO = "auto"
_HEAD = 100_000
BROKEN = (OSError, EOFError, zlib.error)  # what reading a file may raise, a gzipped one that breaks off included
_JSON = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Imported:
    episode: Trajectory
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A record that is no episode: where it is, which field is wrong ("" is the whole record), and why."""

    file: Path
    record: str
    field: str
    reason: str

    def __str__(self) -> str:
        field = f", field '{self.field}'" if self.field else ""
        return f"{self.file}: {self.record}{field} {self.reason}"


class LogFile(NamedTuple):
    path: Path
    format: Format
    reason: str


# The most specific first: the first one that recognises a file reads it.
_ALL: tuple[Format, ...] = (
    Tables(),
    BrowserUse(),
    Minari(),
    InterCode(),
    AgentGymFormat(),
    OwnJsonLines(),
    OpenaiChat(),
    Commands(),
    React(),
)
FORMATS: Mapping[str, Format] = {one.name: one for one in _ALL}


def find_format(name: str, path: Path) -> tuple[Format, str]:
    """The format of that name, or the one that recognises the file where the name is ``auto``; and the reason.

    Raises:
        UserError: there is no such format, or the file is in none.
    """
    if name in FORMATS:
        return FORMATS[name], "you said so"
    if name != AUTO:
        raise UserError(f"unknown format '{name}'; {nearest(name, (AUTO, *FORMATS))}")
    sample = sample_of(path)
    for one in _ALL:
        if reason := one.recognises(sample):
            return one, reason
    if path.is_dir():
        raise UserError(f"{path} is a folder, and neither a run of browser-use nor a dataset of Minari")
    keys = f"its first record has {', '.join(map(str, sample.record))}; " if isinstance(sample.record, dict) else ""
    raise UserError(
        f"{path} is in no format that is known here: {keys}name one of {', '.join(FORMATS)}, "
        "or columns with `imagine import huggingface ... imports.mapping.action=...`"
    )


def sample_of(path: Path) -> Sample:
    record: Any = None
    text = ""
    try:
        if not path.exists():
            raise FileNotFoundError(2, "No such file or folder")
        if plain_suffix(path) == PARQUET:
            record = next((row.value for row in parquet_records(path)), None)
        elif path.is_file():
            with open_bytes(path) as file:
                text = file.read(_HEAD).decode("utf-8-sig", "replace")
            if plain_suffix(path) in _JSON or text.lstrip()[:1] in ("{", "["):
                values = (first.value for first in islice(json_records(path), 5))
                record = next((value for value in values if not isinstance(value, FieldError)), None)
            if "\0" in text and record is None:
                text = ""  # pictures and the like
    except BROKEN as error:
        raise unreadable(path, error) from None
    return Sample(path, record, text)


def log_files(name: str, path: Path) -> Iterator[LogFile | RejectedRecord]:
    """A file with its format; or those of a folder: runs of browser-use, datasets of Minari, other files, sorted.

    No file of a folder is passed over in silence: one that cannot be read, or is in no format, is refused. In a named
    format are files of JSON or a table, and those that the format recognises.

    Raises:
        UserError: there is no such format or file, a single file is in none, or nothing below a folder is in any.
    """
    if not path.is_dir():
        yield LogFile(path, *find_format(name, path))
        return
    if name != AUTO:
        find_format(name, path)  # a misspelt one is an error, and no reason to refuse all files
    tasks = task_folders(path) if name in (AUTO, BrowserUse.name) else []
    tables = datasets(path) if name in (AUTO, Minari.name) else []
    if tasks:
        yield LogFile(path, FORMATS[BrowserUse.name], f"it is a folder with {len(tasks)} tasks")
    for data in tables:
        whole = data.parent if data.name == "data" else data
        yield LogFile(whole, FORMATS[Minari.name], "it is a folder with the episodes and spaces of a dataset")
    runs, own = {task.parent for task in tasks}, {*tasks, *tables}
    count = len(own)
    for file in sorted(entry for entry in path.rglob("*") if not entry.is_dir()):
        if not own.isdisjoint(file.parents) or (file.name == PAGES and file.parent in runs):
            continue
        one = _file_of_folder(name, file)
        count += not isinstance(one, RejectedRecord)
        yield one
    if not count:
        raise UserError(f"{path} is a folder, and no file below it is in a format that is known here")


def _file_of_folder(name: str, file: Path) -> LogFile | RejectedRecord:
    try:
        sample = sample_of(file)
        if name == AUTO:
            return LogFile(file, *find_format(name, file))
        if sample.record is None and not FORMATS[name].recognises(sample):
            return RejectedRecord(file, "the file", "", f"is not in the format {name}")
        return LogFile(file, FORMATS[name], "you said so")
    except UserError as error:
        return RejectedRecord(file, "the file", "", str(error).removeprefix(f"{file} "))


def read(
    path: Path, format: Format, reading: Reading, ids: set[str] | None = None
) -> Iterator[Imported | RejectedRecord]:
    """The episodes of a file, in its order, and what is refused.

    An id is the record's own, or the file's name and a hash of the episode: the same in every import. An equal episode
    in the same file gets a number, too. A file that breaks off is read up to there.

    Args:
        ids: stated by records of earlier files; those of this file are added.

    Raises:
        UserError: the file cannot be read at all.
    """
    times: Counter[str] = Counter()
    ids = set() if ids is None else ids
    stem = Path(path.name.removesuffix(".gz")).stem
    begun = False
    try:
        for record in grouped(format.records(path), reading):
            begun = True
            try:
                if isinstance(record.value, FieldError):
                    raise record.value
                draft = format.draft(record.value, reading)
                episode, left_out = finish(draft, reading.agent, f"{stem}/")
                if draft.id is None:
                    times[episode.id] += 1
                    if times[episode.id] > 1:
                        episode, left_out = finish(draft, reading.agent, f"{episode.id}-{times[episode.id]}")
                elif episode.id in ids:
                    raise FieldError("id", f"is '{episode.id}', like that of an earlier record")
                else:
                    ids.add(episode.id)
                if not any(turn.action.strip() for turn in episode.turns) and not episode.stop.is_failure:
                    raise FieldError("turns", "have no action")
            except FieldError as error:
                yield RejectedRecord(path, record.where, error.field, error.reason)
            except OverflowError as error:
                yield RejectedRecord(path, record.where, "", f"holds a number that is too large: {error}")
            else:
                yield Imported(episode, left_out)
    except BROKEN as error:
        if not begun:
            raise unreadable(path, error) from None
        yield RejectedRecord(path, "the rest of the file", "", f"cannot be read: {error}")


def unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
