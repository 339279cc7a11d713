"""What a format reads out of a record, and the one place where that is checked and becomes an episode.

A format (``formats.Format``) turns each record of its files into a ``Draft``, whose values are as they were found;
``finish`` looks at every one of them and names the field that is wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from real_envs.rows import FieldError, decode, entries
from real_envs.trajectory import Source, StopReason, Trajectory

_FAILURES = frozenset(reason.value for reason in StopReason if reason.is_failure)
LOG = "log."  # how the keys of ``Turn.info`` begin that hold what else a record said
_LONGEST_NOTE = 500  # characters of a text that is kept as such


@dataclass(frozen=True, slots=True)
class Reading:
    """How the records of a file are to be understood where the format leaves it open.

    Attributes:
        agent: who acted, where a record names nobody.
        system: whether system messages belong to what the agent sees at the start.
        mapping: columns by what they are: ``{"action": "cmd", "observation": "out"}``.
        observation: of mapped columns: whether an observation was seen before or after the action beside it; "" is
            unsaid, which is an error where it cannot be seen.
        reward: of mapped columns: what a step earned, or the score so far.
        done: of mapped columns: whether it means that the world ended, or only that the episode did (time-outs, too).
        names: of the values of discrete spaces, by space: ``{"action": ["left", "right"]}``.
    """

    agent: str = "log"
    system: bool = True
    mapping: Mapping[str, str] = field(default_factory=dict)
    observation: Literal["", "before", "after"] = ""
    reward: Literal["step", "cumulative"] = "step"
    done: Literal["terminated", "ended"] = "terminated"
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Draft:
    """An episode as a record states it. Nothing in it has been checked, and ``None`` is unsaid.

    Attributes:
        start: what was seen first, goal included.
        turns: structs of ``action``, ``observation`` and, where known, ``reward``, ``terminated``, ``info``.
        reward: of the whole episode, where the record states no other: its last turn earned it, the others nothing.
        extra: what else the record says; numbers, flags and short texts are kept with the last turn.
    """

    start: object
    turns: object
    task_id: object = None
    agent: object = None
    stop: object = None
    success: object = None
    reward: object = None
    id: object = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def finish(draft: Draft, agent: str = "log", name: str = "") -> tuple[Trajectory, tuple[str, ...]]:
    """The episode of a draft, and the names of what had no place in it.

    Args:
        agent: who acted, where the draft names nobody.
        name: the episode's id where the draft has none. It ends in a hash of the episode where it ends in "/", so that
            the same episode has the same id in every import.

    Raises:
        FieldError: something is missing or wrong.
    """
    if not isinstance(draft.turns, list):
        raise FieldError("turns", f"is {_shown(draft.turns)}, not a list")
    turns = [dict(turn) if isinstance(turn, Mapping) else turn for turn in draft.turns]
    kept, left_out = notes(draft.extra)
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
    who = draft.agent if draft.agent is not None else agent
    ended = bool(turns) and isinstance(turns[-1], dict) and turns[-1]["terminated"] is True
    stop = draft.stop if draft.stop is not None else (StopReason.TERMINATED if ended else StopReason.TURN_LIMIT).value
    task = f"task-{_digest(draft.start)}" if draft.task_id is None else draft.task_id
    row = {
        "id": name if draft.id is None else draft.id,
        "task_id": task,
        "group_id": f"{task}/{who}",
        "source": (Source.EXPERT if who == "expert" else Source.REAL).value,
        "agent": who,
        "seed": 0,
        "start": draft.start,
        "turns": turns,
        "stop": stop,
        "prefix_turns": 0,
        "failure": f"logged with the stop '{stop}'" if isinstance(stop, str) and stop in _FAILURES else None,
        "success": _flag(draft.success),
    }
    if draft.id is None and name.endswith("/"):
        row["id"] = name + _digest([row[key] for key in ("task_id", "agent", "start", "turns", "stop", "success")])
    episode = decode(row)
    if not turns and not episode.stop.is_failure:
        raise FieldError("turns", "is empty, but 'stop' names no failure such as 'env_crashed'")
    if turns and ended != (episode.stop is StopReason.TERMINATED):
        raise FieldError("stop", f"is '{stop}', but 'terminated' of the last turn is {str(ended).lower()}")
    return episode, left_out


def outcome(value: object) -> dict[str, Any]:
    """A record's ``reward`` as a draft takes it: true and false are a success, numbers a reward."""
    return {"success": value} if isinstance(value, bool) else {"reward": value}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode("utf-8", "replace")).hexdigest()[:12]


def _flag(value: object) -> object:
    """Tables and JSON of other languages write 0 and 1 for false and true."""
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def notes(extra: Mapping[str, Any]) -> tuple[dict[str, float | str | bool], tuple[str, ...]]:
    """What of it a turn's ``info`` can hold, under keys that begin with ``log.``, and the names of the rest."""
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


def _shown(value: object) -> str:
    return "null or missing" if value is None else repr(value)[:60]
