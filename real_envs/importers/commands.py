"""Transcripts of text games: lines ``> action`` with what the game answered below them.

Text above the first ``>`` is the start, unless the record has it apart: ``problem`` (or ``start``), ``trace`` and
``reward`` (true or false: solved or not), as ADaPT writes ALFWorld's episodes, by kind of task and game. What was
solved ended. A planner that begins a new part of the same episode leaves ``>`` and empty lines; its first action has no
``>``.

Thoughts, ``> think: ...``, are actions here: the game answers them with ``OK.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_envs.importers.drafts import EpisodeDraft, Format, Reading
from real_envs.importers.records import Record, Sample, json_records, plain_suffix, text_lines
from real_envs.store.codec import FieldError

_ACTION = re.compile(r"> ?(\S.*)")
_TRACE = ("trace", "transcript")
_KNOWN = (*_TRACE, "problem", "start", "reward", "success", "task_id")


class Commands(Format):
    name = "commands"
    about = "'> action' lines with the answers below them, in text or in JSON, as of ADaPT's ALFWorld"
    as_spoken = True
    marks = _TRACE

    def recognises(self, sample: Sample) -> str:
        record = sample.record
        if isinstance(record, dict) and not _trace_of(record):
            record = next((inner for inner in record.values() if isinstance(inner, dict)), None)
        if isinstance(record, dict) and _trace_of(record):
            return f"its records have a '{_trace_of(record)}'"
        prose = plain_suffix(sample.path) in (".md", ".rst")  # where this is how one quotes
        good = sample.record is None and not prose and re.search(r"^> ?[^\s>]", sample.text, re.MULTILINE)
        return "it has lines '> action'" if good else ""

    def records(self, path: Path) -> Iterator[Record]:
        if plain_suffix(path) not in (".json", ".jsonl", ".ndjson"):
            yield Record("the file", {"trace": "".join(text_lines(path)), "task_id": path.stem})
            return
        for record in json_records(path):
            value = record.value
            inner = list(value.items()) if isinstance(value, dict) and not _trace_of(value) else []
            if inner and all(isinstance(episode, dict) for _, episode in inner):
                for key, episode in inner:
                    yield Record(f"{record.where}, '{key}'", {"task_id": key, **episode})
            else:
                yield record

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        name = _trace_of(value) if isinstance(value, dict) else ""
        if not name:
            raise FieldError(_TRACE[0], "is missing: this is no episode")
        reward = value.get("reward")
        solved = value.get("success", bool(reward) if reward in (0, 1) else reward)
        problem = value.get("problem", value.get("start"))
        start, turns = _turns(value[name], problem is not None)
        if not turns:
            raise FieldError(name, "has no action")
        return EpisodeDraft.of_record(
            value,
            _KNOWN,
            start=start if problem is None else problem,
            turns=turns,
            task_id=value.get("task_id"),
            stop="terminated" if solved is True else None,
            success=solved,
        )


def _trace_of(record: dict[str, Any]) -> str:
    return next((name for name in _TRACE if isinstance(record.get(name), str)), "")


def _turns(trace: str, acts_first: bool) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first action, and the turns."""
    start: list[str] = []
    turns: list[dict[str, Any]] = []
    new_part = acts_first  # whether a line that begins with a space is an action
    for line in trace.replace("\r\n", "\n").split("\n"):  # a form feed ends no line
        action = _ACTION.fullmatch(line.rstrip())
        if action or (new_part and re.match(r" \S", line)):
            turns.append({"action": action[1] if action else line.strip(), "observation": []})
            new_part = False
        elif line.strip() in ("", ">"):
            new_part = new_part or line.strip() == ">"
        else:
            (turns[-1]["observation"] if turns else start).append(line)
    for turn in turns:
        turn["observation"] = "\n".join(turn["observation"])
    return "\n".join(start), turns
