"""A real environment some of whose steps kill it, hang, raise or answer garbage, and which says so in a ledger.

Workers import this module, so it imports nothing heavy.

What happens at a step is drawn from the seed of the faults, the episode's and the step's number alone: neither the
worker that plays it nor the time it takes change it, and who is not hit plays as if there were no faults.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from real_envs.env import Env, StepResult, Task
from real_envs.trajectory import Observation, StopReason
from real_envs.worker_pool import SyncEnv, WorkerPool
from tests.support.tiny import TASKS, start


class Unpickled:
    """Can be sent, and raises where it is received."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_raise, ())


def _raise() -> None:
    raise RuntimeError("only the worker could have built this")


GARBAGE: dict[str, Callable[[StepResult], object]] = {
    "no result": lambda result: None,
    "a tuple": lambda result: (result.observation.text, result.reward, result.terminated, result.truncated, {}),
    "bytes": lambda result: replace(result, observation=Observation(b"You see a lamp.")),  # type: ignore[arg-type]
    "no observation": lambda result: replace(result, observation="You see a lamp."),  # type: ignore[arg-type]
    "no history": lambda result: replace(result, observation=Observation("A lamp.", history=(None,))),  # type: ignore[arg-type]
    "nan": lambda result: replace(result, reward=math.nan),
    "infinity": lambda result: replace(result, reward=math.inf),
    "huge": lambda result: replace(result, reward=10**400),
    "a word": lambda result: replace(result, reward="1"),  # type: ignore[arg-type]
    "a bool": lambda result: replace(result, reward=True),
    "numbers": lambda result: replace(result, terminated=0, truncated=1),  # type: ignore[arg-type]
    "both": lambda result: replace(result, terminated=True, truncated=True),
    "a failure": lambda result: replace(result, stop=StopReason.ENV_CRASHED),
    "a stop of words": lambda result: replace(result, stop="turn_limit"),  # type: ignore[arg-type]
    "an object": lambda result: replace(result, info={"page": object()}),  # type: ignore[dict-item]
    "no mapping": lambda result: replace(result, info=None),  # type: ignore[arg-type]
    "unpicklable": lambda result: replace(result, info={"page": lambda: None}),  # type: ignore[dict-item]
    "not unpicklable": lambda result: replace(result, info={"page": Unpickled()}),  # type: ignore[dict-item]
}
NEW = "new-"  # before the names of corridors elsewhere
# A fault and the counter of ``PoolStats`` that it belongs to.
KINDS = {"die": "crashes", "raise": "crashes", "hang": "timeouts", "garbage": "garbage"}


class Corridor:
    """The corridors of ``tests.support.tiny`` for a worker process; each step takes ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def reset(self, task: Task, seed: int) -> Observation:
        self._way, self._thing = TASKS[task.id]
        self._inside = False
        return Observation(start(task.id))

    def step(self, action: str) -> StepResult:
        time.sleep(self._seconds)
        if action == f"go {self._way}" and not self._inside:
            self._inside = True
            return StepResult(Observation(f"You walk {self._way}. Here is a {self._thing}."), 0.0, False, False)
        if action == f"take {self._thing}" and self._inside:
            return StepResult(Observation(f"You take the {self._thing}."), 1.0, True, False)
        return StepResult(Observation("Nothing new."), 0.0, False, False)

    def close(self) -> None: ...


class Elsewhere(Corridor):
    """The same corridors under names that no log of them has."""

    def reset(self, task: Task, seed: int) -> Observation:
        return super().reset(Task(task.id.removeprefix(NEW)), seed)


class Babbler(Corridor):
    """Answers with the kind of garbage that the action names; its reset with what the task asks for."""

    def reset(self, task: Task, seed: int) -> Observation:
        odd: dict[str, Any] = {
            "none": None,
            "text": "You stand in a corridor.",
            "bytes": Observation(b"You stand in a corridor."),  # type: ignore[arg-type]
            "unpicklable": Observation("A corridor.", {"page": lambda: None}),
            "not unpicklable": Observation("A corridor.", {"page": Unpickled()}),
        }
        return odd[task.id] if task.id in odd else super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        result = super().step("look")
        return GARBAGE[action](result) if action in GARBAGE else result  # type: ignore[return-value]


@dataclass(frozen=True)
class Faults:
    """A factory of faulty environments, to be sent to workers.

    Attributes:
        make: makes the honest environment.
        ledger: a line for each fault, written before it happens.
        share: of steps that are faulty.
    """

    make: Callable[[], SyncEnv]
    ledger: Path
    share: float = 0.3
    seed: int = 0

    def __call__(self) -> SyncEnv:
        return _Faulty(self.make(), self)

    def counted(self) -> Counter[str]:
        """What happened so far, by the counter of ``PoolStats`` that should have risen."""
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return Counter(KINDS[line.split()[0]] for line in lines)


class _Faulty:
    def __init__(self, honest: SyncEnv, faults: Faults) -> None:
        self._honest, self._faults = honest, faults

    def reset(self, task: Task, seed: int) -> Observation:
        self._chance = random.Random(f"{self._faults.seed}/{task.id}/{seed}")
        return self._honest.reset(task, seed)

    def step(self, action: str) -> StepResult:
        hit = self._chance.random() < self._faults.share
        kind, garbage = self._chance.choice(list(KINDS)), self._chance.choice(list(GARBAGE))
        result = self._honest.step(action)
        if not hit:
            return result
        with open(self._faults.ledger, "a") as file:  # one small write at the end of a file: whole, also side by side
            file.write(f"{kind} {garbage if kind == 'garbage' else ''}\n")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(600)
        if kind == "raise":
            raise ValueError("the world is flat")
        return GARBAGE[garbage](result)  # type: ignore[return-value]

    def close(self) -> None:
        self._honest.close()


class PlantedTasks:
    """The corridors as a ``TaskSet`` whose environments run in worker processes."""

    def __init__(self, factory: Callable[[], SyncEnv], workers: int = 2, step_timeout: float = 0.5) -> None:
        self.pool = WorkerPool(factory, workers, step_timeout=step_timeout)

    def tasks(self, split: str) -> Sequence[Task]:
        return {"train": [Task(name) for name in TASKS]}[split]

    def make_env(self) -> Env:
        return self.pool.make_env()

    async def close(self) -> None:
        await self.pool.close()


@dataclass(frozen=True)
class Counted:
    """A factory of corridors that write a line for each step which they take: what the world itself says."""

    ledger: Path

    def __call__(self) -> SyncEnv:
        return _Counted(self.ledger)


class _Counted(Corridor):
    def __init__(self, ledger: Path) -> None:
        super().__init__()
        self._ledger = ledger

    def step(self, action: str) -> StepResult:
        with open(self._ledger, "a") as file:
            file.write("step\n")
        return super().step(action)
