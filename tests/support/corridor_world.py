"""The corridors of ``tests.support.tiny`` as a world of another package: slow if wanted, and it keeps a journal.

``register`` makes an entry point of it for this process and all that it starts. Workers import this module, so it
imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from real_envs.env import Agent, StepResult, Task
from real_envs.trajectory import Observation
from real_envs.worker_pool import PooledTasks
from real_envs.world import FILE, GROUP
from tests.support.faults import NEW, Elsewhere
from tests.support.tiny import TASKS

ROOT = Path(__file__).parents[2]


@dataclass
class CorridorSettings:
    seconds: float = 0.0  #: that a step takes
    journal: str = ""  #: file with a line for each request that came to a world


class CorridorWorld:
    """A ``World``."""

    name, settings, invalid, elsewhere = "corridors", CorridorSettings, "Nothing new", False

    def generate(
        self,
        folder: Path,
        counts: Mapping[str, int],
        seed: int,
        settings: Any,
        progress: Callable[[int, int], None],
        workers: int,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(asdict(settings)))

    def open(self, folder: Path, privileged: bool, workers: int) -> PooledTasks:
        settings = CorridorSettings(**json.loads((folder / FILE).read_text()))
        factory = partial(_Journalled, settings.seconds, settings.journal)
        tasks = {"train": [Task(name) for name in TASKS], "heldout": [Task(f"{NEW}{name}") for name in TASKS]}
        return PooledTasks(tasks, factory, workers)

    def behaviours(self, elsewhere: Sequence[str]) -> Sequence[tuple[Agent, float]]:
        return [(Walker(), 1.0)]


class _Journalled(Elsewhere):
    def __init__(self, seconds: float, journal: str) -> None:
        super().__init__(seconds)
        self._journal = journal

    def reset(self, task: Task, seed: int) -> Observation:
        self._write("reset")
        return super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        self._write("step")
        return super().step(action)

    def _write(self, request: str) -> None:
        if self._journal:
            with open(self._journal, "a") as file:  # one small write at the end of a file: whole, also side by side
                file.write(f"{request}\n")


class Walker:
    """An agent, and each of its actors: goes east or west, and takes what is there, at the right time or not."""

    name = "noisy"
    _rng: random.Random

    def start(self, observation: Observation, seed: int) -> Walker:
        walker = Walker()
        walker._rng = random.Random(seed)
        return walker

    async def act(self) -> str:
        return self._rng.choice(["go east", "go west", "take lamp", "take book"])

    def observe(self, observation: Observation) -> None: ...

    def trace(self) -> None: ...

    def close(self) -> None: ...


def requests(journal: Path) -> Counter[str]:
    """What came to the worlds: ``reset`` and ``step``."""
    return Counter(journal.read_text().split()) if journal.exists() else Counter()


def register(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """``env=corridors`` is this world."""
    package = folder / "corridors-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: corridors\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[{GROUP}]\ncorridors = {__name__}:{CorridorWorld.__name__}\n")
    patch.syspath_prepend(str(folder))
    patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))))
    assert str(folder) in sys.path
