"""Chat messages, and what the importers make of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from real_envs.importers.drafts import Reading
from real_envs.importers.formats import Imported, RejectedRecord, find_format, read
from real_envs.trajectory import Trajectory


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | more


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def agent(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def items(path: Path, name: str = "auto", **reading: Any) -> tuple[list[Trajectory], list[RejectedRecord]]:
    """What is imported, and what is refusals."""
    found = list(read(path, find_format(name, path)[0], Reading(**reading)))
    return [i.episode for i in found if isinstance(i, Imported)], [i for i in found if isinstance(i, RejectedRecord)]


def only(path: Path, name: str = "auto", **reading: Any) -> Trajectory:
    episodes, refusals = items(path, name, **reading)
    assert refusals == []
    (episode,) = episodes
    return episode


def only_of(folder: Path, *records: object, name: str = "log.jsonl") -> Trajectory:
    """The episode of a file with these records, one a line."""
    return only(write(folder / name, "\n".join(map(json.dumps, records))))


def steps(episode: Trajectory) -> list[tuple[str, str]]:
    return [(turn.action, turn.observation) for turn in episode.turns]


def left_out(episode: Trajectory) -> dict[str, Any]:
    """The parts of an episode that are not in its turns, by their kind."""
    mark = "log.left_out."
    return {key.removeprefix(mark): value for key, value in episode.turns[-1].info.items() if key.startswith(mark)}
