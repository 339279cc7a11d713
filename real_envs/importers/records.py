"""The records of a file, one at a time: files may be larger than memory, gzipped, or broken in places."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from real_envs.store.codec import FieldError

_CHUNK = 1 << 20
_LINES = (".jsonl", ".ndjson", ".jsonlines")


@dataclass(frozen=True, slots=True)
class Record:
    """Where in the file it is, such as ``line 3``, and its value, a ``FieldError`` where that cannot be read."""

    where: str
    value: Any


@dataclass(frozen=True, slots=True)
class Sample:
    """What a format is recognised by."""

    path: Path
    record: Any
    text: str  # its first 100,000 bytes, if it is text


def open_bytes(path: Path) -> BinaryIO:
    """Unzipped."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def plain_suffix(path: Path) -> str:
    """``.jsonl`` of ``runs.jsonl.gz``."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def has_keys(path: Path, *keys: str) -> bool:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and all(key in value for key in keys)


def json_records(path: Path) -> Iterator[Record]:
    """The records of JSON lines, of one array, or of one object that maps names to records.

    An object that holds anything but objects is itself the only record. A few records are in memory at a time. A part
    that cannot be parsed is a record whose value is a ``FieldError``; an array ends there, lines go on.

    Raises:
        OSError: the file cannot be read.
    """
    with open_bytes(path) as file:
        head = file.read(_CHUNK).decode("utf-8-sig", "ignore").lstrip()
    if plain_suffix(path) in _LINES or _looks_like_lines(head):
        yield from _lines(path)
    elif head.startswith("["):
        yield from (Record(f"record {key}", value) for key, value in _values(path))
    else:
        yield from _entries(path)


def _looks_like_lines(head: str) -> bool:
    first, newline, rest = head.partition("\n")
    if not first.startswith("{") or not newline or not rest.lstrip().startswith("{"):
        return False
    try:
        json.loads(first)
    except ValueError:
        return False
    return True


def _lines(path: Path) -> Iterator[Record]:
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield Record(f"line {number}", json.loads(line.decode("utf-8-sig")))
                except (ValueError, RecursionError) as error:
                    yield Record(f"line {number}", FieldError("", f"is no JSON: {error}"))


def _entries(path: Path) -> Iterator[Record]:
    for n, (key, value) in enumerate(_values(path)):
        if n == 0 and not isinstance(value, dict | FieldError):
            with open_bytes(path) as file:
                content = file.read()
            try:
                yield Record("record 1", json.loads(content.decode("utf-8-sig")))
            except (ValueError, RecursionError) as error:
                yield Record("record 1", FieldError("", f"is no JSON: {error}"))
            return
        yield Record(f"record '{key}'", value)


def _values(path: Path) -> Iterator[tuple[int | str, Any]]:
    """The items of the array, or of the object, that a file holds: (number from 1, or key; value)."""
    decoder = json.JSONDecoder()
    with open_bytes(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace")
        buffer, at, size = text.read(_CHUNK), 0, _CHUNK

        def more() -> bool:
            nonlocal buffer, at, size
            chunk = text.read(size)
            buffer, at, size = buffer[at:] + chunk, 0, min(size * 2, 1 << 28)
            return bool(chunk)

        def sign() -> str:
            """The next character that is no space; "" at the end."""
            nonlocal at
            while True:
                while at < len(buffer) and buffer[at].isspace():
                    at += 1
                if at < len(buffer):
                    return buffer[at]
                if not more():
                    return ""

        def value() -> Any:
            nonlocal at, size
            while True:
                sign()
                try:
                    record, end = decoder.raw_decode(buffer, at)
                except json.JSONDecodeError as error:
                    # cut off by the end of the buffer, or wrong
                    cut = error.msg.startswith("Unterminated") or error.pos >= len(buffer) - 16
                    if cut and more():
                        continue
                    raise
                if end < len(buffer) or not more():
                    at, size = end, _CHUNK
                    return record

        opening, number = sign(), 0
        at += 1
        while sign() not in ("", "]", "}"):
            number += 1
            key: int | str = number
            try:
                if opening == "{":
                    key = str(value())
                    if sign() != ":":
                        raise ValueError(f"':' is missing after {key!r}")
                    at += 1
                item = value()
                if sign() not in (",", "]", "}"):
                    raise ValueError("it breaks off")
            except (ValueError, RecursionError) as error:
                yield key, FieldError("", f"is no JSON, and the rest of the file is not read: {error}")
                return
            yield key, item
            if sign() == ",":
                at += 1
