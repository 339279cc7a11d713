"""All formats that ``imagine import`` reads, how one is recognised, and the loop over the records of a file.

A format is one small file: what its records are, and what a record says of an episode. What is wrong with a record is a
``Refusal`` that names file, record and field; the rest goes on.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from real_envs.errors import UserError
from real_envs.importers.agentgym import AgentGym
from real_envs.importers.browser_use import BrowserUse
from real_envs.importers.commands import Commands
from real_envs.importers.drafts import Draft, Reading, finish
from real_envs.importers.intercode import InterCode
from real_envs.importers.jsonl import OwnJsonLines
from real_envs.importers.minari import Minari
from real_envs.importers.openai_chat import OpenaiChat
from real_envs.importers.react import React
from real_envs.importers.records import Record, Sample, json_records, open_bytes, plain_suffix
from real_envs.importers.tables import PARQUET, Tables, grouped, parquet_records
from real_envs.rows import FieldError, nearest
from real_envs.trajectory import Trajectory

AUTO = "auto"
_HEAD = 100_000
BROKEN = (OSError, EOFError, zlib.error)  # what reading a file may raise, a gzipped one that breaks off included
_JSON = (".json", ".jsonl", ".ndjson")


class Format(Protocol):
    """A way of writing episodes down.

    Attributes:
        name: on the command line.
        about: a line of help.
    """

    name: str
    about: str

    def recognises(self, sample: Sample) -> str:
        """Why a file is of this format, such as "its records have 'turn_history'"; "" where it is not."""
        ...

    def records(self, path: Path) -> Iterator[Record]:
        """The records of a file, one at a time.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def draft(self, value: Any, reading: Reading) -> Draft:
        """What a record says of an episode.

        Raises:
            FieldError: it is not of this format.
        """
        ...


@dataclass(frozen=True, slots=True)
class Imported:
    """An episode, and the fields of its record that have no place in it."""

    episode: Trajectory
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that is no episode: where it is, which field is wrong ("" is all of it), and why."""

    file: Path
    record: str
    field: str
    reason: str

    def __str__(self) -> str:
        field = f", field '{self.field}'" if self.field else ""
        return f"{self.file}: {self.record}{field} {self.reason}"


# In this order, the most particular first.
_ALL: tuple[Format, ...] = (
    Tables(),
    BrowserUse(),
    Minari(),
    InterCode(),
    AgentGym(),
    OwnJsonLines(),
    OpenaiChat(),
    Commands(),
    React(),
)
FORMATS: Mapping[str, Format] = {found.name: found for found in _ALL}


def find_format(name: str, path: Path) -> tuple[Format, str]:
    """The format of that name, or the one that a file is in where the name is ``auto``, and why.

    Raises:
        UserError: there is no such format, or the file is in none.
    """
    if name in FORMATS:
        return FORMATS[name], "you said so"
    if name != AUTO:
        raise UserError(f"unknown format '{name}'; {nearest(name, (AUTO, *FORMATS))}")
    sample = sample_of(path)
    for found in _ALL:
        if why := found.recognises(sample):
            return found, why
    if path.is_dir():
        raise UserError(f"{path} is a folder, and neither a run of browser-use nor a dataset of Minari")
    keys = f"its first record has {', '.join(map(str, sample.record))}; " if isinstance(sample.record, dict) else ""
    raise UserError(
        f"{path} is in no format that is known here: {keys}name one of {', '.join(FORMATS)}, "
        "or columns with `imagine import huggingface ... imports.mapping.action=...`"
    )


def sample_of(path: Path) -> Sample:
    """What a format is recognised by.

    Raises:
        UserError: the file cannot be read.
    """
    record: Any = None
    text = ""
    try:
        if not path.exists():
            raise FileNotFoundError(2, "No such file or folder")
        if plain_suffix(path) == PARQUET:
            record = next((found.value for found in parquet_records(path)), None)
        elif path.is_file():
            with open_bytes(path) as file:
                text = file.read(_HEAD).decode("utf-8-sig", "replace")
            if plain_suffix(path) in _JSON or text.lstrip()[:1] in ("{", "["):
                values = (found.value for found in islice(json_records(path), 5))
                record = next((value for value in values if not isinstance(value, FieldError)), None)
            if "\0" in text and record is None:
                text = ""  # pictures and the like
    except BROKEN as error:
        raise unreadable(path, error) from None
    return Sample(path, record, text)


def read(path: Path, found: Format, reading: Reading, named: set[str] | None = None) -> Iterator[Imported | Refusal]:
    """The episodes of a file, in its order, and what is refused.

    Ids are the record's own, or made of the file's name and a hash of the episode: they are the same in every import.
    The same episode once more in a file gets a number. A file that breaks off is read up to there.

    Args:
        named: ids that records of earlier files gave; those of this file are added.

    Raises:
        UserError: the file cannot be read at all.
    """
    times: Counter[str] = Counter()
    named = set() if named is None else named
    stem = Path(path.name.removesuffix(".gz")).stem
    begun = False
    try:
        for record in grouped(found.records(path), reading):
            begun = True
            try:
                if isinstance(record.value, FieldError):
                    raise record.value
                draft = found.draft(record.value, reading)
                episode, left_out = finish(draft, reading.agent, f"{stem}/")
                if draft.id is None:
                    times[episode.id] += 1
                    if times[episode.id] > 1:
                        episode, left_out = finish(draft, reading.agent, f"{episode.id}-{times[episode.id]}")
                elif episode.id in named:
                    raise FieldError("id", f"is '{episode.id}', like that of an earlier record")
                else:
                    named.add(episode.id)
                if not any(turn.action.strip() for turn in episode.turns) and not episode.stop.is_failure:
                    raise FieldError("turns", "have no action")
            except FieldError as error:
                yield Refusal(path, record.where, error.field, error.reason)
            except OverflowError as error:
                yield Refusal(path, record.where, "", f"holds a number that is too large: {error}")
            else:
                yield Imported(episode, left_out)
    except BROKEN as error:
        if not begun:
            raise unreadable(path, error) from None
        yield Refusal(path, "the rest of the file", "", f"cannot be read: {error}")


def unreadable(path: Path, error: Exception) -> UserError:
    """The error for a file that cannot be read."""
    return UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
