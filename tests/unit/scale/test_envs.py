"""If this fails, an environment of an actor answers one episode with what another one asked."""

from __future__ import annotations

import asyncio
from typing import Any

from imagination.scale.ray_envs import _EnvActor
from real_envs.env import StepResult, Task
from real_envs.trajectory import Observation, StopReason


class SlowEnv:
    """Takes a while for ``slow``, and remembers what was done in an episode and what was asked of it when it ended."""

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.stepping, self.closed_in_a_step = False, False

    async def reset(self, task: Task, seed: int) -> Observation:
        self.actions = []
        return Observation(task.id)

    async def step(self, action: str) -> StepResult:
        self.stepping = True
        try:
            await asyncio.sleep(0.3 * (action == "slow"))
            self.actions.append(action)
        finally:
            self.stepping = False
        return StepResult(Observation(" ".join(self.actions)), 0.0, False, False)

    async def close(self) -> None:
        self.closed_in_a_step = self.stepping


def actor_of(env: SlowEnv) -> _EnvActor:
    actor = object.__new__(_EnvActor)
    envs: Any = type("Envs", (), {"make": staticmethod(lambda: env)})
    actor._envs, actor._add, actor._open, actor._running, actor._lost = envs, None, {}, {}, set()
    return actor


def test_a_step_that_its_client_gave_up_ends_before_the_next_episode() -> None:
    async def play() -> Any:
        actor = actor_of(SlowEnv())
        await actor.reset("x", Task("one"), 0)
        given_up = asyncio.create_task(actor.step("x", "slow"))
        await asyncio.sleep(0.05)
        await actor.reset("x", Task("two"), 0)
        await asyncio.sleep(0.5)
        return await given_up, await actor.step("x", "look"), actor._running

    given_up, seen, running = asyncio.run(play())
    assert given_up[0][0] == StopReason.ENV_CRASHED
    assert seen[0].observation.text == "look"
    assert not running


def test_an_environment_is_closed_when_nobody_asks_it_any_more() -> None:
    env = SlowEnv()

    async def play() -> Any:
        actor = actor_of(env)
        await actor.reset("x", Task("one"), 0)
        step = asyncio.create_task(actor.step("x", "slow"))
        await asyncio.sleep(0.05)
        await actor.close("x")
        return await step

    assert asyncio.run(play())[0][0] == StopReason.ENV_CRASHED
    assert not env.closed_in_a_step
