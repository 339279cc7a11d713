"""If these fail, a policy imitates what its validation judges, or what its goal does not pay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagination.commands import train as command
from imagination.commands.train import _Data, _summarise, _worlds
from imagination.data.augmentation import relabelled
from imagination.learning.experience import RecordedGroups
from imagination.rollout.dream_env import starts_from_log
from imagination.runs.run_folder import RunFolder
from imagination.session import Log, Session
from imagination.settings import Config
from imagination.settings.compose import load_config
from imagination.settings.models import HindsightSettings
from real_envs.env import Task
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.scripted import Answering
from worldmodel.formats.memory import declared_facts
from worldmodel.rewards import Goal
from worldmodel.world_model import Prediction


def data_of(
    log: list[Trajectory], config: Config, reached: Sequence[Trajectory] = (), unplayed: Sequence[Trajectory] = ()
) -> _Data:
    session: Any = SimpleNamespace(
        config=config,
        log=SimpleNamespace(train=log),
        unplayed=unplayed,
        known=[*log, *unplayed],
        training_seed=0,
        reached_goals=lambda: [*reached],
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


def test_tasks_that_were_only_reset_are_dreamed() -> None:
    config = Config()
    reset = Trajectory(
        "u/reset", "u", "u", Source.REAL, "replay", 0, "start u", (), StopReason.TURN_LIMIT, world_facts=("f",)
    )
    data = data_of([episode("t", "won", 1.0)], config, unplayed=[reset])
    assert {(start.task_id, start.text) for start in data.starts.values()} == {("t", "start t"), ("u", "start u")}
    assert declared_facts(data.known) == {"start u": ("f",)}
    assert reset not in data.log


def test_no_dream_of_another_goal_begins_as_a_validation_task_does() -> None:
    config = Config()
    config.train.validation_tasks, config.train.expert_share = 4, 0.0
    log = [episode(f"t{n}", "lost", 0.0) for n in range(10)]
    told = [relabelled(t, HindsightSettings([["lost", "lose"]], place="start")) for t in log]
    data = data_of(log, config, [replace(t, task_id=t.id) for t in told if t is not None])
    validation = {data.starts[name].task_id for name in data.validation}
    assert data.goals is not None
    assert {start.text for start in data.goals.starts.values()} == {f"lose t{n}" for n in range(10)} - {
        f"lose {task}" for task in validation
    }


def test_no_recorded_episode_of_a_validation_task_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = Config(), list[tuple[_Data, RecordedGroups]]()
    config.train.validation_tasks = 4
    log = [episode(f"t{n}", "won", 1.0) for n in range(10)]
    data = data_of(log, config)
    monkeypatch.setattr(command, "run_stage", lambda *_: nullcontext())
    monkeypatch.setattr(command, "Session", lambda *_: None)
    monkeypatch.setattr(command._Data, "of", lambda *_: data)
    monkeypatch.setattr(command, "_players", lambda *_: nullcontext())
    monkeypatch.setattr(command, "_train", lambda *given: found.append((given[2], given[3])))
    command.train(config, Path(), RecordedGroups(tuple((t,) for t in log)))
    validation = {data.starts[name].task_id for name in data.validation}
    assert {group[0].task_id for group in found[0][1].groups} == {t.task_id for t in log} - validation


def test_rewards_are_known_of_the_held_out_tasks_that_are_trained_in(tmp_path: Path) -> None:
    config = load_config(["dream.known_rewards=true", "dream.min_confidence=0", "train.tasks=heldout"], Config)
    held = [episode("h", "won", 1.0)]
    session = Session(config, RunFolder(tmp_path, 0))
    session.log = Log([episode("t", "won", 1.0)], [])
    pays = Answering(lambda seen, action: Prediction("won", 1.0, True, 0.9, 0.9))
    session.__dict__["world_model"] = lambda known: pays
    starts = starts_from_log(held, branch=False)
    data = _Data(True, held, [*session.log.train, *held], [], starts, starts, [], None)
    env = _worlds(session, data, None, True)[0].make_env()

    async def reward(action: str) -> float | None:
        await env.reset(Task("h", {"start": next(iter(starts))}), 0)
        return (await env.step(action)).reward

    assert [asyncio.run(reward(action)) for action in ("go", "stay")] == [1.0, 0.0]


def test_experts_are_those_of_the_declared_goal() -> None:
    config = Config()
    config.worldmodel.goal = Goal("the sea", reward=0.25)
    data = data_of([episode("a", "the sea", 0.0), episode("b", "a hut", 1.0)], config)
    assert [t.task_id for t in data.experts] == ["a"]


def test_a_training_in_the_real_world_was_not_stopped_by_tripwires_of_dreams(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, 0)
    run.update({"tripwires": {"enabled": True, "stopped_by": {"wire": "loops"}}})
    collector: Any = SimpleNamespace(speed=dict)
    _summarise(run, collector, None, dreamed=False)
    assert run.summary["tripwires"] is None
