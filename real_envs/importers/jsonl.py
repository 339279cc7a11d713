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
- ``agent``: who acted, ``log`` if left out. Episodes of the agent ``expert`` get the source ``expert``, all others
  ``real``.
- ``reasoning``: of a turn, what somebody thought about the action before the world answered; a world model that
  reasons first learns to write it. It is kept as ``info["reasoning"]`` and read by nobody else.
- ``id``: unique in a store; the file's name and line, such as ``shop/17``, if left out.

Null stands for left out. Other keys are errors, because a misspelt ``rewards`` must not pass for a log without any.
Blank lines are skipped. To keep a log, put it into a store::

    episodes = import_jsonl("shop.jsonl")
    print(coverage(episodes))
    tasks = sorted({episode.task_id for episode in episodes})
    TrajectoryStore.create("logs/shop", {"train": tasks[:80], "test": tasks[80:]}).append(episodes)
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from real_envs.manifest import StoreError
from real_envs.rows import FieldError, decode, nearest
from real_envs.trajectory import Source, StopReason, Trajectory

_FAILURES = frozenset(reason.value for reason in StopReason if reason.is_failure)
_EPISODE_KEYS = ("id", "task_id", "start", "turns", "stop", "agent")
_TURN_KEYS = ("action", "observation", "reward", "terminated", "reasoning")
_ADVICE = "The format is told in real_envs/importers/jsonl.py."


def import_jsonl(path: str | Path) -> list[Trajectory]:
    """The episodes of a file, in its order; ``importers.coverage`` tells what they cover.

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
            episode = _episode(line, default_id=f"{path.stem}/{number}")
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


def _episode(line: bytes, default_id: str) -> Trajectory:
    record = json.loads(line.decode("utf-8-sig"))
    if not isinstance(record, dict):
        raise ValueError(f"it is {record!r:.60}")
    _check_keys(record, _EPISODE_KEYS, "")
    turns = record.get("turns")
    if not isinstance(turns, list):
        raise FieldError("turns", f"is {'null or missing' if turns is None else repr(turns)[:60]}, not a list")
    for i, turn in enumerate(turns):
        if isinstance(turn, dict):  # else decode tells
            _check_keys(turn, _TURN_KEYS, f"turns[{i}].")
            last = i == len(turns) - 1
            if _given(turn, "reasoning", None) is not None:
                turn["info"] = [{"key": "reasoning", "text": turn["reasoning"]}]
            turn["terminated"] = _given(turn, "terminated", last and record.get("stop") == StopReason.TERMINATED)
            if turn["terminated"] is True and not last:
                raise FieldError(f"turns[{i}].terminated", "is true, but turns follow")
    agent = _given(record, "agent", "log")
    ended = bool(turns) and isinstance(turns[-1], dict) and turns[-1]["terminated"] is True
    stop = _given(record, "stop", (StopReason.TERMINATED if ended else StopReason.TURN_LIMIT).value)
    episode = decode(
        {
            "id": _given(record, "id", default_id),
            "task_id": record.get("task_id"),
            "group_id": f"{record.get('task_id')}/{agent}",
            "source": (Source.EXPERT if agent == "expert" else Source.REAL).value,
            "agent": agent,
            "seed": 0,
            "start": record.get("start"),
            "turns": turns,
            "stop": stop,
            "prefix_turns": 0,
            "failure": f"logged with the stop '{stop}'" if isinstance(stop, str) and stop in _FAILURES else None,
        }
    )
    if not turns and not episode.stop.is_failure:
        raise FieldError("turns", "is empty, but 'stop' names no failure such as 'env_crashed'")
    if turns and ended != (episode.stop is StopReason.TERMINATED):
        raise FieldError("stop", f"is '{stop}', but 'terminated' of the last turn is {str(ended).lower()}")
    return episode


def _given(record: dict[str, object], key: str, default: object) -> object:
    return default if record.get(key) is None else record[key]


def _check_keys(record: dict[str, object], known: Collection[str], at: str) -> None:
    for key in record:
        if key not in known:
            raise FieldError(f"{at}{key}", f"is unknown; {nearest(key, known)}")
