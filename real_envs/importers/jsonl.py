"""The simplest way to bring one's own logs: a file with one episode a line, each a JSON object. Two such lines::

    {"task_id": "shop-3", "start": "Buy a red mug.", "turns": [{"action": "search mug", "observation": "3 results"}]}
    {"task_id": "shop-3", "start": "Buy a red mug.", "agent": "expert", "id": "a17", "stop": "terminated", "turns": [
        {"action": "search red mug", "observation": "1 result", "reward": 0},
        {"action": "buy", "observation": "Thank you!", "reward": 1, "terminated": true}]}   (on one line, too)

``task_id``, ``start`` and ``turns`` with ``action`` and ``observation`` are needed, the rest is optional:

- ``reward``: left out or null where nobody measured it, which is not 0. The rewards of a solved episode add up to 1.
- ``terminated``: the world ended with this turn, the last one. If left out: true in the last turn of an episode whose
  ``stop`` is ``terminated``, else false.
- ``stop``: why the episode ended, a value of ``StopReason``. If left out: ``terminated`` if the last turn is, else
  ``turn_limit``, since the world would have gone on. An episode without turns needs a failure such as ``env_crashed``.
- ``success``: of the episode, whether the task was solved; left out or null where only the rewards say so.
- ``agent``: who acted, ``log`` if left out. Episodes of the agent ``expert`` get the source ``expert``, all others
  ``real``.
- ``reasoning``: of a turn, what somebody thought about the action before the world answered; a world model that
  reasons first learns to write it. It is kept as ``info["reasoning"]`` and read by nobody else.
- ``world_facts``: lines that only the world knows, such as what a simulated user was told to want. The world model may
  read them (``worldmodel.facts``), no policy ever does.
- ``id``: unique in a store; the file's name and line, such as ``shop/17``, if left out.

Null stands for left out. Other keys are errors, because a misspelt ``rewards`` must not pass for a log without any.
Blank lines are skipped. ``imagine import jsonl`` puts such files into a run, and keeps keys that resemble none of ours
as notes. From Python, into any store::

    episodes = import_jsonl("shop.jsonl")
    tasks = sorted({episode.task_id for episode in episodes})
    TrajectoryStore.create("logs/shop", {"train": tasks[:80], "test": tasks[80:]}).append(episodes)
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from real_envs.importers.drafts import EpisodeDraft, Format, Reading, check_fields, finish, notes
from real_envs.importers.records import Sample
from real_envs.store import StoreError
from real_envs.store.codec import FieldError, nearest
from real_envs.trajectory import Trajectory

_EPISODE_KEYS = frozenset(("id", "task_id", "start", "turns", "stop", "agent", "success", "world_facts"))
_MEASURED = ("action", "observation", "reward", "terminated")
_TURN_KEYS = frozenset((*_MEASURED, "reasoning"))
_ADVICE = "The format is told in real_envs/importers/jsonl.py."


def import_jsonl(path: str | Path) -> list[Trajectory]:
    """The episodes of a file, in its order.

    Raises:
        StoreError: the file cannot be read, a line or a field is wrong (both are named), or no episode has an action.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError.about(path, f"cannot be read: {error.strerror}", "Check the path.") from error
    episodes: list[Trajectory] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
            if not isinstance(record, dict):
                raise ValueError(f"it is {record!r:.60}")
            episode, _ = finish(draft_of(record), name=f"{path.stem}/{number}")
            if episode.id in line_of:
                raise FieldError("id", f"is '{episode.id}', like that of line {line_of[episode.id]}")
        except FieldError as error:
            raise StoreError.about(path, f"line {number}, {error}", _ADVICE) from None
        except (ValueError, RecursionError) as error:
            raise StoreError.about(path, f"line {number} is no JSON object: {error}", _ADVICE) from None
        line_of[episode.id] = number
        episodes.append(episode)
    if not any(turn.action.strip() for episode in episodes for turn in episode.turns):
        raise StoreError.about(path, f"no episode has an action ({len(episodes)} episodes)", _ADVICE)
    return episodes


class OwnJsonLines(Format):
    """The format of this file, for ``imagine import``."""

    name = "jsonl"
    about = "our own JSON lines: task_id, start, turns of action, observation, reward (docs/your-logs.md)"
    as_spoken = True
    marks = ("turns", "start")

    def recognises(self, sample: Sample) -> str:
        turns = sample.record.get("turns") if isinstance(sample.record, dict) else None
        named = isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "action" in turns[0]
        return "its records have 'turns' with 'action'" if named else ""

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        if not isinstance(value, dict):
            raise FieldError("", f"is no JSON object: it is {value!r:.60}")
        return draft_of(value, others=True)


def draft_of(record: Mapping[str, Any], others: bool = False) -> EpisodeDraft:
    """
    Args:
        others: keep keys that are not ours as notes, unless they look like a misspelt one of ours.

    Raises:
        FieldError: a key is unknown, ``task_id`` is missing, or ``turns`` is no list.
    """
    extra = _others(record, _EPISODE_KEYS, "", others)
    if record.get("task_id") is None:
        raise FieldError("task_id", "is null or missing, not text")
    turns = record.get("turns")
    if not isinstance(turns, list):
        raise FieldError("turns", f"is {'null or missing' if turns is None else repr(turns)[:60]}, not a list")
    made = []
    for i, turn in enumerate(turns):
        if isinstance(turn, dict):  # else decode tells
            extra_notes = _others(turn, _TURN_KEYS, f"turns[{i}].", others)
            info = notes(extra_notes)[0] if extra_notes else {}
            if (reasoning := turn.get("reasoning")) is not None:
                if not isinstance(reasoning, str):
                    raise FieldError(f"turns[{i}].reasoning", f"is {reasoning!r:.60}, not text")
                info["reasoning"] = reasoning
            turn = {key: turn.get(key) for key in _MEASURED}
            turn["info"] = info
        made.append(turn)
    return EpisodeDraft(**{key: record.get(key) for key in _EPISODE_KEYS} | {"turns": made, "extra": extra})


def _others(record: Mapping[str, Any], known: frozenset[str], at: str, kept: bool) -> dict[str, Any]:
    """The keys that are not ours."""
    if record.keys() <= known:
        return {}
    check_fields(record)
    others = {str(key): value for key, value in record.items() if key not in known}
    for key in others:
        if not kept or _misspelt(key, known):
            raise FieldError(f"{at}{key}", f"is unknown; {nearest(key, known)}")
    return others


@lru_cache(1024)  # the records of a log have the same keys
def _misspelt(key: str, known: frozenset[str]) -> bool:
    return bool(difflib.get_close_matches(key, known, n=1, cutoff=0.75))
