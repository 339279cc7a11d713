"""Supervised episodes beside the log: made of it for the policy to imitate, and never read by a world model.

``supplements/<name>/`` is a store of its own, so that the log stays what really happened; ``read_log`` knows none.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from imagination.runs.lifecycle import need
from imagination.runs.run_folder import RunFolder
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Trajectory

MADE_BY = {"reflections": "reflect", "hindsight": "relabel"}  # name -> stage


def folder_of(run: RunFolder, name: str) -> Path:
    return run.path / "supplements" / name


def write_supplement(run: RunFolder, name: str, episodes: Sequence[Trajectory]) -> Path:
    """Replaces the supplement ``name``; a crash leaves the earlier one, or none."""
    folder = folder_of(run, name)
    fresh = folder.with_name(f".{name}")
    shutil.rmtree(fresh, ignore_errors=True)
    tasks = list(dict.fromkeys(episode.task_id for episode in episodes))
    TrajectoryStore.create(fresh, {"train": tasks}, meta={"made_by": MADE_BY[name]}).append(episodes)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder


def read_supplements(run: RunFolder, names: Sequence[str]) -> list[Trajectory]:
    """The episodes of these supplements.

    Raises:
        UserError: one is not there yet.
        StoreError: one is broken.
    """
    stores = [TrajectoryStore.open(need(folder_of(run, name), MADE_BY[name])) for name in names]
    return [episode for store in stores for episode in store.read("train")]
