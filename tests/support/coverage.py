"""The coverage of a log that is there already, as an import of its episodes would have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from imagination.commands.import_logs import write_coverage
from real_envs.importers.coverage import Coverage
from real_envs.store import TrajectoryStore


def cover_log(folder: Path, store: TrajectoryStore) -> tuple[Coverage, dict[str, Any]]:
    """Counts a whole log, and writes its ``coverage.json``."""
    solved_at = store.meta.get("solved_at")
    coverage = Coverage(solved_at=float(solved_at) if isinstance(solved_at, int | float) else 1.0)
    coverage.split_of = {task: split for split, tasks in store.splits.items() for task in tasks}
    for episode in store.read(require_actions=False):
        coverage.starts.add(episode.task_id, episode.start)
        coverage.count(episode)
    return coverage, write_coverage(folder, store, coverage)
