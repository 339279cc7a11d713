"""The page to play in a dream by hand, in a real browser: a task is picked, actions are typed, answers are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")

from imagination.settings.dreams import ServeSettings
from tests.support.chromium import Chromium
from tests.support.served import STARTS, planted_world, served

ATTACK = "<img src=x onerror=\"alert('img')\"><script>alert(1)</script>"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(planted_world(max_turns=4), ServeSettings(sessions=2)) as found:
        yield found


@pytest.fixture
def page(fresh: Chromium, address: str) -> Iterator[Chromium]:
    """The page, freshly loaded; it asks no other address."""
    fresh.send("Page.navigate", url="about:blank")
    fresh.wait("location.protocol === 'about:'")
    fresh.send("Page.navigate", url=f"http://{address}/")
    fresh.wait("document.readyState === 'complete' && document.querySelectorAll('#task option').length === 2")
    yield fresh
    fresh.run("1")  # collects events
    own = (f"http://{address}/", f"ws://{address}/", "about:", "data:")
    assert [url for url in fresh.requests if not url.startswith(own)] == []


def begin(page: Chromium, task: str, seed: int = 0) -> None:
    page.run(f"document.getElementById('task').value = {json.dumps(task)}")
    page.run(f"document.getElementById('seed').value = '{seed}'")
    page.click("#begin button")
    page.wait(f"document.getElementById('opening').textContent === {json.dumps(STARTS[f'{task}@0'].text)}")
    page.wait("!document.getElementById('action').disabled && !document.querySelector('.turn')")


def enter(page: Chromium, action: str) -> None:
    page.click("#action")
    page.type(action)
    # with the text that the key has on a keyboard: without it, no form is submitted
    page.send("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r")
    page.send("Input.dispatchKeyEvent", type="keyUp", key="Enter", windowsVirtualKeyCode=13)


def act(page: Chromium, action: str) -> None:
    before = page.run("document.querySelectorAll('.turn').length")
    enter(page, action)
    page.wait(f"document.querySelectorAll('.turn').length === {before + 1}")


def last(page: Chromium) -> str:
    return str(page.run("[...document.querySelectorAll('.turn')].at(-1).innerText"))


def test_an_episode_is_played_to_its_end(page: Chromium) -> None:
    begin(page, "hall")
    act(page, "take lamp")
    told = last(page)
    assert "take lamp 0 " in told
    assert re.search(r"reward 0,.* 75\.0 %,.* 95\.0 %", told)
    page.wait("document.querySelectorAll('.near li').length === 1")
    page.click(".near summary")
    assert "the lamp." in page.text(".near")
    assert STARTS["hall@0"].text in page.text(".near")
    act(page, "win")
    assert "You win." in last(page)
    assert "reward 1, confidence 90.0 %" in last(page)
    assert "has ended" in last(page)
    assert page.run("document.getElementById('action').disabled")
    assert "over" in page.text("#status")
    begin(page, "cave")  # in the same session


def test_the_guards_doubt_is_shown(page: Chromium) -> None:
    begin(page, "hall")
    act(page, "doubt")
    assert "guard" in last(page)
    assert "unsure" in last(page)


def test_a_dream_that_breaks_says_so_and_another_can_begin(page: Chromium) -> None:
    begin(page, "hall")
    enter(page, "break")
    page.wait("document.getElementById('status').textContent.includes('prediction_invalid')")
    assert page.run("document.getElementById('action').disabled")
    begin(page, "cave")


def test_what_is_dreamed_is_text_and_never_code(page: Chromium) -> None:
    begin(page, "hall")
    act(page, ATTACK)
    assert ATTACK in last(page)
    assert page.run("document.querySelectorAll('img, .turn script').length") == 0


def test_the_turn_limit_is_shown_and_the_page_fits_a_phone(page: Chromium) -> None:
    page.screen(360, 700)
    begin(page, "hall")
    for action in ("a", "b", "c", "d" * 300):
        act(page, action)
    assert "turn_limit" in last(page)
    assert page.run("document.documentElement.scrollWidth <= 360")
