"""What dreams of a run count as solved. If this fails, they count by another total than the log they are dreamed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagination.runs.log import solved_at
from imagination.runs.run_folder import RunFolder
from real_envs.store import TrajectoryStore
from worldmodel.goal import Goal


@pytest.mark.parametrize("place", ["log", "origin"])
def test_the_threshold_of_the_log_counts_unless_a_goal_pays(tmp_path: Path, place: str) -> None:
    run = RunFolder(tmp_path / "run", 0)
    assert solved_at(run, Goal()) is None
    TrajectoryStore.create(run.path / place, {"train": ["t"]}, {"imported": True, "solved_at": 10})
    assert solved_at(run, Goal()) == 10.0
    assert solved_at(run, Goal(observation="You win")) is None


def test_logs_without_a_threshold_have_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", 0)
    TrajectoryStore.create(run.log, {"train": ["t"]}, {"environment": "textworld"})
    assert solved_at(run, Goal()) is None
