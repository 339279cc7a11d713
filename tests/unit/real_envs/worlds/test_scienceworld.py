"""The real simulator in Java. If these fail, dreams are compared with something else than ScienceWorld."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagination.settings.compose import config_folder
from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.panels import Panel
from real_envs.worlds.generated import TaskRequest
from real_envs.worlds.scienceworld import INVALID, ScienceGame, ScienceSettings, ScienceWorld
from tests.support.played import by_plan, findings, generated
from tests.support.refusal import refused

pytest.importorskip("scienceworld", reason="pip install 'imagination[scienceworld]'")
SIMPLE = "find-living-thing+lifespan-longest-lived"


@pytest.fixture(scope="module")
def game() -> Iterator[ScienceGame]:
    made = ScienceGame(privileged=True)
    yield made
    made.close()


def task(family: str, variation: int = 0) -> Task:
    return Task(f"sw-{family}-{variation}", {"family": family, "variation": str(variation), "simplifications": "easy"})


@pytest.mark.parametrize("family", ["find-living-thing", "chemistry-mix", "lifespan-longest-lived"])
def test_the_gold_path_solves_and_its_rewards_total_one(family: str, game: ScienceGame) -> None:
    for _ in range(2):  # the second time it is remembered
        start = game.reset(task(family))
        assert start.text.startswith("Your task")
        results = by_plan(game, start, 1000)
        assert results[-1].terminated
        assert sum(result.reward or 0.0 for result in results) == pytest.approx(1.0)


def test_a_task_begins_with_the_same_words_though_not_in_the_same_order() -> None:
    """Which is why a panel compares sorted words here: most first texts of this task differ in the order of paints."""
    made = ScienceGame()
    begins = [made.reset(task("lifespan-shortest-lived", 104)).text for _ in range(8)]
    made.close()
    assert not ScienceWorld.in_order
    assert len({" ".join(sorted(text.split())) for text in begins}) == 1


def test_nobody_trains_in_what_begins_as_a_task_of_the_panel() -> None:
    panel = Panel.load(config_folder() / "panels" / "scienceworld.json")
    settings = ScienceSettings(**panel.options)
    drawn = ScienceWorld().draw(settings, TaskRequest({"train": 206}, 0, lambda *_: None, panel))["train"]
    assert len(drawn) == 206
    assert not [one for one in drawn if one in panel.alike]
    with pytest.raises(UserError, match=r"have 206 variations in the fold train, not games\.train=207"):
        ScienceWorld().draw(settings, TaskRequest({"train": 207}, 0, lambda *_: None, panel))


def test_a_walk_aside_is_taken_back_by_the_plan(game: ScienceGame) -> None:
    observation = game.reset(task("find-living-thing"))
    plan = observation.privileged["policy_commands"]
    back = game.step("go to kitchen").observation.privileged["policy_commands"]
    assert back == ["go to hallway", *plan]  # type: ignore[misc]
    assert game.step("go to hallway").observation.privileged["policy_commands"] == plan
    assert game.step("look around").observation.privileged["policy_commands"] == plan


def test_failing_ends_without_a_reward_and_nonsense_changes_nothing(game: ScienceGame) -> None:
    """The wrong focus fails a task: its score falls to -1 there, and what was earned before stays below 1."""
    game.reset(task("lifespan-longest-lived"))
    for nonsense in ("dance", "reset task", "teleport kitchen"):
        result = game.step(nonsense)
        assert re.match(INVALID, result.observation.text)
        assert (result.reward, result.terminated) == (0.0, False)
    earned = [game.step(command).reward for command in ("go to greenhouse", "go to outside")]
    assert sum(map(float, filter(None, earned))) == pytest.approx(0.5)
    lost = game.step("focus on fountain")
    assert (lost.reward, lost.terminated) == (0.0, True)
    refused(lambda: game.step("look around"), "reset first", error=RuntimeError)


def test_folds_do_not_meet_and_families_share(tmp_path: Path) -> None:
    settings = ScienceSettings(families=SIMPLE, heldout_fold="dev")
    tasks = generated(ScienceWorld(), tmp_path, {"train": 6, "heldout": 5}, settings)
    train, heldout = tasks.tasks("train"), tasks.tasks("heldout")
    assert len({t.id for t in (*train, *heldout)}) == 11
    assert sum("lifespan" in t.id for t in train) == 3
    before = (tmp_path / "games.json").read_text()
    generated(ScienceWorld(), tmp_path, {"train": 6, "heldout": 5}, settings)
    assert (tmp_path / "games.json").read_text() == before
    assert json.loads(before)["made_by"]["settings"]["families"] == SIMPLE
    assert findings(tasks, ["look around", "go to greenhouse", "open door to the moon", "focus on air"]) == []


@pytest.mark.parametrize(
    ("settings", "counts", "tokens"),
    [
        ({"families": "find-a-dragon"}, {"train": 1}, ["'find-a-dragon'", "boil, "]),
        ({"families": SIMPLE, "simplifications": "lazy"}, {"train": 1}, ["'lazy'", "it has "]),
        ({"families": "power-component", "heldout_fold": "dev"}, {"train": 1, "heldout": 9}, ["games.heldout=9", "5 "]),
    ],
)
def test_what_is_not_there_is_said(
    settings: dict[str, str], counts: dict[str, int], tokens: list[str], tmp_path: Path
) -> None:
    refused(lambda: generated(ScienceWorld(), tmp_path, counts, ScienceSettings(**settings)), *tokens)  # type: ignore[arg-type]
    assert not (tmp_path / "games.json").exists()
