"""The log of a run: episodes to train on, and those held out for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from imagination.runs.lifecycle import need
from imagination.runs.run_folder import RunFolder
from imagination.settings import UserError
from real_envs.env import TaskSet
from real_envs.store import MANIFEST, TrajectoryStore, is_validation
from real_envs.trajectory import Trajectory
from worldmodel.rewards import Goal

ORIGIN = "origin/"  # how ids of episodes begin that another run has logged
RESET = "/reset"  # how ids of episodes end that are a reset of a task and no more


def read_log(run: RunFolder, validation: float) -> tuple[list[Trajectory], list[Trajectory]]:
    """Episodes of the training games: those to train on and those held out for validation; failures are left out.

    Those of the run that this one began from (``RunFolder.origin``) come first; their ids begin with ``origin/``. What
    was held out there stays held out.

    Raises:
        StoreError: the log is missing or broken.
        UserError: nothing is left to train on.
    """
    train, held = list[Trajectory](), list[Trajectory]()
    if run.origin.exists():
        for episode in _usable(TrajectoryStore.open(run.origin)):
            renamed = replace(episode, id=f"{ORIGIN}{episode.id}")
            (held if is_validation(episode.id, validation) else train).append(renamed)
    if (run.log / MANIFEST).exists() or not run.origin.exists():
        for episode in _usable(TrajectoryStore.open(need(run.log, "collect")), bool(train)):
            (held if is_validation(episode.id, validation) else train).append(episode)
    if not train:
        raise UserError(f"{run.log}: no usable episode in split 'train'; collect more, or lower collect.validation")
    return train, held


def unplayed(run: RunFolder) -> list[Trajectory]:
    """What a reset has shown of training tasks (``rollout.play.reset_only``): episodes without a turn."""
    if not (run.log / MANIFEST).exists():
        return []
    store = TrajectoryStore.open(run.log)
    tasks = {name.removesuffix(RESET) for name in store.ids() if name.endswith(RESET)}
    episodes = store.of_tasks(tasks) if tasks else ()  # or a long log would be read twice for nothing
    return sorted((t for t in episodes if not t.turns and not t.stop.is_failure), key=lambda t: t.id)


def rewarded(run: RunFolder, log: Sequence[Trajectory], goal: Goal) -> Sequence[Trajectory]:
    """The log to fit to: of turns without a reward a world model learns nothing, so a declared goal gives them its own.

    Raises:
        UserError: no turn has a reward, and no goal is declared that would pay in dreams.
    """
    lack = [turn.reward is None for episode in log for turn in episode.turns]
    if all(lack) and not goal.declared:
        raise UserError(
            f"{run.log}: no turn has a reward; a dream could pay for nothing. Add rewards to the log, or declare by "
            "worldmodel.goal.observation=PATTERN what the world says when a task is solved"
        )
    return goal.relabel_log(log) if any(lack) else log


def open_store(run: RunFolder, world: str, tasks: TaskSet) -> TrajectoryStore:
    """The run's log, for the tasks of both splits; a new one where there is none. It may grow by tasks."""
    splits = {split: [task.id for task in tasks.tasks(split)] for split in ("train", "heldout")}
    if not (run.log / MANIFEST).exists():
        return TrajectoryStore.create(run.log, splits, meta={"environment": world})
    store = TrajectoryStore.open(run.log)
    known = {task for some in store.splits.values() for task in some}
    new = {split: [task for task in some if task not in known] for split, some in splits.items()}
    if any(new.values()):
        store.add_tasks(new)
    return store


def solved_at(run: RunFolder, goal: Goal) -> float | None:
    """Total reward from which a dream is solved: what a declared goal pays, or the threshold with which the log was
    imported; ``None`` is the usual 1.
    """
    if goal.declared:
        return goal.reward if goal.reward > 0 else None
    folder = next((path for path in (run.log, run.origin) if (path / MANIFEST).exists()), None)
    threshold = None if folder is None else TrajectoryStore.open(folder).meta.get("solved_at")
    return float(threshold) if isinstance(threshold, int | float) else None


def _usable(store: TrajectoryStore, may_be_empty: bool = False) -> list[Trajectory]:
    """Sorted: episodes were appended as they ended, and that order is chance."""
    episodes = store.of_tasks(store.tasks("train")) if may_be_empty else store.read("train")
    return sorted((t for t in episodes if t.turns and not t.stop.is_failure), key=lambda t: t.id)
