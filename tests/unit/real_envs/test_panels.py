"""If these fail, tables compare scores of different tasks, or of two versions of one task, without a word."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.collect import generate_tasks
from imagination.commands.panel import first_texts, panel
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import open_tasks
from imagination.settings import Config, UserError
from imagination.settings.compose import config_folder
from real_envs.panels import Panel, digest
from real_envs.store import TrajectoryStore
from real_envs.world import FILE, find_world
from real_envs.worlds.generated import GeneratedWorld, TaskRequest, draw_distinct
from real_envs.worlds.textworld import GameSettings, TextWorld
from tests.support.refusal import refused

gymnasium = pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")
PANELS = sorted((config_folder() / "panels").glob("*.json"))


def settings(seed: int, held_out: str = "") -> Config:
    config = Config(seed=seed)
    config.env.name, config.env.options = "gymnasium", {"id": "BabyAI-GoToObj-v0"}
    config.games.train, config.games.heldout, config.games.panel = 12, 4, held_out
    return config


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The panel of a run of seed 0."""
    folder = tmp_path_factory.mktemp("first")
    generate_tasks(settings(0), RunFolder(folder, 0))
    panel(settings(0), folder)
    return folder / "panel.json"


def splits_of(folder: Path) -> dict[str, Any]:
    splits: dict[str, Any] = json.loads((folder / "games" / FILE).read_text())["splits"]
    return splits


def test_runs_of_other_seeds_have_the_held_out_tasks_of_the_panel(written: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path, 1)
    generate_tasks(settings(1, str(written)), run)
    first, second = splits_of(written.parent), splits_of(tmp_path)
    assert second["heldout"] == first["heldout"]
    assert not set(second["train"]) & set(first["train"])
    made = Panel.load(written)
    assert [digest(text) for text in asyncio.run(first_texts(settings(1), run))] == made.starts
    assert run.summary["panel"] == {"name": str(written), "digest": made.digest}
    generate_tasks(settings(2), RunFolder(tmp_path, 2))
    assert splits_of(tmp_path)["heldout"] != first["heldout"], "without a panel every seed has its own"


@pytest.mark.parametrize(("split", "logged"), [("heldout", "train"), ("train", "heldout")])
def test_no_task_of_the_games_is_in_the_other_split_of_the_log(tmp_path: Path, split: str, logged: str) -> None:
    """As where games.train was lowered or raised, or a panel came later."""
    run, config = RunFolder(tmp_path, 0), settings(0)
    generate_tasks(config, run)
    task = open_tasks(run, config.env, 1).tasks(split)[0].id
    TrajectoryStore.create(run.log, {split: [], logged: [task]}, meta={"environment": "gymnasium"})
    refused(lambda: open_tasks(run, config.env, 1), task, "games.*", error=UserError)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"world": "textworld"}, ("env=textworld", "env=gymnasium")),
        ({"package": "minigrid==0.1"}, ("minigrid==0.1", "cannot be compared")),
        ({"options": {"id": "BabyAI-GoToLocal-v0"}}, ("env.options.id=BabyAI-GoToLocal-v0", "BabyAI-GoToObj-v0")),
        ({"starts": ["0" * 16] * 4}, ("task 0", "does not begin as it did")),
        ({"starts": []}, ("4 tasks and 0 starts",)),
    ],
)
def test_a_panel_of_something_else_is_refused(
    written: Path, tmp_path: Path, changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(replace(Panel.load(written), **changed).text())
    run = RunFolder(tmp_path / "run", 1)
    refused(lambda: generate_tasks(settings(1, str(other)), run), "games.panel", *words, error=UserError)


@pytest.mark.parametrize("named", ["torn.json", "none.json", "nowhere"])
def test_a_panel_that_is_not_there_or_torn(written: Path, tmp_path: Path, named: str) -> None:
    (tmp_path / "torn.json").write_text(written.read_text()[:-40])
    path = str(tmp_path / named) if named.endswith(".json") else named
    run = RunFolder(tmp_path / "run", 1)
    refused(lambda: generate_tasks(settings(1, path), run), f"games.panel={path}", error=UserError)


def test_no_training_task_begins_as_one_of_the_panel() -> None:
    drawn = draw_distinct(
        TaskRequest({"train": 3}, 0, lambda d, n: None, Panel("", {}, "", "", ["b"], [digest("b")])),
        lambda split, count: "abcdef",
        lambda letter: letter,
        lambda s, n: "",
    )
    assert drawn == {"train": ["a", "c", "d"]}


def test_games_of_a_panel_are_built_anew_and_trained_in_by_nobody(tmp_path: Path) -> None:
    world, sizes = TextWorld(), GameSettings(1, 2, 1)
    fixed = Panel("textworld", {}, "", "", ["tw-r1-o2-q1-s2"], [""])  # the second training game of seed 0 otherwise
    world.generate(tmp_path, {"train": 2, "heldout": 1}, 0, sizes, lambda d, n: None, 1, fixed)
    tasks = world.open(tmp_path, False, 1)
    assert [t.id for t in tasks.tasks("heldout")] == fixed.tasks
    assert [t.id for t in tasks.tasks("train")] == ["tw-r1-o2-q1-s1", "tw-r1-o2-q1-s3"]
    asyncio.run(tasks.close())


@pytest.mark.parametrize("path", PANELS, ids=lambda path: path.stem)
def test_panels_that_come_with_the_package_are_whole(path: Path) -> None:
    made = Panel.load(path)
    assert len(set(made.starts)) == len(made.tasks)
    assert len(made.tasks) >= 100 or made.world == "alfworld"  # of which there are not so many for everybody
    try:
        world = find_world(made.world)
    except UserError as error:
        pytest.skip(str(error))
    assert isinstance(world, GeneratedWorld)
    assert made.package.startswith(f"{world.package}==")
