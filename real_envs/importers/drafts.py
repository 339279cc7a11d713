"""The base of all formats, what a format reads from a record, and the one place where that becomes an episode.

A ``Format`` turns each record of its files into an ``EpisodeDraft`` with unchecked values; ``finish`` checks each of
them and names the field that is wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from real_envs.importers.ends import flag
from real_envs.importers.messages import THINKS, apart
from real_envs.importers.records import Record, Sample, json_records
from real_envs.store.codec import FieldError, decode, entries, nearest
from real_envs.trajectory import NO_ANSWER, Source, StopReason, Trajectory

_FAILURES = frozenset(reason.value for reason in StopReason if reason.is_failure)
LOG = "log."  # prefix of the keys of ``Turn.info`` that hold other fields of a record
THOUGHT = f"{LOG}thought"
LEFT_OUT = f"{LOG}left_out."  # of those that count parts that are not in the turns
ANSWER = NO_ANSWER.removeprefix(LEFT_OUT)  # is left out where an episode was cut before the world answered
_HALF = re.compile("[\ud800-\udfff]")
_TRUTH = {"true": True, "false": False}  # as tables of text have them
LABELS = ("task", "agent", "success", "reward")  # what a mapping may name in every format
_LONGEST_NOTE = 500  # characters of a text that is kept there
_MOST_FIELDS = 10_000  # of a record, or of a turn


@dataclass(frozen=True, slots=True)
class Reading:
    """How the records of a file are to be understood where the format leaves it open."""

    agent: str = "log"
    system: bool = True
    # columns by what they are: ``{"action": "cmd", "observation": "out"}``
    mapping: Mapping[str, str] = field(default_factory=dict)
    # whether a mapped observation was seen before or after the action beside it; "" is unknown, an error where the
    # table does not show it
    observation: Literal["", "before", "after"] = ""
    reward: Literal["step", "cumulative"] = "step"  # whether a mapped reward is what a step earned or the score so far
    # whether a mapped done means that the world ended, or only that the episode did (time-outs, too)
    done: Literal["terminated", "ended"] = "terminated"
    # of the values of discrete spaces, by space: ``{"action": ["left", "right"]}``
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(slots=True)
class EpisodeDraft:
    """An episode as a record states it. Nothing in it has been checked; ``None`` is not stated."""

    start: object
    turns: object  # dicts of ``action``, ``observation`` and, where known, ``reward``, ``terminated``, ``info``
    task_id: object = None
    agent: object = None
    stop: object = None
    success: object = None
    reward: object = None  # of the whole episode: its last turn earned it, the others 0
    failure: str | None = None  # what broke, where ``stop`` is a failure
    id: object = None
    world_facts: object = None  # what the world knows and no policy may read, a line each (``Task.world_facts``)
    # other fields of the record; numbers, flags and short texts are kept with the last turn
    extra: Mapping[str, Any] = field(default_factory=dict)
    # parts of actions and answers that are not in the turns, by their kind; the last turn keeps the counts as notes
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id, self.task_id = (None if name == "" else name for name in (self.id, self.task_id))

    @classmethod
    def of_record(cls, record: Mapping[str, Any], used: Collection[str], **stated: Any) -> EpisodeDraft:
        """A draft with the agent and the id that a JSON record names; keys that are not ``used`` are ``extra``."""
        known, name = {*used, "agent", "model", "id"}, record.get("id")
        return cls(
            agent=record.get("agent") or record.get("model"),
            id=str(name) if isinstance(name, int) else name,
            extra={key: value for key, value in record.items() if key not in known},
            **stated,
        )


class Dialogue:
    """A conversation as a start and turns: what the agent says is an action, all others are its world.

    ``left_out`` counts parts that are in neither, by their kind. ``unread`` is why a part of the turn, or of the start,
    cannot stand alone.
    """

    def __init__(self) -> None:
        self.start: list[str] = []
        self.turns: list[dict[str, Any]] = []
        self.left_out: Counter[str] = Counter()
        self.unread: FieldError | None = None
        self._calls: list[str] = []  # of the last turn, by their ids; "" where one is unknown
        self._answers: list[tuple[str, str | None]] = []  # what it was answered, with the id of the call
        self._within: list[tuple[str, str]] = []  # what its calls themselves say that they were answered

    @property
    def unanswered(self) -> bool:
        return bool(self.turns) and self.turns[-1]["observation"] is None

    def act(
        self,
        action: str,
        thoughts: Collection[str] = (),
        calls: Collection[str] = (),
        within: Collection[tuple[str, str]] = (),
    ) -> None:
        """Two messages in a row are one action; thoughts are a note of its turn, ``calls`` the ids of its calls.

        ``within``: answers that stand within calls, with the ids of these; read where no message answers the call.
        """
        self._add_within()
        if not self.unanswered:
            self._close_turn()
            self.turns.append({"action": "", "observation": None, "info": {}})
        self._calls += calls
        self._within += within
        turn = self.turns[-1]
        turn["action"] = "\n".join(filter(None, (turn["action"], action)))
        if thoughts:
            before = turn["info"].get(THOUGHT)
            turn["info"][THOUGHT] = "\n\n".join(filter(None, (before, *thoughts)))

    def answer(self, text: str, error: bool = False, parts: Collection[tuple[str, str | None]] = ()) -> None:
        """What the world says: the start, or the rest of the last observation. Who said nothing before did not act.

        ``parts``: those of the text, each with the id of the call that it answers; ``None`` where it answers none.
        """
        if self.unanswered and not self.turns[-1]["action"].strip() and THOUGHT not in self.turns[-1]["info"]:
            self.turns.pop()
            self.left_out["message without an action"] += 1
        if not self.turns:
            self.start.append(text)
            return
        turn = self.turns[-1]
        before = len(self._answers)
        for part in parts:
            if not (self._answers and self._is_repeated(part)):
                self._answers.append(part)
        if repeated := before + len(parts) - len(self._answers):
            self.left_out["repeated answer"] += repeated
            text = "\n".join(filter(None, (answer for answer, _ in self._answers[before:])))
        turn["observation"] = "\n".join(filter(None, (turn["observation"], text)))
        if error:
            turn["info"][f"{LOG}is_error"] = True

    def _is_repeated(self, part: tuple[str, str | None]) -> bool:
        """Whether a call of the last turn has this very answer, and is there no second time."""
        return bool(part[1]) and self._calls.count(str(part[1])) == 1 and part in self._answers

    def _add_within(self) -> None:
        """The answers that stand within calls, where no message has answered these; before what else was said."""
        answered = {call for _, call in self._answers if call is not None}
        left = [
            (text, call) for text, call in self._within if not answered or (call and answered.isdisjoint((call, "")))
        ]
        self._within = []
        if left:
            texts = [*(text for text, _ in left), self.turns[-1]["observation"]]
            self.turns[-1]["observation"] = "\n".join(filter(None, texts))
            self._answers[:0] = left

    def _close_turn(self) -> None:
        """Puts the answers of the last turn in the order of its calls, where all ids are known.

        A call without an answer is counted. Raises ``FieldError``: what the world said, here or at the start, has parts
        that are no text, and no other.
        """
        if self.unread and not (self.turns[-1]["observation"] if self.turns else "".join(self.start)):
            raise self.unread
        self.unread = None
        calls, parts, self._calls, self._answers = self._calls, self._answers, [], []
        if len(calls) < 2:
            return
        answers = {call: text for text, call in parts if call is not None}
        unique = len(answers) == sum(call is not None for _, call in parts) and len(set(calls)) == len(calls)
        if not answers or not unique or "" in calls or not answers.keys() <= set(calls):
            return
        self.left_out["answer to a call"] += len(calls) - len(answers)
        in_order = (answers[call] for call in calls if call in answers)
        texts = [text if call is None else next(in_order) for text, call in parts]
        self.turns[-1]["observation"] = "\n".join(filter(None, texts))

    def end(self, stop: StopReason | None, called: bool = False, judged: bool = False) -> StopReason | None:
        """Gives a last action without an answer an empty observation; returns why the episode ended, where that is
        known.

        It ended there unless something else is known, or it ``called`` a tool and nobody ``judged`` the episode: then
        the missing answer counts as left out.
        """
        self._add_within()
        self._close_turn()
        if not self.unanswered:
            return stop
        if not self.turns[-1]["action"].strip():
            last = self.turns.pop()
            self.left_out["last message without an action"] += 1
            # who says nothing has done; a thought alone may have been cut
            return StopReason.TERMINATED if stop is None and THOUGHT not in last["info"] else stop
        if stop is None:
            stop = StopReason.TURN_LIMIT if called and not judged else StopReason.TERMINATED
        if stop is not StopReason.TERMINATED:
            self.left_out[ANSWER] += 1
        self.turns[-1]["observation"] = ""
        return stop


class Format(ABC):
    """A file format of logged episodes.

    Attributes:
        marks: fields of its records; a file in no format is nearest to the one of which it has the most.
        as_spoken: actions may be all that a model wrote, its thoughts included.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()
    as_spoken: ClassVar[bool] = False

    @abstractmethod
    def recognises(self, sample: Sample) -> str:
        """Why a file is of this format, such as "its records have 'turn_history'"; "" where it is not."""

    def records(self, path: Path) -> Iterator[Record]:
        """Those of JSON unless a format says otherwise."""
        return json_records(path)

    @abstractmethod
    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        """Raises ``FieldError`` where the record is not of this format."""

    def columns(self, value: Any) -> Mapping[str, Any]:
        """What ``Reading.mapping`` may name in a record."""
        return value if isinstance(value, dict) else {}


def check_fields(record: object) -> None:
    """Raises ``FieldError``: it has more fields than anybody writes."""
    if isinstance(record, dict) and len(record) > _MOST_FIELDS:
        raise FieldError("", f"has {len(record):,} fields, and {_MOST_FIELDS:,} are the most")


def with_columns(draft: EpisodeDraft, columns: Mapping[str, Any], mapping: Mapping[str, str]) -> EpisodeDraft:
    """The draft with what mapped columns (``LABELS``) say of the whole episode; ``info.resolved`` lies within ``info``.

    Raises:
        FieldError: there is no such column.
    """
    if not mapping:
        return draft
    given: dict[str, Any] = {}
    for label in LABELS:
        if (name := mapping.get(label)) is not None:
            given[label] = column(columns, name)
    extra = {key: note for key, note in draft.extra.items() if key not in mapping.values()}
    changed: dict[str, Any] = {"extra": extra}
    if given.get("task") is not None:
        changed["task_id"] = str(given["task"])
    if "agent" in given:
        changed["agent"] = given["agent"]
    if "reward" in given:
        reward = given["reward"]
        changed |= outcome(None if reward in (None, "") else _number(mapping["reward"], reward))
    if given.get("success") not in (None, ""):
        changed["success"] = flag(given["success"])
        if changed["success"] is None:
            raise FieldError(mapping["success"], f"is {given['success']!r:.40}, not true or false")
    return replace(draft, **changed)


def column(columns: Mapping[str, Any], name: str) -> Any:
    if name in columns:
        return columns[name]
    first, dot, rest = name.partition(".")
    if dot and isinstance(columns.get(first), Mapping):
        try:
            return column(columns[first], rest)
        except FieldError as error:
            raise FieldError(name, error.reason) from None
    raise FieldError(name, f"is no column; {nearest(name, columns)}")


def _number(name: str, value: object) -> object:
    """A reward of a table of texts. Raises ``FieldError``: it is no number."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = math.nan
    if isinstance(number, int | float) and math.isfinite(number):
        return number
    raise FieldError(name, f"is {value!r:.40}, not a finite number")


def finish(draft: EpisodeDraft, agent: str = "log", name: str = "") -> tuple[Trajectory, tuple[str, ...]]:
    """The episode of a draft, and the names of the fields that have no place in it.

    Args:
        agent: who acted, where the draft names nobody.
        name: the episode's id where the draft has none. To one that ends in "/" a hash of the episode is added, so
            the same episode has the same id in every import.

    Raises:
        FieldError: something is missing or wrong.
    """
    if not isinstance(draft.turns, list):
        shown = "null or missing" if draft.turns is None else repr(draft.turns)[:60]
        raise FieldError("turns", f"is {shown}, not a list")
    turns = [dict(turn) if isinstance(turn, Mapping) else turn for turn in draft.turns]
    kept, left_out = notes(draft.extra)
    kept |= {f"{LEFT_OUT}{kind}": count for kind, count in draft.left_out.items() if count}
    if draft.reward is not None and (isinstance(draft.reward, bool) or not isinstance(draft.reward, int | float)):
        raise FieldError("reward", f"is {draft.reward!r:.60}, not a number")
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            continue  # decode tells
        last = i == len(turns) - 1
        if turn.get("terminated") is None:
            turn["terminated"] = last and draft.stop == StopReason.TERMINATED
        if turn["terminated"] is True and not last:
            raise FieldError(f"turns[{i}].terminated", "is true, but turns follow")
        if draft.reward is not None:
            turn["reward"] = draft.reward if last else 0.0
        info = turn.get("info", {})
        turn["info"] = entries({**info, **kept} if last else info) if info or last else []
    actor = draft.agent if draft.agent is not None else agent
    ended = bool(turns) and isinstance(turns[-1], dict) and turns[-1]["terminated"] is True
    stop = draft.stop if draft.stop is not None else (StopReason.TERMINATED if ended else StopReason.TURN_LIMIT).value
    task = f"task-{_digest(draft.start)}" if draft.task_id is None else draft.task_id
    row = {
        "id": name if draft.id is None else draft.id,
        "task_id": task,
        "group_id": f"{task}/{actor}",
        "source": (Source.EXPERT if actor == "expert" else Source.REAL).value,
        "agent": actor,
        "seed": 0,
        "start": draft.start,
        "turns": turns,
        "stop": stop,
        "prefix_turns": 0,
        "failure": (
            (draft.failure or f"logged with the stop '{stop}'") if isinstance(stop, str) and stop in _FAILURES else None
        ),
        "success": _flag(draft.success),
        "world_facts": draft.world_facts,
    }
    if draft.id is None and name.endswith("/"):
        row["id"] = name + _digest([row[key] for key in ("task_id", "agent", "start", "turns", "stop", "success")])
    episode = decode(row)
    if not turns and not episode.stop.is_failure:
        raise FieldError("turns", "is empty, but 'stop' names no failure such as 'env_crashed'")
    if turns and ended != (episode.stop is StopReason.TERMINATED):
        raise FieldError("stop", f"is '{stop}', but 'terminated' of the last turn is {str(ended).lower()}")
    return episode, left_out


def with_thoughts_apart(draft: EpisodeDraft) -> EpisodeDraft:
    """The draft with the thoughts that its actions begin with, ``<think>...</think>``, as notes of their turns."""
    for turn in draft.turns if isinstance(draft.turns, list) else ():
        if isinstance(turn, dict) and isinstance(action := turn.get("action"), str) and THINKS.match(action):
            thoughts, turn["action"], _ = apart(action)
            info = turn.get("info")
            notes = {THOUGHT: "\n\n".join(thoughts)} if thoughts else {}
            turn["info"] = {**info, **notes} if isinstance(info, dict) else notes
    return draft


def with_whole_characters(draft: EpisodeDraft) -> EpisodeDraft:
    """The draft with U+FFFD for half surrogate pairs, which UTF-8 cannot hold, and bytes that are no UTF-8; counted."""
    replaced = 0

    def whole(value: Any) -> Any:
        nonlocal replaced
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                value, count = _HALF.subn("\ufffd", value)
                replaced += count
        return value

    def whole_turn(turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        info = turn.get("info")
        notes = {"info": {key: whole(note) for key, note in info.items()}} if isinstance(info, dict) else {}
        return {key: whole(value) for key, value in turn.items()} | notes

    turns = list(map(whole_turn, draft.turns)) if isinstance(draft.turns, list) else draft.turns
    plain = {name: whole(getattr(draft, name)) for name in ("start", "task_id", "agent", "id", "failure")}
    if isinstance(draft.world_facts, list):
        plain["world_facts"] = list(map(whole, draft.world_facts))
    extra = {whole(key): whole(value) for key, value in draft.extra.items()}
    if not replaced:
        return draft
    left_out = Counter(draft.left_out) + Counter({"unreadable character": replaced})
    return replace(draft, turns=turns, extra=extra, left_out=left_out, **plain)


def outcome(value: object) -> dict[str, Any]:
    """A record's ``reward`` as a draft takes it: true and false are a success, numbers a reward."""
    return {"success": value} if isinstance(value, bool) else {"reward": value}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode("utf-8", "replace")).hexdigest()[:12]


def _flag(value: object) -> object:
    """Tables and JSON of other languages write 0 and 1 for false and true, or words."""
    value = _TRUTH.get(value.lower(), value) if isinstance(value, str) else value
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def notes(extra: Mapping[str, Any]) -> tuple[dict[str, float | str | bool], tuple[str, ...]]:
    """The values that a turn's ``info`` can hold, under keys with the prefix ``log.``, and the names of the others."""
    kept: dict[str, float | str | bool] = {}
    left_out = []
    for key, value in extra.items():
        if (isinstance(value, bool | int | float) and math.isfinite(value)) or (
            isinstance(value, str) and len(value) <= _LONGEST_NOTE
        ):
            kept[f"{LOG}{key}"] = value
        elif value is not None:
            left_out.append(str(key))
    return kept, tuple(left_out)
