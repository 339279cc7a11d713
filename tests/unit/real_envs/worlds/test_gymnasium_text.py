"""BabyAI as text, and Gymnasium environments that speak themselves. If these fail, grids are told wrongly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from real_envs.check import check_env
from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.worker_pool import PooledTasks
from real_envs.worlds.gymnasium_text import GymnasiumGame, GymnasiumSettings, GymnasiumText, Plain, make

gymnasium = pytest.importorskip("gymnasium", reason="pip install 'imagination[gymnasium]'")
pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")


def generated(folder: Path, counts: dict[str, int], **settings: str) -> PooledTasks:
    world = GymnasiumText()
    world.generate(folder, counts, 0, GymnasiumSettings(**settings), lambda done, total: None, 1)
    return world.open(folder, True, 1)


def test_a_grid_is_told_as_it_is_seen() -> None:
    """An empty room of 6 cells, seen from its corner to the right; then things are put into it by hand."""
    from minigrid.core.world_object import Ball, Door

    env: Any = make(GymnasiumSettings("MiniGrid-Empty-8x8-v0"))
    text = env.reset(0)
    # the goal is five cells to the right, and only three are in view
    assert text == "Your task is to get to the green goal square.\na wall: 6 ahead\nYou carry nothing."
    grid = env._env.unwrapped.grid  # the agent stands at (1, 1) and looks along x; its right is y
    grid.set(2, 1, Ball("red"))
    grid.set(3, 2, Door("blue", is_locked=True))
    seen = env.step("look").text.split("\n")
    assert seen[:2] == ["a red ball: 1 ahead", "a locked blue door: 2 ahead, 1 right"]
    assert "a locked blue door: 1 ahead, 2 left" in env.step("turn right").text  # now it looks along y
    env.step("turn left")
    assert "a red ball" not in env.step("pick up").text.split("You carry")[0]
    assert env.step("look").text.endswith("You carry a red ball.")
    assert env.step("fly") is None
    env.close()


@pytest.mark.parametrize("name", ["BabyAI-GoToLocal-v0", "BabyAI-PickupLoc-v0", "BabyAI-OpenDoor-v0"])
def test_the_bot_solves_and_a_solved_task_is_worth_one(name: str) -> None:
    game = GymnasiumGame(GymnasiumSettings(name), privileged=True)
    for seed in range(5):
        observation = game.reset(Task("t", {"seed": str(seed)}))
        rewards: list[float | None] = []
        while True:
            result = game.step(observation.privileged["policy_commands"][0])  # type: ignore[index]
            observation = result.observation
            rewards.append(result.reward)
            if result.terminated or result.truncated:
                break
        assert (result.terminated, sum(map(bool, rewards)), rewards[-1]) == (True, 1, 1.0)
    with pytest.raises(RuntimeError, match="no episode is running"):
        game.step("look")
    game.close()


def test_what_a_bot_cannot_plan_has_no_plan() -> None:
    game = GymnasiumGame(GymnasiumSettings("MiniGrid-Empty-5x5-v0"), privileged=True)
    assert game.reset(Task("t", {"seed": "0"})).privileged["policy_commands"] == []
    game.close()


class Echo:
    """Says what it is told; three words solve it."""

    def __init__(self, space: Any) -> None:
        self.observation_space, self.action_space = gymnasium.spaces.Text(100), space

    def reset(self, seed: int) -> tuple[str, dict[str, object]]:
        self._left = 3
        return f"hello {seed}", {}

    def step(self, action: object) -> tuple[str, float, bool, bool, dict[str, object]]:
        self._left -= 1
        return f"you said {action!r}", float(self._left == 0), self._left == 0, False, {}

    def close(self) -> None:
        pass


def test_environments_that_speak_need_no_wrapper() -> None:
    words = Plain(Echo(gymnasium.spaces.Text(20)))
    assert words.reset(4) == "hello 4"
    said = words.step("good day")
    assert said is not None
    assert said.text == "you said 'good day'"
    numbers = Plain(Echo(gymnasium.spaces.Discrete(2, start=1)))
    numbers.reset(0)
    assert numbers.step("0") is None
    said = numbers.step("2")
    assert said is not None
    assert said.text == "you said 2"


def test_splits_do_not_meet_and_the_protocol_holds(tmp_path: Path) -> None:
    tasks = generated(tmp_path, {"train": 4, "heldout": 3})
    ids = [t.id for split in ("train", "heldout") for t in tasks.tasks(split)]
    assert len(set(ids)) == 7

    async def check() -> list[str]:
        try:
            return await check_env(
                tasks.make_env(), tasks.tasks("train")[0], ["turn left", "go forward", "look", "dig"]
            )
        finally:
            await tasks.close()

    assert asyncio.run(check()) == []


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"env\.options\.id=BabyAI-Fly-v0: "):
        generated(tmp_path, {"train": 1}, id="BabyAI-Fly-v0")
    with pytest.raises(UserError, match="not text: name what makes text of it"):
        generated(tmp_path, {"train": 1}, id="CartPole-v1")
    with pytest.raises(UserError, match="it wants module:name"):
        generated(tmp_path, {"train": 1}, wrapper="real_envs.worlds.gymnasium_text:Nobody")
    with pytest.raises(UserError, match=r"too few different starts for games\.train=9: 1 found"):
        generated(tmp_path, {"train": 9}, id="MiniGrid-Empty-5x5-v0")
    assert not (tmp_path / "games.json").exists()
