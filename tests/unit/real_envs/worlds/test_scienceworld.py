"""The real simulator in Java. If these fail, dreams are compared with something else than ScienceWorld."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_envs.check import check_env
from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.worker_pool import PooledTasks
from real_envs.worlds.scienceworld import INVALID, ScienceGame, ScienceSettings, ScienceWorld

pytest.importorskip("scienceworld", reason="pip install 'imagination[scienceworld]'")
SIMPLE = "find-living-thing+lifespan-longest-lived"


@pytest.fixture(scope="module")
def game() -> Iterator[ScienceGame]:
    made = ScienceGame(privileged=True)
    yield made
    made.close()


def task(family: str, variation: int = 0) -> Task:
    return Task(f"sw-{family}-{variation}", {"family": family, "variation": str(variation), "simplifications": "easy"})


def generated(folder: Path, counts: dict[str, int], **settings: str) -> PooledTasks:
    world = ScienceWorld()
    world.generate(folder, counts, 0, ScienceSettings(**settings), lambda done, total: None, 1)  # type: ignore[arg-type]
    return world.open(folder, True, 1)


@pytest.mark.parametrize("family", ["find-living-thing", "chemistry-mix", "lifespan-longest-lived"])
def test_the_gold_path_solves_and_its_rewards_total_one(family: str, game: ScienceGame) -> None:
    for _ in range(2):  # the second time it is remembered
        observation = game.reset(task(family))
        assert observation.text.startswith("Your task is to ")
        total, terminated = 0.0, False
        while not terminated:
            result = game.step(observation.privileged["policy_commands"][0])  # type: ignore[index]
            observation, terminated, total = result.observation, result.terminated, total + (result.reward or 0.0)
        assert total == pytest.approx(1.0)


def test_a_walk_aside_is_taken_back_by_the_plan(game: ScienceGame) -> None:
    observation = game.reset(task("find-living-thing"))
    plan = observation.privileged["policy_commands"]
    back = game.step("go to kitchen").observation.privileged["policy_commands"]
    assert back == ["go to hallway", *plan]  # type: ignore[misc]
    assert game.step("go to hallway").observation.privileged["policy_commands"] == plan
    assert game.step("look around").observation.privileged["policy_commands"] == plan


def test_failing_ends_without_a_reward_and_nonsense_changes_nothing(game: ScienceGame) -> None:
    """The wrong focus fails a task: its score falls to -1 there, and what was earned before stays below 1."""
    import re

    game.reset(task("lifespan-longest-lived"))
    for nonsense in ("dance", "reset task", "teleport kitchen"):
        result = game.step(nonsense)
        assert re.match(INVALID, result.observation.text)
        assert (result.reward, result.terminated) == (0.0, False)
    earned = [game.step(command).reward for command in ("go to greenhouse", "go to outside")]
    assert sum(map(float, filter(None, earned))) == pytest.approx(0.5)
    lost = game.step("focus on fountain")
    assert (lost.reward, lost.terminated) == (0.0, True)
    with pytest.raises(RuntimeError, match="reset first"):
        game.step("look around")


def test_folds_do_not_meet_and_families_share(tmp_path: Path) -> None:
    tasks = generated(tmp_path, {"train": 6, "heldout": 5}, families=SIMPLE, heldout_fold="dev")
    train, heldout = tasks.tasks("train"), tasks.tasks("heldout")
    assert len({t.id for t in (*train, *heldout)}) == 11
    assert sum("lifespan" in t.id for t in train) == 3
    before = (tmp_path / "games.json").read_text()
    generated(tmp_path, {"train": 6, "heldout": 5}, families=SIMPLE, heldout_fold="dev")
    assert (tmp_path / "games.json").read_text() == before
    assert json.loads(before)["made_by"]["settings"]["families"] == SIMPLE

    async def check() -> list[str]:
        script = ["look around", "go to greenhouse", "open door to the moon", "focus on air"]
        try:
            return await check_env(tasks.make_env(), train[0], script)
        finally:
            await tasks.close()

    assert asyncio.run(check()) == []


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no family 'find-a-dragon'; it has boil, "):
        generated(tmp_path, {"train": 1}, families="find-a-dragon")
    with pytest.raises(UserError, match="no simplification 'lazy'; it has "):
        generated(tmp_path, {"train": 1}, families=SIMPLE, simplifications="lazy")
    with pytest.raises(UserError, match=r"have 5 variations in the fold dev, not games\.heldout=9"):
        generated(tmp_path, {"train": 1, "heldout": 9}, families="power-component", heldout_fold="dev")
    assert not (tmp_path / "games.json").exists()
