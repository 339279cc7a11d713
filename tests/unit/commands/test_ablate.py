"""If these fail, an ablation compares other runs than it says, or starts hours of work that cannot end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import imagination.commands.experiments.ablate as ablation
import imagination.commands.experiments.arms as experiments
from imagination.commands.experiments.ablate import ablate, arms_table, compare_arms
from imagination.commands.experiments.arms import config_of_arm
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.settings.compose import remember_overrides
from imagination.settings.schema import ConfigError
from tests.support.refusal import in_a_line, refused
from worldmodel.evaluation.proportions import Proportion


def arm(success: float, n: int = 40, **more: Any) -> dict[str, Any]:
    found = {"train_tasks": {"success": success, "n": n, "ci95": None, "failures": 0}}
    return {**found, "settings": "", "dream_success": None, "stopped_by": None, **more}


def heldout(*solved: int) -> dict[str, Any]:
    """Of two episodes a task, so many were solved."""
    return Proportion(sum(solved), 2 * len(solved), by_task={f"t{k}": (n, 2) for k, n in enumerate(solved)}).to_json()


def result(run: str, clone: dict[str, Any], plain: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    return {"run": run, "seed": 0, "clone": clone, "arms": {"plain": plain, "changed": changed}}


def test_the_table_shows_reality_for_every_run_and_all_together() -> None:
    stopped = {"update": 3, "wire": "loops", "sentence": "it runs in circles", "policy_of_update": 2}
    table = arms_table(
        [
            result("a", arm(0.25), arm(0.5, dream_success=[0.3, 0.9]), arm(0.75, settings="train.lr=1")),
            result("b", arm(0.5), arm(1.0), arm(0.25, settings="train.lr=1", stopped_by=stopped)),
        ]
    )
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert rows[0] == "| run | tasks | n | clone | plain | changed |"
    assert rows[2] == "| a | training | 40 | 0.25 [0.14, 0.40] | 0.50 [0.35, 0.65] (0.90) | 0.75 [0.60, 0.86] |"
    assert rows[4] == "| **all** | training | 80 | 0.38 [0.28, 0.48] | 0.75 [0.65, 0.83] | 0.50 [0.39, 0.61] |"
    *_, plain, changed, of_b = table.strip().splitlines()
    assert (plain.partition(":")[0], changed) == ("- plain", "- changed: `train.lr=1`; less plain, never seen: –")
    in_a_line(of_b, "  - b: ", "update 3", "'loops'")


def test_arms_are_compared_on_tasks_never_seen_pair_by_pair() -> None:
    few, many = heldout(*[0, 1, 0, 0] * 4), heldout(*[2, 2, 1, 1] * 4)
    runs = [result(k, *(arm(0.5, heldout_tasks=of) for of in (few, few, many))) for k in "ab"]
    table = arms_table(runs)
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [row.split(" | ")[1] for row in rows[2:]] == ["never seen"] * 3 + ["training"] * 3
    assert rows[4].startswith("| **all** | never seen | 64 | 0.12 [")
    assert "- changed: `as the run is`; less plain, never seen: +0.62 [+0." in table


def test_an_arm_has_the_settings_of_its_run_then_of_the_command_then_its_own(tmp_path: Path) -> None:
    run, here = tmp_path / "run", tmp_path / "here"
    RunFolder(run, seed=7)
    remember_overrides(["train.updates=3", "train.lr=0.1"], here)
    ours = config_of_arm(run, here, "train.lr=0.2 algorithm=ppo")
    assert (ours.train.updates, ours.train.lr, ours.algorithm.name, ours.seed) == (3, 0.2, "ppo", 7)
    remember_overrides(["train.updates=4", "train.group_size=6"], run)
    of_run = config_of_arm(run, here, "algorithm=rloo")
    assert (of_run.train.updates, of_run.train.group_size) == (3, 6)
    assert (of_run.train.lr, of_run.algorithm.name) == (0.1, "rloo")


def test_supplements_that_an_arm_alone_reads_are_made_before_any_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def stage(name: str) -> Any:
        def run(config: Config, path: Path) -> None:
            made.append(name)
            RunFolder(path, 0).update({"done": {name: "done"}})

        return run

    for name in experiments.STAGES:
        monkeypatch.setitem(experiments.STAGES, name, stage(name))
    monkeypatch.setattr(ablation, "compare_arms", lambda arms, path, folder: {})
    config = Config()
    config.ablation.arms = {"plain": "", "goals": "dream.hindsight=0.3"}
    ablation._compare_arms_of_seed(config, tmp_path, 0)
    assert made == ["collect", "fit_world_model", "clone", "relabel"]


def test_an_arm_whose_run_has_no_goals_to_dream_of_is_told_before_any_is_trained(tmp_path: Path) -> None:
    (tmp_path / "games").mkdir()
    (tmp_path / "games/games.json").touch()
    RunFolder(tmp_path, 0)
    arms = {"plain": "", "goals": "dream.hindsight=0.3"}
    refused(lambda: compare_arms(arms, tmp_path, tmp_path / "here"), f"{tmp_path}/supplements", "imagine relabel")


@pytest.mark.parametrize(
    ("arms", "error", "says"),
    [
        ({}, UserError, "ablation=gating, masks or methods"),
        ({"a-b": "", "a b": ""}, UserError, "names that differ"),
        ({"a": "", "b": "train.updates"}, ConfigError, "write key=value"),
        ({"a": "", "b": "algorithm=grpo train.group_size=1"}, UserError, "group"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_played(
    arms: dict[str, str], error: type[Exception], says: str, tmp_path: Path
) -> None:
    """No game is there, so playing would fail with another message."""
    run = tmp_path / "run"
    RunFolder(run, seed=0)
    config = Config()
    config.ablation.arms, config.ablation.runs = arms, [str(run)]
    refused(lambda: ablate(config, tmp_path / "here"), says, error=error)


def test_a_run_without_games_or_no_run_at_all_is_told(tmp_path: Path) -> None:
    config = Config()
    config.ablation.arms, config.ablation.runs = {"a": ""}, [str(tmp_path / "nothing")]
    refused(lambda: ablate(config, tmp_path), str(tmp_path / "nothing"), "no run")
    RunFolder(tmp_path / "run", seed=0)
    refused(lambda: compare_arms({"a": ""}, tmp_path / "run", tmp_path), "collect")
