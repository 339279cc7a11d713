"""The loop in the corridors of ``tests.support.tiny``, and loops that die at chosen points.

``main(start, budget, ["<folder>=<point>,<point>..."])`` copies a run to each folder and runs the loop there: once for
each point, each time in a process of its own that kills itself there, and then to its end. A point with a ``?`` may lie
beyond the end. Points::

    ask-5      the fifth real step was written down, and is not taken yet
    answer-5   the fifth real step was taken, and its answer is not written down yet
    append-1   real episodes have come into the log
    state-3    the third of those moments at which a step of a round counts as done
    copy-2     before a policy is published
    fit-1      a line of metrics of a refit;  train-2: of the policy's training
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from imagination.commands import loop as loop_stage
from imagination.loop import acting
from imagination.loop.journal import Journal
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from policy.lm.backbone import load_checkpoint
from real_envs.env import Task
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Observation
from real_envs.worker_pool import SyncEnv
from tests.support.faults import NEW, Corridor, Counted, PlantedTasks
from tests.support.tiny import TASKS, tiny_settings

WORLD = "corridors"


class Corridors(PlantedTasks):
    """Both corridors to train in; none is held out."""

    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks("train") if split == "train" else []


class NewCorridors(Corridors):
    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{NEW}{task.id}") for task in super().tasks(split)]


class Wanderer:
    """A scripted agent that tries what a corridor might understand."""

    name = "noisy"

    def start(self, observation: Observation, seed: int) -> _Wandering:
        return _Wandering(random.Random(seed))


class _Wandering:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def act(self) -> str:
        way, thing = self._chance.choice(list(TASKS.values()))
        return self._chance.choice([f"go {way}", f"take {thing}"])

    def observe(self, observation: Observation) -> None: ...

    def trace(self) -> None: ...

    def close(self) -> None: ...


class CorridorWorld:
    """What ``find_world`` finds of them."""

    elsewhere = False

    def behaviours(self, elsewhere: Sequence[str]) -> list[tuple[Wanderer, float]]:
        return [(Wanderer(), 1.0)]


def loop_settings(budget: int) -> Config:
    """Rounds of a few seconds: two tasks, two episodes each, one update."""
    config = tiny_settings()
    config.env.name, config.collect.workers, config.collect.validation = WORLD, 1, 0.2
    config.logger = "none"
    config.loop.budget, config.loop.tasks, config.loop.group_size, config.loop.looks = budget, 2, 2, 2
    config.loop.fit_steps, config.loop.fit_lr, config.loop.updates = 10, 1e-3, 1
    config.loop.tolerance = 1.0  # honest data is promoted, however ten steps came out
    config.fit.steps, config.train.expert_share = 60, 0.0
    return config


def play_in_corridors(
    factory: Callable[[], SyncEnv] = Corridor,
    patch: Callable[..., None] = setattr,
    tasks: Callable[..., PlantedTasks] = Corridors,
) -> None:
    """The loop's real world is that of a factory; ``patch`` sets attributes, such as ``monkeypatch.setattr``."""
    patch(Session, "tasks", lambda *_: tasks(factory, workers=1))
    patch(acting, "find_world", lambda _: CorridorWorld())
    patch(loop_stage, "generate_tasks", lambda *_: None)


def run_loop(folder: Path, config: Config) -> dict[str, Any]:
    """What its summary says at the end."""
    loop_stage.loop(config, folder)
    return dict(json.loads((folder / "summary.json").read_text()))


def die_at(point: str) -> None:
    """From now on this process kills itself at the point."""
    kind, _, number = point.partition("-")
    seen = 0

    def after(honest: Callable[..., Any], counts: Callable[..., bool], first: bool = False) -> Callable[..., Any]:
        def replaced(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            result = None if first else honest(*arguments, **options)
            seen += counts(*arguments, **options)
            if seen == int(number or 1):
                os.kill(os.getpid(), signal.SIGKILL)
            return honest(*arguments, **options) if first else result

        return replaced

    def always(*_: Any, **__: Any) -> bool:
        return True

    if kind == "answer":
        Journal.answer = after(Journal.answer, always, first=True)  # type: ignore[method-assign]
    elif kind == "ask":
        Journal.ask = after(Journal.ask, always)  # type: ignore[method-assign]
    elif kind == "append":
        TrajectoryStore._append = after(TrajectoryStore._append, lambda _, episodes: bool(episodes))  # type: ignore[method-assign]
    elif kind == "copy":
        loop_stage.copy_folder = after(loop_stage.copy_folder, always, first=True)
    elif kind == "state":
        RunFolder.update = after(RunFolder.update, lambda _, v: "step" in v.get("loop", {}))  # type: ignore[method-assign]
    else:
        stages = {"fit": "loop_fit", "train": "train"}
        RunFolder.record = after(RunFolder.record, lambda _, stage, *__: stage.startswith(stages[kind]))  # type: ignore[method-assign]


def in_a_child(work: Callable[[], object]) -> int:
    """The status with which a forked process ends. Torch was imported before, and has computed nothing."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def main(start: Path, budget: int, folders: Sequence[str]) -> None:
    config = loop_settings(budget)
    load_checkpoint(str(start / "models" / "worldmodel"))  # imports what each child would import anew
    gc.freeze()  # and what their garbage collections would look through
    for folder, _, points in (word.partition("=") for word in folders):
        run = Path(shutil.copytree(start, folder))
        play_in_corridors(Counted(run / "world.txt"))
        for point in filter(None, points.split(",")):

            def dying(run: Path = run, point: str = point.rstrip("?")) -> None:
                die_at(point)
                run_loop(run, config)

            status = in_a_child(dying)
            at_its_end = point.endswith("?") and status == 0
            assert os.WIFSIGNALED(status) or at_its_end, f"{folder} came to its end before {point}"
        assert in_a_child(lambda run=run: run_loop(run, config)) == 0, folder  # type: ignore[misc]
