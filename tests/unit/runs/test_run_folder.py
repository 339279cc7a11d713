"""If these fail, a resumed or repeated stage would leave lines in the run folder that belong to no run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagination.commands.experiments.demo import seeds_table, table_row
from imagination.runs.log import solved_at
from imagination.runs.run_folder import RunFolder
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.rewards import Goal


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run", seed=4, settings="abc")


def steps(run: RunFolder, stage: str) -> list[int]:
    return [row["step"] for row in run.metrics(stage)]


def test_summary_is_merged_key_by_key_and_knows_where_it_ran(run: RunFolder) -> None:
    run.update({"real_steps": {"collect": 3}, "policy": {"before": {"n": 1}}})
    run.update({"real_steps": {"train": 0}, "policy": {"after": {"n": 2}}})
    assert run.summary["real_steps"] == {"collect": 3, "train": 0}
    assert run.summary["policy"] == {"before": {"n": 1}, "after": {"n": 2}}
    again = RunFolder(run.path, seed=9)
    assert again.summary["seed"] == 4, "an existing run keeps the seed it was started with"
    assert again.summary["versions"]["torch"]
    assert "cores" in again.summary["hardware"]


def test_forget_drops_a_stage_from_a_step_on_and_torn_lines_but_nothing_else(run: RunFolder) -> None:
    for step in range(4):
        run.record("train", step, {"loss": 1.0})
        run.record("clone", step, {"loss": 2.0})
    turns = (Turn("a", "o", 0.0, False),)
    episode = Trajectory("d", "t", "g", Source.DREAM, "policy", 0, "s", turns, StopReason.UNSURE)
    run.add_rollouts("train", [episode], which="update", step=1)
    run.add_rollouts("train", [episode], which="update", step=3)
    run.add_rollouts("evaluate", [episode], which="after")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "train", "st')  # killed while it wrote
    run.forget("train", from_step=2)
    assert steps(run, "train") == [0, 1]
    assert steps(run, "clone") == [0, 1, 2, 3]
    rollouts = [json.loads(line) for line in (run.path / "rollouts.jsonl").read_text().splitlines()]
    assert [(r["stage"], r.get("step")) for r in rollouts] == [("train", 1), ("evaluate", None)]
    run.forget("evaluate")
    assert len((run.path / "rollouts.jsonl").read_text().splitlines()) == 1


def test_the_torn_last_line_of_a_killed_run_is_not_read_and_goes_when_the_next_is_written(run: RunFolder) -> None:
    run.record("train", 0, {"loss": 1.0})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "train", "st')
    assert steps(run, "train") == [0]
    run.record("train", 1, {"loss": 1.0})
    assert steps(run, "train") == [0, 1]
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [0, 1]


def test_wall_seconds_add_up_over_a_resume_and_start_again_with_a_stage(run: RunFolder) -> None:
    run.update({"wall_seconds": {"train": 10.0, "clone": 5.0}})
    with run.timed("train"):
        pass
    assert 10.0 <= run.summary["wall_seconds"]["train"] < 11.0
    run.forget("train")
    assert run.summary["wall_seconds"] == {"train": 0.0, "clone": 5.0}


def test_a_rollout_row_keeps_provenance_and_its_twin(run: RunFolder) -> None:
    turns = (Turn("a", "o", None, False),)
    twin = Trajectory("replay/d", "t", "g", Source.REAL, "replay", 7, "s", turns, StopReason.TURN_LIMIT)
    run.add_rollouts("evaluate", [twin], {"replay/d": "d"}, which="replay")
    row = json.loads((run.path / "rollouts.jsonl").read_text())
    assert row["twin_of"] == "d"
    assert row["source"] == "real"
    assert row["turns"][0]["reward"] is None, "no reward is not zero"
    assert row["solved"] is False


def test_the_table_of_seeds_has_means_and_rises() -> None:
    def success(rate: float) -> dict[str, object]:
        return {"success": rate, "n": 10, "failures": 0, "ci95": None}

    def result(seed: int, before: float, after: float) -> dict[str, object]:
        same = {"heldout_tasks": success(0.0), "dream_success": success(0.5)}
        policy = {"before": {"train_tasks": success(before), **same}, "after": {"train_tasks": success(after), **same}}
        control = {"train_tasks": success(1.0), "heldout_tasks": success(0.1)}
        return {"seed": seed, "policy": policy, "control": {**control, "real_steps": {"train": 77, "evaluate": 1}}}

    table = seeds_table([table_row(result(0, 0.2, 0.6)), table_row(result(1, 0.4, 0.6))])
    mean = next(line for line in table.splitlines() if "mean" in line and "training" in line)
    assert "| 0.30 | 0.60 | | **+0.30** | 1.00 |" in mean
    assert "(77)" in table
    assert table.count("held-out") == 3
    again = {"train_tasks": success(0.2), "heldout_tasks": success(0.1), "dream_success": [0.1, 0.9]}
    line = seeds_table([table_row({**result(0, 0.2, 0.6), "training_seeds": [again]})]).splitlines()[2]
    assert "| 20 |" in line
    assert "0.40 [" in line  # of 20 episodes 6 and 2
    assert "| 0.60, 0.20 | +0.20 |" in line
    assert "| 0.50 / 0.70 |" in line


# what dreams of a run count as solved


@pytest.mark.parametrize("place", ["log", "origin"])
def test_the_threshold_is_what_a_declared_goal_pays_or_that_of_the_log(tmp_path: Path, place: str) -> None:
    run = RunFolder(tmp_path / "run", 0)
    assert solved_at(run, Goal()) is None
    TrajectoryStore.create(run.path / place, {"train": ["t"]}, {"imported": True, "solved_at": 10})
    assert solved_at(run, Goal()) == 10.0
    assert solved_at(run, Goal(observation="You win", reward=0.25)) == 0.25
    assert solved_at(run, Goal(observation="You lose", reward=-1)) is None
    plain = RunFolder(tmp_path / "plain", 0)
    TrajectoryStore.create(plain.log, {"train": ["t"]}, {"environment": "textworld"})
    assert solved_at(plain, Goal()) is None
