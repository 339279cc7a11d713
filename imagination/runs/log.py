"""The log of a run: episodes to train on, and those held out for validation."""

from __future__ import annotations

from imagination.runs.lifecycle import need
from imagination.runs.run_folder import RunFolder
from imagination.settings import UserError
from real_envs.store import TrajectoryStore, is_validation
from real_envs.trajectory import Trajectory


def read_log(run: RunFolder, validation: float) -> tuple[list[Trajectory], list[Trajectory]]:
    """Episodes of the training games: those to train on and those held out for validation; failures are left out.

    Args:
        validation: share of the episodes to hold out, ``collect.validation``.

    Raises:
        StoreError: the log is missing or broken.
        UserError: nothing is left to train on.
    """
    store = TrajectoryStore.open(need(run.log, "collect"))
    # sorted: episodes were appended as they ended, and that order is chance
    usable = sorted((t for t in store.read("train") if t.turns and not t.stop.is_failure), key=lambda t: t.id)
    held = [t for t in usable if is_validation(t.id, validation)]
    kept = {t.id for t in held}
    train = [t for t in usable if t.id not in kept]
    if not train:
        raise UserError(f"{run.log}: no usable episode in split 'train'; collect more, or lower collect.validation")
    return train, held
