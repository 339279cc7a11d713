"""Replays repeat a dream turn for turn. If these fail, a dream is compared with another episode than its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from imagination.dreaming.replay import replay_all
from imagination.dreaming.rollout import Episode, plan
from real_envs.env import StepResult, Task
from real_envs.trajectory import Observation, Source, StopReason, Trajectory, Turn


class Echo:
    """Says which task it is and what was done; ends after "stop"."""

    async def reset(self, task: Task, seed: int) -> Observation:
        self.name = f"{task.id}/{seed}"
        return Observation(self.name)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0 if len(action) % 2 else 0.001)  # episodes end in another order than they begin
        return StepResult(Observation(f"{self.name}: {action}"), 0.0, action == "stop", False)

    async def close(self) -> None:
        pass


def dream(name: str, actions: Sequence[str]) -> Trajectory:
    turns = tuple(Turn(action, "dreamed", 0.0, False) for action in actions)
    return Trajectory(name, "t", "g", Source.DREAM, "policy", 0, "", turns, StopReason.TURN_LIMIT)


def test_every_dream_is_repeated_turn_for_turn_in_its_own_task() -> None:
    episodes = plan([Task("a"), Task("b")], 3, "replay", seed=2)
    said = [["x"], ["go", "look", "go"], ["stop", "never"], ["ab"] * 5, ["y"], ["z", "stop"]]
    dreams = {e.id: dream(e.id, actions) for e, actions in zip(episodes, said, strict=True)}
    twins = asyncio.run(replay_all(dreams, episodes, Echo, concurrency=4))
    assert [twin.id for twin in twins] == [episode.id for episode in episodes]
    said[2] = ["stop"]  # the real world ended here
    for twin, episode, actions in zip(twins, episodes, said, strict=True):
        assert [turn.action for turn in twin.turns] == actions
        assert twin.turns[0].observation == f"{episode.task.id}/{episode.seed}: {actions[0]}"
        assert (twin.source, twin.agent) == (Source.REAL, "replay")
    assert twins[0].stop is StopReason.TURN_LIMIT
    assert twins[2].stop is StopReason.TERMINATED


def test_a_plan_gives_each_task_its_own_seeds_whatever_it_is_called() -> None:
    """The same task and number get the same chance in every world; another run of the same tasks does not."""
    tasks = [Task("a"), Task("b")]
    real, dreamed = plan(tasks, 2, "real", 1), plan(tasks, 2, "dream", 1)
    assert [(e.task.id, e.seed) for e in real] == [(e.task.id, e.seed) for e in dreamed]
    assert [e.id for e in real] == ["real/a/0", "real/a/1", "real/b/0", "real/b/1"]
    assert [e.group_id for e in real] == ["real/a", "real/a", "real/b", "real/b"]
    assert len({e.seed for e in [*real, *plan(tasks, 2, "real", 2)]}) == 8


def test_nothing_to_replay() -> None:
    none: list[Episode] = []
    assert asyncio.run(replay_all({}, none, Echo)) == []
