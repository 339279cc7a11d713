"""BabyAI as text, and Gymnasium environments that speak themselves. If these fail, grids are told wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from real_envs.env import Task
from real_envs.worlds.gymnasium_text import GymnasiumGame, GymnasiumSettings, GymnasiumText, Plain, make
from tests.support.played import by_plan, findings, generated
from tests.support.refusal import refused

gymnasium = pytest.importorskip("gymnasium", reason="pip install 'imagination[gymnasium]'")
pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")


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
        results = by_plan(game, game.reset(Task("t", {"seed": str(seed)})), 1000)
        assert results[-1].terminated
        assert [r.reward for r in results if r.reward] == [results[-1].reward] == [1.0]
    refused(lambda: game.step("look"), "reset", error=RuntimeError)
    game.close()


def test_words_that_do_nothing_leave_the_plan_as_it_is() -> None:
    game = GymnasiumGame(GymnasiumSettings("BabyAI-PutNextLocal-v0"), privileged=True)
    for seed in range(3):
        plan = game.reset(Task("t", {"seed": str(seed)})).privileged["policy_commands"]
        for _ in range(100):
            assert all(game.step(word).observation.privileged["policy_commands"] == plan for word in ("look", "dig"))
            result = game.step(plan[0])  # type: ignore[index]
            if result.terminated:
                break
            plan = result.observation.privileged["policy_commands"]
        assert result.reward == 1.0
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
    words: Any = Plain(Echo(gymnasium.spaces.Text(20)))
    assert words.reset(4) == "hello 4"
    assert words.step("good day").text == "you said 'good day'"
    numbers: Any = Plain(Echo(gymnasium.spaces.Discrete(2, start=1)))
    numbers.reset(0)
    assert numbers.step("0") is None
    assert numbers.step("2").text == "you said 2"


def test_splits_do_not_meet_and_the_protocol_holds(tmp_path: Path) -> None:
    tasks = generated(GymnasiumText(), tmp_path, {"train": 4, "heldout": 3}, GymnasiumSettings())
    assert len({t.id for split in ("train", "heldout") for t in tasks.tasks(split)}) == 7
    assert findings(tasks, ["turn left", "go forward", "look", "dig"]) == []


@pytest.mark.parametrize(
    ("settings", "count", "tokens"),
    [
        ({"id": "BabyAI-Fly-v0"}, 1, ["env.options.id=BabyAI-Fly-v0"]),
        ({"id": "CartPole-v1"}, 1, ["CartPole-v1", "wrapper"]),
        ({"wrapper": "real_envs.worlds.gymnasium_text:Nobody"}, 1, ["module:name"]),
        ({"id": "MiniGrid-Empty-5x5-v0"}, 9, ["games.train=9", "1 found"]),
    ],
)
def test_what_is_not_there_is_said(settings: dict[str, str], count: int, tokens: list[str], tmp_path: Path) -> None:
    made = GymnasiumSettings(**settings)
    refused(lambda: generated(GymnasiumText(), tmp_path, {"train": count}, made), *tokens)
    assert not (tmp_path / "games.json").exists()
