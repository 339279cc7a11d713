"""All formats that ``imagine import`` reads: how files are recognised, and the loop over the records of one.

A record that is no episode becomes a ``RejectedRecord`` that names file, record and field; the rest goes on.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from real_envs.errors import UserError
from real_envs.importers.agentgym import AgentGymFormat
from real_envs.importers.aider import Aider
from real_envs.importers.browser_use import PAGES, BrowserUse, task_folders
from real_envs.importers.commands import Commands
from real_envs.importers.containers import not_read
from real_envs.importers.dialects import is_message
from real_envs.importers.drafts import (
    Format,
    Reading,
    check_fields,
    finish,
    with_columns,
    with_thoughts_apart,
    with_whole_characters,
)
from real_envs.importers.intercode import InterCode
from real_envs.importers.jsonl import OwnJsonLines
from real_envs.importers.minari import Minari, datasets
from real_envs.importers.openai_chat import OpenaiChat, latest_states, unread_texts
from real_envs.importers.react import React
from real_envs.importers.records import PACKED, PACKED_MARKS, Sample, json_records, open_bytes, plain_suffix
from real_envs.importers.swe_agent import SweAgent
from real_envs.importers.tables import TABLES, Tables, grouped, table_records
from real_envs.importers.traces import Traces
from real_envs.store.codec import FieldError, nearest
from real_envs.trajectory import Trajectory

AUTO = "auto"
_HEAD = 100_000
# what reading a file may raise, a gzipped one that breaks off included
BROKEN = (OSError, EOFError, zlib.error, RecursionError)
_JSON = (".json", ".jsonl", ".ndjson", ".traj", ".eval")
_TAR = b"ustar"
_SEEN = {  # how files begin that are read only after somebody took them apart
    b"PK\x03\x04": "an archive: unzip it, and name the folder",
    _TAR: "an archive: unpack it, and name the folder",
    **dict.fromkeys(PACKED_MARKS, "packed twice: unpack it once"),
    b"SQLite format 3": "a database of SQLite: export its messages as JSON lines",
}
_BLANK = b"[]{} \r\n\t\xef\xbb\xbf"
_LEFT = ("~", ".bak", ".tmp", ".orig", ".part", ".swp")  # what editors and downloads leave in a folder
_TRANSCRIPTS = ("", ".txt", ".log", ".out", ".ipynb")  # of text in a folder


@dataclass(frozen=True, slots=True)
class Imported:
    episode: Trajectory
    left_out: tuple[str, ...]
    file: Path
    record: str


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A record that is no episode: where it is, which field is wrong ("" is the whole record), and why."""

    file: Path
    record: str
    field: str
    reason: str

    def __str__(self) -> str:
        field = f", field '{self.field}'" if self.field else ""
        return f"{self.file}: {self.record}{field} {self.reason}".encode("utf-8", "backslashreplace").decode()


class LogFile(NamedTuple):
    path: Path
    format: Format
    reason: str


# The most specific first: the first one that recognises a file reads it.
_ALL: tuple[Format, ...] = (
    Traces(),
    Tables(),
    BrowserUse(),
    Minari(),
    InterCode(),
    AgentGymFormat(),
    OwnJsonLines(),
    SweAgent(),
    OpenaiChat(),
    Aider(),
    React(),
    Commands(),
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
    if recognised := _recognised(sample):
        return recognised
    if path.is_dir():
        raise UserError(f"{path} is a folder, and neither a run of browser-use nor a dataset of Minari")
    raise UserError(
        f"{path} {_in_no_format(sample)}; name one of {', '.join(FORMATS)}, "
        "or columns with `imagine import huggingface ... imports.mapping.action=...`"
    )


def _recognised(sample: Sample) -> tuple[Format, str] | None:
    reasons = ((one, one.recognises(sample)) for one in _ALL)
    return next(((one, reason) for one, reason in reasons if reason), None)


def _in_no_format(sample: Sample) -> str:
    """What was seen of a file in no format, and which one comes near, and why it is not in that one."""
    if ".pkl" in sample.path.name:
        return "is a pickle, as of AgentLab's steps: reading it could run code, so it is never read"
    if "state_obv" in sample.text and sample.record is None:
        return "is a page of WebArena's results, which is not read: log its steps as messages"
    if about := not_read(sample.record):
        return f"is one of {about}"
    if sample.record is None and sample.path.is_file() and not sample.error:
        with open_bytes(sample.path) as file:
            head = file.read(512)
        known = {mark for mark in _SEEN if head.startswith(mark)} | ({_TAR} if head[257:262] == _TAR else set())
        if known:
            return f"is {_SEEN[known.pop()]}"
        if head.strip(_BLANK) == b"":
            return "is empty: it holds no record"
    if isinstance(sample.record, dict) and (reason := unread_texts(sample.record)):
        return reason
    unknown = "is in no format that is known here"
    if sample.record is None:
        return f"{unknown}: {sample.error}" if sample.error else unknown
    keys = [str(key) for key in islice(sample.record, 1000)] if isinstance(sample.record, dict) else []
    seen = f"its first record has {', '.join(keys[:20])}" if keys else f"its first record is {sample.record!r:.60}"
    near = {one: max(2 * (mark in keys) or len(get_close_matches(mark, keys, 1, 0.8)) for mark in one.marks)
            for one in _ALL if one.marks}  # fmt: skip
    best = max(near, key=lambda one: near[one])
    if not near[best]:
        return f"{unknown}: {seen}"
    try:
        finish(best.draft(sample.record, Reading()))
    except FieldError as error:
        return f"{unknown}: {seen}; nearest is {best.name}, but field '{error.field}' {error.reason}"
    return f"{unknown}: {seen}; nearest is {best.name}"


def sample_of(path: Path) -> Sample:
    record: Any = None
    text = error_text = ""
    try:
        if not path.exists():
            raise FileNotFoundError(2, "No such file or folder")
        if plain_suffix(path) in TABLES:
            rows = [row.value for row in islice(table_records(path), 5)]
            record = next(filter(Tables.holds_chats, rows), rows[0] if rows else None)
        elif path.is_file():
            with open_bytes(path) as file:
                text = file.read(_HEAD).decode("utf-8-sig", "replace")
            if plain_suffix(path) in _JSON or text.lstrip()[:1] in ("{", "["):
                first = list(islice(json_records(path), 5))
                values = [item.value for item in first if not isinstance(item.value, FieldError)]
                # the first may be of an episode that broke; messages after it are no records
                samples = (Sample(path, value, text) for value in values if value is values[0] or not is_message(value))
                record = next((one.record for one in samples if _recognised(one)), values[0] if values else None)
                if not values and first:
                    error_text = str(RejectedRecord(path, first[0].where, first[0].value.field, first[0].value.reason))
                    error_text = error_text.removeprefix(f"{path}: ")
            if "\0" in text and record is None:
                text = error_text = ""  # pictures and the like
    except BROKEN as error:
        raise unreadable(path, error) from None
    return Sample(path, record, text, error_text)


def log_files(name: str, path: Path) -> Iterator[LogFile | RejectedRecord]:
    """A file with its format; or those of a folder: runs of browser-use, datasets of Minari, other files, sorted.

    No file of a folder is passed over in silence: one that cannot be read, or is in no format, is refused. So is text
    that may be no log: code, diffs and mails have lines with ``>``, too. In a named format are files of JSON or a
    table, and those that the format recognises.

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
    if file.name.endswith(_LEFT):
        return RejectedRecord(file, "the file", "", "is a copy that a program left: name it, to import it")
    try:
        sample = sample_of(file)
        if name == AUTO:
            recognised = _recognised(sample)
            unsure = _in_no_format(sample) if recognised is None else _may_be_no_log(sample, recognised[0])
            if recognised is None or unsure:
                return RejectedRecord(file, "the file", "", unsure)
            return LogFile(file, *recognised)
        if sample.record is None and not FORMATS[name].recognises(sample):
            return RejectedRecord(file, "the file", "", f"is not in the format {name}")
        return LogFile(file, FORMATS[name], "you said so")
    except UserError as error:
        return RejectedRecord(file, "the file", "", str(error).removeprefix(f"{file} "))


def _may_be_no_log(sample: Sample, format: Format) -> str:
    """Why a file of a folder that looks like a transcript may be none; "" where it is sure to be a log."""
    if format.name == Commands.name and sample.record is None:
        return "has lines '> action', as code, diffs and mails have, too: name the file, or `imagine import commands`"
    if format.name == Tables.name and not Tables.holds_chats(sample.record):
        return "is a table without messages: name its columns with imports.mapping"
    if format.name == React.name and plain_suffix(sample.path) not in _TRANSCRIPTS:
        return "has lines 'Action: ...', as code and prompts have, too: name the file, or `imagine import react`"
    return ""


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
    stem = Path(path.stem if path.suffix in PACKED else path.name).stem
    begun = False
    try:
        table = plain_suffix(path) in TABLES and format.name != Traces.name
        records = latest_states(table_records(path)) if table else format.records(path)
        for record in grouped(records, reading):
            begun = True
            try:
                if isinstance(record.value, FieldError):
                    raise record.value
                check_fields(record.value)
                draft = format.draft(record.value, reading)
                if not (format.name == Tables.name and "action" in reading.mapping):
                    draft = with_columns(draft, format.columns(record.value), reading.mapping)
                draft = with_thoughts_apart(draft) if format.as_spoken else draft
                draft = draft if record.whole else with_whole_characters(draft)
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
            except RecursionError:
                yield RejectedRecord(path, record.where, "", "is nested too deeply")
            except OverflowError as error:
                yield RejectedRecord(path, record.where, "", f"holds a number that is too large: {error}")
            else:
                yield Imported(episode, left_out, path, record.where)
    except BROKEN as error:
        if not begun:
            raise unreadable(path, error) from None
        yield RejectedRecord(path, "the rest of the file", "", f"cannot be read: {error}")


def unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
