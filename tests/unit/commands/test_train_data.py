"""If these fail, a policy imitates what its validation judges, or what its goal does not pay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from imagination.commands.train import _Data
from imagination.settings import Config
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.goal import Goal


def data_of(log: list[Trajectory], config: Config) -> _Data:
    session: Any = SimpleNamespace(
        config=config, log=SimpleNamespace(train=log), run=None, training_seed=0, reached_goals=lambda: []
    )
    return _Data.of(session, None)


def episode(task: str, seen: str, reward: float) -> Trajectory:
    turns = (Turn("go", seen, reward, True),)
    start = f"start {task}"
    return Trajectory(f"{task}/{seen}", task, task, Source.EXPERT, "expert", 0, start, turns, StopReason.TERMINATED)


def test_no_expert_of_a_validation_task_is_imitated() -> None:
    config = Config()
    config.train.validation_tasks = 4
    data = data_of([episode(f"t{n}", "won", 1.0) for n in range(10)], config)
    validation = {data.starts[name].task_id for name in data.validation}
    assert len(validation) == 4
    assert {t.task_id for t in data.experts} == {f"t{n}" for n in range(10)} - validation


def test_experts_are_those_of_the_declared_goal() -> None:
    config = Config()
    config.worldmodel.goal = Goal("the sea", reward=0.25)
    data = data_of([episode("a", "the sea", 0.0), episode("b", "a hut", 1.0)], config)
    assert [t.task_id for t in data.experts] == ["a"]
