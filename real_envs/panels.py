"""Panels: held-out tasks that stay the same for every seed, model and version of this project.

Scores of different tasks cannot be compared, and environments change what a task is from version to version. A panel's
file names the world, its options, the package that plays it with its version, the rule by which the tasks were chosen,
and of each task how it is made and a digest of its first text. What differs is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from real_envs.errors import UserError


@dataclass(frozen=True, slots=True)
class Panel:
    """Held-out tasks. ``tasks[i]`` is how the world writes a task down (in ``games.json``), ``starts[i]`` the digest of
    its first text. ``alike`` are tasks of training folds that begin as one of them, where the world cannot tell that
    from a text that it has not opened yet: nobody trains in them."""

    world: str
    options: dict[str, Any]  # those of the world that must agree
    package: str  # such as "minigrid==3.0.0"
    rule: str  # how the tasks were chosen, for readers
    tasks: list[Any]
    starts: list[str]
    alike: list[Any] = field(default_factory=list)

    @staticmethod
    def load(path: Path) -> Panel:
        """Raises ``UserError``: the file is missing, torn, or no panel."""
        try:
            panel = Panel(**json.loads(path.read_text()))
            if not panel.tasks or len(panel.tasks) != len(panel.starts):
                raise ValueError(f"{len(panel.tasks)} tasks and {len(panel.starts)} starts")
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"games.panel={path}: missing, torn, or no panel: {error}") from error
        return panel

    def text(self) -> str:
        """The file."""
        return json.dumps(self._fields(), indent=1) + "\n"

    @property
    def digest(self) -> str:
        return digest(json.dumps(self._fields(), sort_keys=True))

    def _fields(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "alike" or value}

    def check(self, world: str, package: str, options: Mapping[str, Any]) -> None:
        """Raises ``UserError``: it is of another world, version or option than those that would be played."""
        if world != self.world:
            raise UserError(f"games.panel is of env={self.world}, not env={world}")
        if (here := installed(package)) != self.package:
            raise UserError(
                f"games.panel is of {self.package}, and {here} is here: scores of two versions cannot be compared"
            )
        for key, value in self.options.items():
            if options.get(key) != value:
                raise UserError(f"games.panel is of env.options.{key}={value}, not {options.get(key)}")

    def check_starts(self, texts: Sequence[str]) -> None:
        """Raises ``UserError``: a task does not begin as it did."""
        for number, (text, start) in enumerate(zip(texts, self.starts, strict=True)):
            if digest(text) != start:
                raise UserError(f"games.panel: task {number} ({self.tasks[number]}) does not begin as it did: {text!r}")


def digest(text: str) -> str:
    """Of a first text, 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def installed(package: str) -> str:
    """Such as ``minigrid==3.0.0``."""
    try:
        return f"{package}=={version(package)}"
    except PackageNotFoundError:
        return f"{package} (not installed)"
