"""Real pages in a real browser. If these fail, agents on the web see or do something else than is there."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from imagination.cli import main
from real_envs.check import check_env
from real_envs.env import StepResult, Task
from real_envs.screens import AFTER, BEFORE, place_of
from real_envs.trajectory import Observation, Turn
from real_envs.worlds.web import browser as browser_module
from real_envs.worlds.web.browser import BrowserGame, BrowserLook, admissible
from real_envs.worlds.web.chromium import find_chromium, load_suite
from real_envs.worlds.web.miniwob import FAMILIES, Miniwob, MiniwobSettings, make_game
from real_envs.worlds.web.page import Element
from real_envs.worlds.web.suites import BrowserGym, BrowserSettings
from tests.support.chromium import find
from tests.support.played import by_plan, generated
from tests.support.refusal import mistaken, refused

pytest.importorskip("browsergym", reason="pip install 'imagination[miniwob]'")
pytest.importorskip("miniwob", reason="pip install 'imagination[miniwob]'")
needs_browser = pytest.mark.skipif(find() is None, reason="no Chromium: apt-get install chromium")


def drawn(folder: Path, counts: dict[str, int], families: str = "click-tab enter-text", seed: int = 0) -> Any:
    return generated(Miniwob(), folder, counts, MiniwobSettings(families), seed)


class InThread:
    def __init__(self, game: BrowserGame, thread: ThreadPoolExecutor, screens: Path) -> None:
        self._game, self._thread, self.screens = game, thread, screens

    def reset(self, task: Task) -> Observation:
        return self._thread.submit(self._game.reset, task).result()

    def step(self, action: str) -> StepResult:
        return self._thread.submit(self._game.step, action).result()


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    """With experts and pictures."""
    Miniwob()  # says where the pages are
    folder = tmp_path_factory.mktemp("screens")
    with ThreadPoolExecutor(1) as thread:  # in which Playwright's event loop runs, away from those of other tests
        game = thread.submit(make_game, MiniwobSettings(), folder, privileged=True).result()
        yield InThread(game, thread, folder)
        thread.submit(game.close).result()


def task(family: str, seed: int = 3) -> Task:
    return Task(f"miniwob.{family}/s{seed}", {"id": f"miniwob.{family}", "seed": str(seed)})


@needs_browser
@pytest.mark.parametrize("family", FAMILIES.split())
def test_the_expert_solves_a_page_of_each_family(game: InThread, family: str) -> None:
    observation = game.reset(task(family))
    assert observation.text.startswith("Goal: ")
    last = by_plan(game, observation, 12)[-1]
    assert (last.terminated, last.reward) == (True, 1.0)
    refused(lambda: game.step("click('1')"), "reset", error=RuntimeError)


@needs_browser
def test_the_same_page_reads_the_same_each_time_and_mistakes_change_nothing(game: InThread) -> None:
    first = game.reset(task("click-checkboxes")).text
    page = first.partition("\n")[2]
    for action, answer in {
        "click('99')": "Error: there is no element '99'",
        "tap('1')": "Error: there is no action 'tap'",
        "click('1": "Error: this is no action",
        "upload_file('1', '/etc/passwd')": "Error: there is no action 'upload_file'",
        "fill('1', 'x')": 'Error: Input of type "checkbox" cannot be filled',
        "click('1', 'nowhere')": "Error: button: expected one of (left|right|middle)",
        "click('1', 2, 3, 4)": "Error: the action has other arguments",
    }.items():
        result = game.step(action)
        assert result.observation.text == f"{answer}\n{page}"
        assert (result.reward, result.terminated, result.truncated) == (0.0, False, False)
    assert game.step("click('1')").observation.text != page
    assert game.reset(task("click-checkboxes")).text == first


@needs_browser
def test_pictures_are_of_the_moment_that_they_stand_beside(game: InThread) -> None:
    game.reset(task("click-checkboxes"))
    wrong, click, back = (game.step(action).info for action in ("nonsense", "click('1')", "click('1')"))
    assert wrong[BEFORE] == wrong[AFTER], "nothing happened"
    assert click[AFTER] != wrong[AFTER]
    assert {BEFORE} & (set(click) | set(back)) == set(), "only the first turn tells what was there at the start"
    assert all((game.screens / str(info[AFTER])).is_file() for info in (wrong, click, back))


@needs_browser
def test_a_turn_says_where_its_element_was_in_the_picture_before_it(game: InThread) -> None:
    """A click on a checkbox colours it, so all that changes lies where the turn says."""
    game.reset(task("click-checkboxes"))
    infos = [game.step(action).info for action in ("noop(0)", "click('2')", "nonsense", "click('99')")]
    places = [place_of(Turn("", "", 0.0, False, info)) for info in infos]
    assert [place is not None for place in places] == [False, True, False, False]
    place = places[1]
    assert place is not None
    before, after = (
        np.asarray(Image.open(game.screens / str(info[AFTER])).convert("RGB"), dtype=int) for info in infos[:2]
    )
    y, x = np.nonzero((before != after).any(2))
    assert len(y) > 20
    assert place.x - 1 <= x.min() <= x.max() <= place.x + place.width + 1
    assert place.y - 1 <= y.min() <= y.max() <= place.y + place.height + 1


@needs_browser
def test_tasks_are_pages_that_differ_and_another_seed_draws_others(tmp_path: Path) -> None:
    tasks = drawn(tmp_path / "a", {"train": 3, "heldout": 2})
    assert [len(tasks.tasks(split)) for split in ("train", "heldout")] == [3, 2]
    ids = [t.spec["id"].removeprefix("miniwob.") for t in tasks.tasks("train")]
    assert ids == ["click-tab", "enter-text", "click-tab"]

    async def starts() -> list[str]:
        env = tasks.make_env()
        found = [(await env.reset(t, 0)).text for split in ("train", "heldout") for t in tasks.tasks(split)]
        await env.close()  # gives back the only worker
        wrong = await check_env(tasks.make_env(), tasks.tasks("train")[0], ["click('9')", "what", "click('1')"])
        await tasks.close()
        return [*found, *wrong]

    found = asyncio.run(starts())
    assert len(set(found)) == 5
    kept = (tmp_path / "a" / "games.json").read_bytes()
    drawn(tmp_path / "a", {"train": 3, "heldout": 2})
    assert (tmp_path / "a" / "games.json").read_bytes() == kept
    drawn(tmp_path / "b", {"train": 1}, seed=1)
    first, other = (json.loads((tmp_path / name / "games.json").read_text())["splits"]["train"][0] for name in "ab")
    assert first != other


@needs_browser
def test_a_family_that_is_unknown_or_has_too_few_pages_is_one_line(tmp_path: Path) -> None:
    refused(lambda: drawn(tmp_path, {"train": 1}, "click-tabb"), "'click-tabb'", "click-tab,")
    refused(lambda: drawn(tmp_path, {"train": 4}, "focus-text-2"), "focus-text-2", "3 different starts")
    assert not (tmp_path / "games.json").exists()


@needs_browser
def test_any_suite_of_browsergym_goes_through_the_same_file(tmp_path: Path) -> None:
    settings = BrowserSettings("miniwob", r"miniwob\.click-(test|button)$", seeds=2, actions="bid", delay=0.1)
    tasks = generated(BrowserGym(), tmp_path, {"train": 2, "heldout": 2}, settings)
    ids = {split: {t.spec["id"] for t in tasks.tasks(split)} for split in ("train", "heldout")}
    assert ids["train"].isdisjoint(ids["heldout"]), "seeds of an id stay together"

    async def play() -> str:
        env = tasks.make_env()
        start = (await env.reset(tasks.tasks("train")[0], 0)).text
        await tasks.close()
        return start

    goal, head, *_ = asyncio.run(play()).split("\n")
    assert goal.startswith("Goal: ")
    assert head.startswith("Page: ")
    assert "file://" in head
    refused(lambda: generated(BrowserGym(), tmp_path, {"train": 9}, settings), "4 tasks")


def test_a_suite_that_is_not_there_is_one_line_that_says_how() -> None:
    refused(lambda: load_suite("nosuite"), "pip install browsergym-nosuite")
    for name, value in {"suite": "../x", "seeds": 0, "match": "(", "delay": -1.0}.items():
        refused(lambda name=name, value=value: BrowserSettings(**{name: value}), name, error=ValueError)  # type: ignore[misc]


def test_no_chromium_and_one_that_does_not_start_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["env=miniwob", "games.train=1", "games.heldout=1", f"output={tmp_path}"]
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "nowhere"))
    refused(find_chromium, "apt-get install chromium-headless-shell")
    mistaken(capsys, ["collect", "run=a", *where], "CHROMIUM=")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CHROMIUM", str(broken))
    assert main(["collect", "run=b", *where]) == 2
    said = capsys.readouterr().err
    assert "does not start" in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) <= 2
    monkeypatch.delenv("CHROMIUM")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refused(find_chromium, "no Chromium: install")


def test_what_scripted_agents_may_try_is_on_the_page() -> None:
    page = [
        Element(1, "textbox", ""), Element(2, "combobox", "Size"), Element(4, "option", "M"),
        Element(3, "button", "Go", None, ("disabled",)), Element(5, "listbox", "Colours"), Element(6, "option", "red"),
        Element(None, "text", "hello"),
    ]  # fmt: skip
    assert admissible(page, 'Enter "ada" and "bob".') == [
        "fill('1', 'ada')", "fill('1', 'bob')", "click('1')", "click('2')", "select_option('2', 'M')",
        "click('5')", "click('6')",
    ]  # fmt: skip
    assert admissible([], "") == ["noop(0)"]


def test_errors_are_short_and_the_same_in_every_episode() -> None:
    said = "Error: Locator.click: Error: Element with bid 'a12' is broken\n  Call log: 0x7f21\n"
    assert browser_module._short(said) == "Element with the element is broken"
    assert browser_module._short("TimeoutError: Timeout 1000ms exceeded.") == "the element cannot be acted on"
    assert browser_module._short("") == ""
    assert BrowserLook("miniwob", "bid", 0.1).crop is None
