"""Tables, as Hugging Face datasets are: Parquet, Arrow, CSV or JSON lines, a row an episode or a row a step.

A row with ``messages`` is a chat (``openai_chat``), one with ``conversations`` is AgentGym's. For all others
``Reading.mapping`` names the columns: ``{"action": "cmd", "observation": "out"}``, and as far as there are such:

- ``episode``: the rows are steps, and those of an episode have the same value here and follow each other. Without it a
  row is an episode, whose columns hold lists.
- ``task``, ``agent``, ``start`` (the first observation or the goal), ``success``, ``reward``, ``done``, ``truncated``.

``Reading`` says what the table does not show. ``observation``: whether one was seen before or after the action beside
it; a list that is longer by one has both. ``reward``: whether it is the score so far. ``done``: whether it covers
time-outs.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from real_envs.importers.agentgym import AgentGymFormat, conversation_draft
from real_envs.importers.drafts import ANSWER, EpisodeDraft, Format, Reading, with_thoughts_apart
from real_envs.importers.ends import flag
from real_envs.importers.messages import decoded
from real_envs.importers.openai_chat import MESSAGES, chat_draft, messages_of
from real_envs.importers.records import Record, Sample, arrow_batches, check_unpacked, open_bytes, plain_suffix
from real_envs.store.codec import FieldError, nearest

COLUMNS = ("action", "observation", "episode", "task", "agent", "start", "success", "reward", "done", "truncated")
PARQUET = ".parquet"
_CELLS = {".csv": ",", ".tsv": "\t"}  # the character between
TABLES = (PARQUET, ".arrow", *_CELLS)


class _WrongCells(FieldError):
    """``first``: the first cell by its name, the only one that is sure to be in its place."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__("", "has more or fewer cells than the first line has names")
        self.first = dict([next(iter(row.items()))])


class Tables(Format):
    name = "huggingface"
    about = "Parquet, Arrow, CSV or JSON lines with messages, or with columns that imports.mapping names"

    def recognises(self, sample: Sample) -> str:
        kind = plain_suffix(sample.path)
        return f"it is {kind[1:].upper() if kind in _CELLS else kind[1:].title()}" if kind in TABLES else ""

    @staticmethod
    def holds_chats(row: Any) -> bool:
        return bool(messages_of(row)[0])

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        if not isinstance(value, dict):
            raise FieldError("", f"is no row of named columns: it is {value!r:.60}")
        if "episode" in reading.mapping and "action" in reading.mapping and {"row", "steps"} == value.keys():
            return with_thoughts_apart(_mapped(value["steps"], value["row"], reading))
        if "action" not in reading.mapping and self.holds_chats(value):
            spoken = AgentGymFormat().recognises(Sample(Path(), value, ""))
            return conversation_draft(value, reading) if spoken else chat_draft(value, reading)
        named = next((name for name in MESSAGES if name in value), "")
        if named and "action" not in reading.mapping:
            raise FieldError(named, f"is {value[named]!r:.60}, no list of messages, and no JSON text of one")
        if "action" not in reading.mapping or "observation" not in reading.mapping:
            raise FieldError(
                "messages", f"is missing; name columns with imports.mapping ({', '.join(value)} are there)"
            )
        return with_thoughts_apart(_mapped(None, value, reading))


def table_records(path: Path) -> Iterator[Record]:
    """A batch is in memory at a time. Raises ``OSError`` for a file that is no such table."""
    if (kind := plain_suffix(path)) in _CELLS:
        yield from _rows(path, _CELLS[kind])
        return
    number = 0
    try:
        for batch in _batches(path):
            for row in batch.to_pylist(maps_as_pydicts="lossy"):
                number += 1
                yield Record(f"row {number}", {name: _plain(value) for name, value in row.items()})
    except pa.ArrowException as error:
        raise OSError(f"is no readable {kind[1:].title()}: {error}") from error


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    if plain_suffix(path) == PARQUET:
        with pq.ParquetFile(path) as file:
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            check_unpacked(sum(group.total_byte_size for group in groups), path.stat().st_size)
            yield from file.iter_batches(batch_size=64)
        return
    yield from arrow_batches(path)


def _rows(path: Path, between: str) -> Iterator[Record]:
    """Of CSV: cells are texts."""
    csv.field_size_limit(1 << 27)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.DictReader(file, delimiter=between)
        try:
            names = rows.fieldnames or ()
            if twice := next((name for name in names if name and names.count(name) > 1), ""):
                raise OSError(f"names two columns '{twice}'")
            for number, row in enumerate(rows, start=1):
                wrong = None in row or None in row.values()
                yield Record(f"row {number}", _WrongCells(row) if wrong else row)
        except csv.Error as error:
            raise OSError(f"is no readable CSV: {error}") from error


def _cell(value: Any) -> Any:
    """A number or a truth in a cell of CSV, where an empty one is unknown."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value.lower() if value.lower() in ("true", "false") else value or "null")
    return value


def _plain(value: Any) -> Any:
    """As JSON has it. Arrow gives the structs of a column all keys that any of them has: a null is no argument."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)  # a time, a duration


def grouped(records: Iterator[Record], reading: Reading) -> Iterator[Record]:
    """Rows that are steps, put together to episodes; other records as they are.

    Where a row cannot be read, neither the episode before it nor the one behind it may be whole: both are refused.
    """
    column = reading.mapping.get("episode")
    if column is None:
        yield from records
        return
    seen: set[object] = set()
    name: object = None
    steps: list[dict[str, Any]] = []
    hole, just = "", False  # the row that the episode may lack, and whether it stood just before

    def episode() -> Iterator[Record]:
        if steps:
            value: Any = {"row": steps[0], "steps": steps}
            if name in seen:
                value = FieldError(column, f"is '{name}' once more: the rows of an episode must follow each other")
            elif hole:
                value = FieldError("", f"may lack {hole}, which cannot be read")
            yield Record(f"episode '{name}'", value)
            seen.add(name)

    for record in records:
        row = record.value
        cells = row if isinstance(row, dict) else row.first if isinstance(row, _WrongCells) else {}
        own = cells.get(column)
        named = isinstance(own, Hashable) and _is_there(own)
        if not isinstance(row, dict) or not named:
            reason = "names no episode" if isinstance(row, dict) and column in row else "is missing"
            yield record if isinstance(row, FieldError) else Record(record.where, FieldError(column, reason))
            if named and own != name:
                yield from episode()
                name, steps = own, []
            hole, just = record.where, not named
            continue
        if own != name:
            yield from episode()
            steps, hole = [], hole if just else ""
        name, just = own, False
        steps.append(row)
    yield from episode()


def _is_there(cell: Any) -> bool:
    """Whether a cell says anything: it is not empty, and not NaN."""
    return cell is not None and cell != "" and cell == cell


def _mapped(steps: Sequence[Mapping[str, Any]] | None, row: Mapping[str, Any], reading: Reading) -> EpisodeDraft:
    def column(what: str) -> str | None:
        name = reading.mapping.get(what)
        if name is not None and name not in row:
            raise FieldError(name, f"is no column; {nearest(name, row)}")
        return name

    def series(what: str) -> list[Any] | None:
        name = column(what)
        if name is None:
            return None
        plain = what in ("action", "observation")
        if steps is not None:
            return [step.get(name) if plain else _cell(step.get(name)) for step in steps]
        listed = decoded(row[name])
        return list(listed) if isinstance(listed, list | tuple) else None

    def flags(what: str) -> list[bool | None]:
        """Only the last one may be true. Where a row is an episode, one for all is the last."""
        if (name := column(what)) is None:
            return []
        given = series(what)
        cells = [_cell(row[name])] if given is None else given
        truths = list(map(flag, cells))
        for i, (cell, truth) in enumerate(zip(cells, truths, strict=True)):
            if truth is None and _is_there(cell):
                raise FieldError(name, f"is {cell!r:.40} in step {i + 1}, not true or false")
            if truth and i < len(cells) - 1:
                raise FieldError(name, f"is true in step {i + 1}, but steps follow")
        return truths

    def value(what: str) -> Any:
        name = column(what)
        given = None if name is None else (steps[-1] if steps and what == "success" else row)[name]
        return _cell(given) if what in ("success", "reward") else given

    actions, observations = series("action"), series("observation")
    if actions is None or observations is None:
        name = reading.mapping["action" if actions is None else "observation"]
        raise FieldError(
            name, "is no list; where rows are steps, name the column of the episode: imports.mapping.episode"
        )
    for what, cells in (("action", actions), ("observation", observations)):
        if wrong := next((cell for cell in cells if not isinstance(cell, str)), None):
            step = cells.index(wrong) + 1
            raise FieldError(reading.mapping[what], f"is {wrong!r:.60} in step {step}, not text")
    answers, start = _ordered(len(actions), observations, value("start"), reading)
    unanswered = len(answers) < len(actions)
    turns = [{"action": a, "observation": o} for a, o in zip(actions, [*answers, ""], strict=False)]
    if (rewards := series("reward")) is not None:
        if len(rewards) != len(actions):
            counts = f"has {len(rewards)} entries, but there are {len(actions)} actions"
            raise FieldError(reading.mapping["reward"], counts)
        score = 0.0
        for turn, reward in zip(turns, rewards, strict=True):
            known = isinstance(reward, int | float) and not isinstance(reward, bool)
            turn["reward"] = reward - score if known and reading.reward == "cumulative" else reward
            score = reward if known else score
    done, cut = flags("done"), flags("truncated")
    stop = None
    if done and done[-1] is not None:
        over = done[-1] and not (cut and cut[-1])
        stop = "terminated" if over and reading.done == "terminated" else "turn_limit"
    total = value("reward") if rewards is None else None
    mapped = {reading.mapping[what] for what in reading.mapping}
    return EpisodeDraft(
        start=start,
        turns=turns,
        task_id=None if value("task") is None else str(value("task")),
        agent=value("agent") or None,
        stop=stop,
        success=value("success"),
        reward=total,
        left_out={ANSWER: 1} if unanswered and stop != "terminated" else {},
        extra={} if steps is not None else {key: note for key, note in row.items() if key not in mapped},
    )


def _ordered(count: int, observations: list[Any], start: Any, reading: Reading) -> tuple[list[Any], Any]:
    """(the answer to each action, the start). The last action has none where observations were seen before actions."""
    name = reading.mapping["observation"]
    if len(observations) not in (count, count + 1):
        raise FieldError(name, f"has {len(observations)} entries, but there are {count} actions")
    if len(observations) == count + 1 or reading.observation == "before":
        if not observations:
            return [], start  # no turn either: refused where turns are read
        return observations[1:], observations[0] if start is None else f"{start}\n{observations[0]}"
    if reading.observation == "after":
        if start is None:
            raise FieldError("start", "is unknown: name its column, or that of the goal, with imports.mapping.start")
        return observations, start
    raise FieldError(name, "may be seen before or after the action: say imports.observation=before or after")
