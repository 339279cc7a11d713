"""If these fail, a run says that it took other real steps than it took, or at another price."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.collect import collect
from imagination.evaluation.costs import real_costs, spent_before
from imagination.rollout.play import Span
from imagination.runs.fingerprint import fingerprint
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import check_world
from imagination.settings import Config, UserError
from real_envs.env import StepResult, Task
from real_envs.trajectory import Observation
from real_envs.worker_pool import PooledTasks, PoolStats
from real_envs.world import BUILT_IN
from tests.support.corridor_world import CorridorWorld

SPENT = PoolStats(steps=40, resets=8, seconds=2.5, crashes=1, timeouts=2, garbage=3)


def test_what_a_stopped_stage_spent_is_added_to(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, 0)
    assert spent_before(run, "collect") == PoolStats()
    run.update(real_costs("train", SPENT, 0.0))
    run.update(real_costs("collect", SPENT, 0.5))
    again = spent_before(run, "collect") + SPENT
    run.update(real_costs("collect", again, 0.5))
    summary = run.summary
    assert summary["real_steps"] == {"train": 40, "collect": 80}
    assert summary["real_resets"]["collect"] == 16
    assert summary["real_seconds"]["collect"] == 5.0
    assert summary["real_failures"]["collect"] == {"crashes": 2, "timeouts": 4, "garbage": 6}
    assert summary["real_cost"] == {"collect": 40.0}, "without a price there is no cost, which is not 0"


def test_of_a_run_from_before_there_were_seconds_the_steps_are_known(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, 0)
    run.update({"real_steps": {"collect": 7}})
    assert spent_before(run, "collect") == PoolStats(steps=7)


def test_a_price_makes_nothing_again() -> None:
    """The hash is that of the time before there was a price: runs of then are gone on with."""
    config = Config()
    config.env.name = "gymnasium"
    known: dict[str, Any] = {"seed": config.seed, "env": {"name": "gymnasium", "options": {}}}
    games = {key: value for key, value in asdict(config.games).items() if key != "focus"}  # there was none either
    log = {key: value for key, value in asdict(config.collect).items() if key != "tasks"}  # nor was this
    known |= {"games": games, "collect": log}
    then = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    textworld = Config()
    whole = fingerprint(textworld)
    for price in (0.0, 0.01):
        config.env.price = textworld.env.price = price
        assert fingerprint(config, "collect") == then
        assert fingerprint(textworld) == whole
    config.collect.tasks = 3
    assert fingerprint(config, "collect") != then


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_is_a_number(tmp_path: Path, price: float) -> None:
    config = Config()
    config.env.price = price
    with pytest.raises(UserError, match=r"env\.price"):
        check_world(RunFolder(tmp_path, 0), config.env)


@pytest.mark.parametrize(
    ("one", "other", "both"), [((0, 3), (1, 5), 2), ((1, 5), (0, 3), 2), ((0, 9), (2, 3), 1), ((0, 1), (2, 3), 0)]
)
def test_spans_that_meet(one: tuple[float, float], other: tuple[float, float], both: float) -> None:
    assert Span(*one).both(Span(*other)) == both


class Broken:
    """A ``SyncEnv`` of one step; nobody can begin the task ``away``."""

    def reset(self, task: Task, seed: int) -> Observation:
        if task.id == "away":
            raise OSError("away")
        return Observation("A hall.", {"policy_commands": ["go east"]})

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("The end."), 1.0, True, False)

    def close(self) -> None: ...


class BrokenWorld(CorridorWorld):
    elsewhere = True

    def open(self, folder: Path, privileged: bool, workers: int) -> PooledTasks:
        return PooledTasks({"train": [Task("here"), Task("away")], "heldout": []}, Broken, workers)


def test_looks_for_commands_count_and_one_that_fails_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "broken", f"{__name__}:BrokenWorld")
    config = Config()
    config.env.name, config.collect.episodes, config.collect.workers = "broken", 2, 1
    collect(config, tmp_path)
    summary = RunFolder(tmp_path, 0).summary
    assert (summary["real_steps"]["collect"], summary["real_resets"]["collect"]) == (2, 2 + 4)
    assert summary["real_failures"]["collect"] == {"crashes": 1 + 2, "timeouts": 0, "garbage": 0}
