"""The records of a file, one at a time: files may be larger than memory, packed, or broken in places."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from real_envs.store.codec import FieldError

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

_CHUNK = 1 << 20
_FIRST = 32  # entries of an object that decide whether these, or the object, are the records
_UNPACKED, _TIMES = 1 << 26, 200  # bytes that any file may unpack to, and how many times its size a larger one
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * 19
_LINES = (".jsonl", ".ndjson", ".jsonlines")
_PACKED: dict[bytes, Callable[[Path], Any]] = {  # by the bytes at their beginning
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": lambda path: pa.input_stream(str(path), compression="zstd"),
}
PACKED_MARKS = tuple(_PACKED)
PACKED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True, slots=True)
class Record:
    """Where in the file it is, such as ``line 3``, and its value, a ``FieldError`` where that cannot be read."""

    where: str
    value: Any
    whole: bool = False  # whether its texts surely hold no half surrogate pair


@dataclass(frozen=True, slots=True)
class Sample:
    """What a format is recognised by."""

    path: Path
    record: Any
    text: str  # its first 100,000 bytes, if it is text
    error: str = ""  # why its first record is none


def open_bytes(path: Path) -> BinaryIO:
    """Unzipped, and as Windows writes text, in UTF-8: without a mark at the beginning, and not in UTF-16."""
    raw: BinaryIO = path.open("rb")
    try:
        head = cast(io.BufferedReader, raw).peek(6)
        known = (reader for mark, reader in _PACKED.items() if head.startswith(mark))
        if unpack := next(known, gzip.GzipFile if path.suffix == ".gz" else None):
            raw.close()
            raw = cast(BinaryIO, io.BufferedReader(_Unzipped(path, unpack)))
        head = cast(io.BufferedReader, raw).peek(4)[:4]
    except BaseException:
        raw.close()
        raise
    if head.startswith(codecs.BOM_UTF8):
        raw.read(len(codecs.BOM_UTF8))
    encoding = _wide_encoding(head)
    return cast(BinaryIO, io.BufferedReader(_InUtf8(raw, encoding))) if encoding else raw


def check_unpacked(unpacked: int, packed: int) -> None:
    """Raises ``OSError`` for a bomb: a file of ``packed`` bytes that unpacks to far more than any text does."""
    if unpacked > max(_UNPACKED, _TIMES * packed):
        raise OSError(f"it unpacks to more than {_TIMES} times its size: {unpacked:,} of {packed:,} bytes")


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Of an Arrow file. Raises ``OSError``: its buffers are packed; ``pa.ArrowException``: it is none."""
    with pa.memory_map(str(path)) as source:  # a stream, as datasets of Hugging Face are saved, or one within a file
        begin = 8 if source.read(6) == b"ARROW1" else 0
        source.seek(begin)
        if any(map(_is_packed, pa.ipc.MessageReader.open_stream(source))):
            raise OSError("is Arrow with packed buffers, which may unpack to any size: save it as Parquet")
        source.seek(begin)
        yield from pa.ipc.open_stream(source)


def _is_packed(message: pa.Message) -> bool:
    """Whether pyarrow would unpack the message's buffers, however large they get, before it says how large that is.

    Read from the tables of its head as Arrow's ``Message.fbs`` has them; notes may say it in files of 2020.
    """
    head = message.metadata.to_pybytes()

    def number(at: int, size: int = 4, signed: bool = False) -> int:
        return int.from_bytes(head[at : at + size], "little", signed=signed)

    def field(table: int, k: int) -> int:
        """Where the k-th field of a table is; 0 where it is not set."""
        fields = table - number(table, signed=True)
        at = number(fields + 4 + 2 * k, 2) if 4 + 2 * k < number(fields, 2) else 0
        return table + at if at else 0

    def inner(table: int, k: int) -> int:
        at = field(table, k)
        return at + number(at)

    root = number(0)
    if message.type not in ("record batch", "dictionary"):
        return False
    batch = inner(root, 2) if message.type == "record batch" else inner(inner(root, 2), 1)
    return bool(field(batch, 3) or field(root, 4))


class _Unzipped(io.RawIOBase):
    """The bytes of a packed file."""

    def __init__(self, path: Path, unpack: Callable[[Path], Any]) -> None:
        self._file, self._packed, self._size = unpack(path), path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            part = self._file.read1(len(buffer))
        except lzma.LZMAError as error:
            raise OSError(str(error)) from error
        self._size += len(part)
        check_unpacked(self._size, self._packed)
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()


def _wide_encoding(head: bytes) -> str:
    """UTF-16 or UTF-32 by the mark at its beginning, or by the zeros beside two plain letters; "" for all others."""
    for mark, encoding in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return encoding
    pairs = {"utf-16-le": (head[::2], head[1::2]), "utf-16-be": (head[1::2], head[::2])}
    wide = (name for name, (letters, zeros) in pairs.items() if zeros == b"\0\0" and all(9 <= c < 127 for c in letters))
    return next(wide, "")


class _InUtf8(io.RawIOBase):
    """The bytes of a text in another encoding, in UTF-8."""

    def __init__(self, raw: BinaryIO, encoding: str) -> None:
        self._raw, self._decoder, self._ready = raw, codecs.getincrementaldecoder(encoding)("replace"), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._raw.read(_CHUNK)
            self._ready = self._decoder.decode(chunk, final=not chunk).encode()
            if not chunk:
                break
        part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._raw.close()
        super().close()


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text with "\\n" at their ends, from Windows, too. Bytes that are no UTF-8 are half surrogates."""
    with open_bytes(path) as file:
        for line in io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="\n"):
            yield f"{line[:-2]}\n" if line.endswith("\r\n") else line


def plain_suffix(path: Path) -> str:
    """``.jsonl`` of ``runs.jsonl.gz``."""
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix.lower()


def has_keys(path: Path, *keys: str) -> bool:
    try:
        with open_bytes(path) as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and all(key in value for key in keys)


def json_records(path: Path) -> Iterator[Record]:
    """The records of JSON lines, of one array, or of one object that maps names to records.

    Lines may hold objects or arrays. An object that holds anything but objects is itself the only record. A few records
    are in memory at a time. A part that cannot be parsed is a record whose value is a ``FieldError``; an array ends
    there, lines go on. So is what follows an array.

    Raises:
        OSError: the file cannot be read.
    """
    if plain_suffix(path) == ".eval":
        yield from _samples(path)
        return
    with open_bytes(path) as file:
        head = file.read(_CHUNK).decode("utf-8-sig", "ignore").lstrip()
    if plain_suffix(path) in _LINES or _looks_like_lines(head):
        yield from _lines(path)
    elif head.startswith("["):
        yield from (Record(f"record {key}", value) for key, value in _values(path))
    else:
        yield from _entries(path)


def _samples(path: Path) -> Iterator[Record]:
    """Those of a log of Inspect, one at a time, each with what the log says of its run."""
    try:
        with zipfile.ZipFile(path) as file:
            check_unpacked(sum(info.file_size for info in file.infolist()), path.stat().st_size)
            names = file.namelist()
            run = next((name for name in ("header.json", "_journal/start.json") if name in names), None)
            about = json.loads(file.read(run))["eval"] if run else {}
            for name in (name for name in names if name.startswith("samples/")):
                yield Record(name, {"eval": about, "samples": [json.loads(file.read(name))]})
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, NotImplementedError) as error:
        raise OSError(f"is no log of Inspect that can be read ({error}): inspect log convert --to json") from error


def _looks_like_lines(head: str) -> bool:
    first, newline, rest = head.partition("\n")
    if not first.startswith(("{", "[")) or not newline or not rest.lstrip().startswith(("{", "[")):
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
                    yield Record(f"line {number}", _loads(line), b"\\ud" not in line and b"\\uD" not in line)
                except UnicodeDecodeError as error:
                    reason = f"is not UTF-8 ({error.reason}); as of Windows: iconv -f windows-1252 -t utf-8 {path}"
                    yield Record(f"line {number}", FieldError("", reason))
                except FieldError as error:
                    yield Record(f"line {number}", error)
                except (ValueError, RecursionError) as error:
                    yield Record(f"line {number}", FieldError("", f"is no JSON: {error}"))


def _loads(line: bytes) -> Any:
    """As ``json.loads`` reads it, faster where orjson is installed.

    orjson refuses some of what ``json`` reads (NaN, half surrogate pairs), and rounds whole numbers beyond 64 bits.

    Raises:
        FieldError: an object has a key twice.
    """
    if orjson is not None and _LONG_NUMBER not in line.translate(_DIGITS):
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(line)
            if line.count(b'":') - line.count(b'\\":') == _keys(value):  # else one may be there twice
                return value
    return json.loads(line.decode("utf-8-sig"), object_pairs_hook=_with_keys_once)


def _keys(value: Any) -> int:
    """How many keys the objects in a value have."""
    if isinstance(value, dict):
        return len(value) + sum(map(_keys, value.values()))
    return sum(map(_keys, value)) if isinstance(value, list) and value and isinstance(value[0], dict | list) else 0


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ``FieldError``: it has a key twice, with two values, of which ``json`` keeps one."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made and made[key] != value:
            raise FieldError(key, "is there twice in one object, with two values")
        made[key] = value
    return made


def _entries(path: Path) -> Iterator[Record]:
    values = _values(path)
    head = list(islice(values, _FIRST))
    # one that holds a list of objects, such as messages, is a record, whatever stands before it
    lists = any(isinstance(value, list) and value and isinstance(value[0], dict) for _, value in head)
    lists |= {key for key, _ in head} == {"info", "data"}  # a trace of MLflow
    texts = sum(isinstance(value, str) or value == [] for _, value in head)
    if head and (lists or 2 * texts >= len(head) or not isinstance(head[0][1], dict | FieldError)):
        with open_bytes(path) as file:
            content = file.read()
        try:
            text = content.decode("utf-8", "surrogateescape")
            yield Record("record 1", json.loads(text, object_pairs_hook=_with_keys_once))
        except FieldError as error:
            yield Record("record 1", error)
        except (ValueError, RecursionError) as error:
            several = "; several values are read one a line: jq -c . FILE" if "Extra data" in str(error) else ""
            yield Record("record 1", FieldError("", f"is no JSON: {error}{several}"))
        return
    yield from (Record(f"record '{key}'", value) for key, value in chain(head, values))


def _values(path: Path) -> Iterator[tuple[int | str, Any]]:
    """The items of the array, or of the object, that a file holds: (number from 1, or key; value)."""
    decoder, plain = json.JSONDecoder(object_pairs_hook=_with_keys_once), json.JSONDecoder()
    with open_bytes(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape")
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
                    try:
                        record, end = decoder.raw_decode(buffer, at)
                    except FieldError as error:
                        record, end = error, plain.raw_decode(buffer, at)[1]
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
        while (closing := sign()) not in ("", "]", "}"):
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
        at += 1
        if opening in ("[", "{") and (not closing or sign()):
            several = f"more follows its '{closing}'; several values are read one a line: jq -c . FILE"
            reason = several if closing else "it breaks off"
            yield number + 1, FieldError("", f"is no JSON, and the rest of the file is not read: {reason}")
