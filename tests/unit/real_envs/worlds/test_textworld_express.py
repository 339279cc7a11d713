"""The real games in Java. If these fail, dreams are compared with something else than TextWorldExpress."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from real_envs.env import EnvFailure, Task
from real_envs.scripted_agents import ScriptedAgent, expert, noisy
from real_envs.trajectory import StopReason
from real_envs.worker_pool import PooledTasks
from real_envs.worlds import textworld_express
from real_envs.worlds.textworld_express import (
    FOLDS,
    INVALID,
    LANGUAGE,
    ExpressSettings,
    TextWorldExpress,
    TextWorldExpressGame,
)
from tests.support.played import by_plan, findings, generated
from tests.support.refusal import refused

pytest.importorskip("textworld_express", reason="pip install 'imagination[textworld-express]'")
GAMES = ("coin", "mapreader", "twc", "sorting", "arithmetic", "cookingworld")
SMALL = "numLocations=3,includeDoors=0,numDistractorItems=0"


@pytest.fixture(scope="module")
def game() -> TextWorldExpressGame:
    return TextWorldExpressGame(privileged=True)


def tasks(folder: Path, counts: dict[str, int], seed: int = 0, **settings: str) -> dict[str, list[Task]]:
    made = generated(TextWorldExpress(), folder, counts, ExpressSettings(**settings), seed)  # type: ignore[arg-type]
    return {split: list(made.tasks(split)) for split in counts}


@pytest.mark.parametrize("name", GAMES)
def test_the_gold_path_solves_and_its_rewards_total_one(name: str, game: TextWorldExpressGame) -> None:
    results = by_plan(game, game.reset(ExpressSettings(game=name).task("train", 3)))  # type: ignore[arg-type]
    assert results[-1].terminated
    assert sum(result.reward or 0.0 for result in results) == pytest.approx(1.0)
    assert all(not r.truncated and (r.reward or 0.0) >= 0 for r in results)


def test_a_task_that_is_failed_ends_without_a_reward(game: TextWorldExpressGame) -> None:
    """Arithmetic with the wrong answer in the box: what was earned before stays below the 1 of a solved task."""
    start = game.reset(ExpressSettings(game="arithmetic").task("train", 3))
    right = next(name for name in start.privileged["policy_commands"] if name.startswith("put "))  # type: ignore[attr-defined]
    wrong = next(
        name for name in start.privileged["admissible_commands"]  # type: ignore[attr-defined]
        if name.startswith("take ") and name[5:] not in right and name != "take math problem"
    )  # fmt: skip
    game.step(wrong)
    failed = game.step(f"put {wrong[5:]} in box")
    assert (failed.terminated, failed.reward) == (True, 0.0)
    refused(lambda: game.step("look around"), "reset first", error=RuntimeError)


def test_an_invalid_action_is_an_ordinary_step_that_says_so(game: TextWorldExpressGame) -> None:
    start = game.reset(ExpressSettings().task("train", 1))
    result = game.step("dance with the stove")
    assert re.match(INVALID, result.observation.text)
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, False)
    assert result.observation.privileged["policy_commands"] == start.privileged["policy_commands"]


def test_a_step_aside_is_taken_back_by_the_plan(game: TextWorldExpressGame) -> None:
    start = game.reset(ExpressSettings(params="numLocations=5,includeDoors=0").task("train", 7))
    plan = list(start.privileged["policy_commands"])  # type: ignore[call-overload]
    aside = next(c for c in start.privileged["admissible_commands"] if c.startswith("move ") and c != plan[0])  # type: ignore[attr-defined]
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[aside.removeprefix("move ")]
    moved = game.step(aside)
    assert moved.observation.privileged["policy_commands"] == [f"move {back}", *plan]


def test_the_environment_keeps_the_protocol_and_repeats_itself(game: TextWorldExpressGame) -> None:
    task = ExpressSettings(game="twc", params="numLocations=1,numItemsToPutAway=1").task("train", 5)
    plan = game.reset(task).privileged["policy_commands"]
    made = PooledTasks({"train": [task]}, partial(TextWorldExpressGame, privileged=True), workers=1)
    assert findings(made, plan) == []  # type: ignore[arg-type]


def test_splits_are_of_their_folds_and_share_no_game(tmp_path: Path, game: TextWorldExpressGame) -> None:
    made = tasks(tmp_path, {"train": 12, "dev": 4, "heldout": 4}, params=SMALL, heldout_fold="test")
    for split, fold in (("train", "train"), ("dev", "dev"), ("heldout", "test")):
        assert all(int(task.spec["seed"]) in FOLDS[fold] and task.spec["fold"] == fold for task in made[split])
    starts = [game.reset(task).text for of_split in made.values() for task in of_split]
    assert len(set(starts)) == len(starts) == 20
    assert all(start.startswith("Your task") for start in starts)


def test_tasks_are_the_same_for_the_same_seed_and_kept_where_they_are(tmp_path: Path) -> None:
    first = tasks(tmp_path / "a", {"train": 3}, params=SMALL)
    written = (tmp_path / "a" / "games.json").stat().st_mtime_ns
    assert tasks(tmp_path / "a", {"train": 3}, params=SMALL) == first
    assert (tmp_path / "a" / "games.json").stat().st_mtime_ns == written
    assert tasks(tmp_path / "b", {"train": 3}, params=SMALL) == first
    assert tasks(tmp_path / "c", {"train": 3}, seed=1, params=SMALL) != first
    assert json.loads((tmp_path / "a" / "games.json").read_text())["made_by"]["settings"]["params"] == SMALL


def test_a_game_without_so_many_instances_says_so(tmp_path: Path) -> None:
    params = "numLocations=1,includeDoors=0,numDistractorItems=0"
    refused(lambda: tasks(tmp_path, {"train": 40}, params=params), "40", " found", error=ValueError)


@pytest.mark.parametrize("params", ["numLocations", "numLocations=many", "a=1;b=2"])
def test_parameters_that_cannot_be_read_are_refused(params: str) -> None:
    refused(lambda: ExpressSettings(params=params), "params wants", error=ValueError)


def test_scripted_agents_differ_in_skill(game: TextWorldExpressGame) -> None:
    """Over twenty instances: the expert solves all, a very noisy one fewer, and its mistakes are of this world."""

    async def play(agent: ScriptedAgent, seed: int) -> tuple[bool, list[str]]:
        observation = game.reset(
            ExpressSettings(game="mapreader", params="numLocations=8,maxDistanceApart=2").task("train", seed)
        )
        actor, said, total = agent.start(observation, seed), [], 0.0
        for _ in range(30):
            said.append(await actor.act())
            result = game.step(said[-1])
            total += result.reward or 0.0
            if result.terminated:
                break
            actor.observe(result.observation)
        return total > 0.99, said

    def solved(agent: ScriptedAgent) -> tuple[int, list[str]]:
        played = [asyncio.run(play(agent, seed)) for seed in range(20)]
        return sum(won for won, _ in played), [action for _, actions in played for action in actions]

    by_expert, _ = solved(expert(LANGUAGE))
    by_noisy, said = solved(noisy(0.8, None, LANGUAGE))
    assert by_expert == 20 > by_noisy
    assert any(action.startswith("move ") for action in said)


def test_parameters_that_contradict_each_other_are_passed_over_or_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some three rooms have one that lies three doors away, none has one that lies eight away."""
    params = "numLocations=3,maxDistanceApart={},includeDoors=0,maxDistractorItemsPerLocation=0"
    counts = {"train": 3, "heldout": 1}
    assert len(tasks(tmp_path / "some", counts, game="mapreader", params=params.format(3))["train"]) == 3
    monkeypatch.setattr(textworld_express, "_REFUSED", 2)
    refused(
        lambda: tasks(tmp_path / "none", counts, game="mapreader", params=params.format(8)),
        "mapreader cannot be made", "No locations could be found that distance apart",
    )  # fmt: skip


def test_a_game_that_takes_too_long_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a slow machine would draw other games."""

    def late(task: Task) -> str:
        raise EnvFailure(StopReason.ENV_TIMEOUT, "reset took longer than 60 s")

    monkeypatch.setattr(textworld_express, "in_worker", lambda game: nullcontext(late))
    with pytest.raises(EnvFailure, match="longer"):
        tasks(tmp_path, {"train": 1})
