"""ALFWorld's own game files, where they lie beside the project. If these fail, other households decide."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from real_envs.alfworld import GAME, Alfworld, AlfworldGame, AlfworldSettings, Names, clean, world_facts
from real_envs.check import check_env
from real_envs.errors import UserError
from real_envs.pooled_tasks import PooledTasks

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "alfworld"
PROBLEM = """(:init (receptacleType Desk_bar__plus_02_dot_32 DeskType)
(inReceptacle Mug_bar__minus_01 Desk_bar__plus_02_dot_32)
(inReceptacle Mug_bar__plus_03 Drawer_bar__plus_01) (receptacleAtLocation Desk_bar__plus_02_dot_32 loc_bar_8_bar_2))"""

played = pytest.mark.skipif(not DATA.is_dir(), reason="the games of ALFWorld are not beside this checkout")


def generated(folder: Path, counts: dict[str, int], **settings: str) -> PooledTasks:
    world = Alfworld()
    world.generate(folder, counts, 0, AlfworldSettings(**settings), lambda done, total: None, 1)
    return world.open(folder, True, 1)


def test_things_are_numbered_by_kind_in_the_order_of_their_coordinates() -> None:
    names = Names(PROBLEM)
    assert names.things == ["desk 1", "drawer 1", "mug 1", "mug 2"]
    text = "You arrive at loc_bar_8_bar_2. On the desk_bar__plus_02_dot_32, you see a mug_bar__minus_01."
    assert clean(names.plain(text)) == "On the desk 1, you see a mug 1."
    assert names.raw("take mug 2 from drawer 1") == "take mug_bar__plus_03 from drawer_bar__plus_01"
    assert names.raw("take mug 9 from lake 1") == "take mug 9 from lake 1"  # the game then says that nothing happens
    assert world_facts(PROBLEM) == ("mug 1 in desk 1", "mug 2 in drawer 1")


def test_what_is_wrong_with_the_games_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fast_downward", reason="pip install 'imagination[alfworld]'")
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(UserError, match="where are the games of ALFWorld"):
        generated(tmp_path / "games", {"train": 1})
    with pytest.raises(UserError, match="train is missing"):
        generated(tmp_path / "games", {"train": 1}, data=str(tmp_path))
    torn = tmp_path / "train" / "pick_and_place_simple-Mug" / "trial_T1" / GAME
    torn.parent.mkdir(parents=True)
    torn.write_text('{"pddl_problem": "(define')
    with pytest.raises(UserError, match=f"{GAME} is no game of ALFWorld, or torn: JSONDecodeError"):
        generated(tmp_path / "games", {"train": 1}, data=str(tmp_path))
    torn.write_text(json.dumps({"pddl_problem": PROBLEM}))
    with pytest.raises(UserError, match=r"has 1 games for 'train', not games\.train=2"):
        generated(tmp_path / "games", {"train": 2}, data=str(tmp_path))
    with pytest.raises(ValueError, match="share the split valid_seen"):
        AlfworldSettings(train="train+valid_seen")
    assert not (tmp_path / "games" / "games.json").exists()


@played
def test_the_planner_solves_and_splits_do_not_meet(tmp_path: Path) -> None:
    pytest.importorskip("fast_downward", reason="pip install 'imagination[alfworld]'")
    tasks = generated(tmp_path, {"train": 3, "heldout": 2}, data=str(DATA), train="train+valid_train")
    train, heldout = tasks.tasks("train"), tasks.tasks("heldout")
    asyncio.run(tasks.close())
    assert len({t.id for t in (*train, *heldout)}) == 5
    assert all("/valid_seen/" in t.id for t in heldout)
    assert not any("/valid_seen/" in t.id for t in train)
    game = AlfworldGame(privileged=True)
    for task in (train[0], heldout[0]):
        observation = game.reset(task)
        assert "Your task is to:" in observation.text
        assert "_bar_" not in observation.text
        assert any(fact.partition(" in ")[2] in observation.text for fact in task.world_facts)
        rewards: list[float | None] = []
        for _ in range(60):
            result = game.step(observation.privileged["policy_commands"][0])  # type: ignore[index]
            observation = result.observation
            assert "_bar_" not in observation.text
            rewards.append(result.reward)
            if result.terminated:
                break
        assert result.terminated
        assert (sum(map(bool, rewards)), rewards[-1]) == (1, 1.0)
    with pytest.raises(RuntimeError, match="not running"):
        game.step("look")
    assert game.reset(heldout[0]).text == game.reset(heldout[0]).text
    assert game.step("dance with mug 1").observation.text == "Nothing happens."
    game.close()


@played
def test_it_keeps_the_protocol(tmp_path: Path) -> None:
    pytest.importorskip("fast_downward", reason="pip install 'imagination[alfworld]'")
    tasks = generated(tmp_path, {"train": 1}, data=str(DATA))
    task = tasks.tasks("train")[0]
    game = AlfworldGame(privileged=True)
    plan: list[str] = []
    observation = game.reset(task)
    while commands := observation.privileged["policy_commands"]:
        plan.append(commands[0])  # type: ignore[index]
        observation = game.step(plan[-1]).observation
    game.close()

    async def check() -> list[str]:
        try:
            return await check_env(tasks.make_env(), task, ["look", "go to the moon", *plan])
        finally:
            await tasks.close()

    assert asyncio.run(check()) == []
