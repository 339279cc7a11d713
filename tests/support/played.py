"""A real world's tasks and games, and how a test plays them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from real_envs.check import check_env
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, StopReason


def generated(world: Any, folder: Path, counts: dict[str, int], settings: Any, seed: int = 0, workers: int = 1) -> Any:
    """The tasks, opened with what experts may see."""
    world.generate(folder, counts, seed, settings, lambda done, total: None, 1)
    return world.open(folder, True, workers)


def findings(tasks: Any, actions: Sequence[str], task: Task | None = None) -> list[str]:
    """What is wrong with an environment of the tasks, which are closed after that."""

    async def check() -> list[str]:
        try:
            return await check_env(tasks.make_env(), task or tasks.tasks("train")[0], actions)
        finally:
            await tasks.close()

    return asyncio.run(check())


def by_plan(game: Any, observation: Observation, turns: int = 60) -> list[StepResult]:
    """The results of doing what the game's expert would do, up to the end of the episode."""
    results: list[StepResult] = []
    while len(results) < turns and not (results and (results[-1].terminated or results[-1].truncated)):
        results.append(game.step(observation.privileged["policy_commands"][0]))  # type: ignore[index]
        observation = results[-1].observation
    return results


def failed_and_played_on(tasks: Any, faults: Sequence[str]) -> list[StopReason]:
    """Why an episode of each fault failed; after them the same environment plays on, and the tasks are closed."""

    async def play() -> list[StopReason]:
        reasons, env, task = [], tasks.make_env(), tasks.tasks("train")[0]
        for fault in faults:
            await env.reset(task, 0)
            with pytest.raises(EnvFailure) as failed:
                await env.step(fault)
            reasons.append(failed.value.reason)
        await env.reset(task, 0)
        assert (await env.step("look")).observation.text.startswith("You see")
        await env.close()
        await tasks.close()
        return reasons

    return asyncio.run(play())


def moved(world: Any, games: Path, here: Any, there: Any) -> None:
    """The tasks of a server are those of another one at another address, on which they can be played."""
    counts = {"train": 2, "heldout": 1}
    asyncio.run(generated(world, games, counts, here).close())
    before = json.loads((games / "games.json").read_text())
    tasks = generated(world, games, counts, there)
    assert json.loads((games / "games.json").read_text()) == {**before, "url": there.url}

    async def play() -> None:
        await tasks.make_env().reset(tasks.tasks("train")[0], 0)
        await tasks.close()

    asyncio.run(play())
