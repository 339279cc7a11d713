"""The page of a comparison in a real browser: 1,000 pairs, clicked, typed and linked through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imagination.evaluation.compare.pairs import Pair, first_kind, pair_up
from imagination.report.compare_page import render_page
from real_envs.screens import keep
from real_envs.trajectory import Source, Turn
from tests.support.chromium import Chromium
from tests.support.comparisons import comparison, episode, made_up_pair

ATTACK = (
    "</script><script>window.hacked = 1; alert('script')</script><img src=x onerror=\"alert('img')\">"
    "<svg onload=alert(2)><!--<script>\u2028{{constructor}} javascript:alert(3)"
)
ODD = "dream/a b?c#d%2/é&q=x"  # an id that an address must quote


def evil_pair() -> Pair:
    dream = [Turn(ATTACK, ATTACK + " dreamed", 0.0, False)]
    real = [Turn(ATTACK, ATTACK + " unlike", 0.0, False)]
    return pair_up(
        ODD, "dream", "train", episode("d", dream, task=ATTACK, start=ATTACK),
        episode("r", real, Source.REAL, task=ATTACK, start=ATTACK),
    )  # fmt: skip


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    pairs = [made_up_pair(n, turns=9 + n % 3, first=None if n % 5 == 4 else n % 9) for n in range(999)]
    return comparison([*pairs, evil_pair()])


@pytest.fixture(scope="module")
def page(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "compare.html"
    path.write_text(render_page(made), encoding="utf-8")
    return path


@pytest.fixture
def opened(fresh: Chromium, page: Path) -> Chromium:
    """The page, freshly loaded."""
    fresh.open(page)
    return fresh


def counted(browser: Chromium, text: str) -> None:
    browser.wait(f"document.getElementById('count').textContent === {json.dumps(text)}")


def current(browser: Chromium) -> str:
    return str(browser.run("document.querySelector('.permalink').textContent"))


def test_a_thousand_pairs_load_at_once_and_only_the_rows_in_view_exist(opened: Chromium, page: Path) -> None:
    size = page.stat().st_size
    assert size < 6_000_000
    seconds = opened.open(page)
    assert seconds < 5
    counted(opened, "1,000 pairs")
    assert 5 < opened.run("document.querySelectorAll('.row').length") < 40
    assert opened.run("document.getElementsByTagName('*').length") < 2500
    assert {url for url in opened.requests if not url.startswith("about:")} == {page.resolve().as_uri()}
    slowest = opened.run(
        "(() => { const q = document.querySelector('[name=q]'); let worst = 0;"
        "for (const word of ['lamp', 'kitchen number 7', 'zzz']) { q.value = word; location.hash = '#?q=' + word;"
        "const t = performance.now(); dispatchEvent(new Event('hashchange'));"
        "worst = Math.max(worst, performance.now() - t); } return worst; })()"
    )
    assert slowest < 300, "milliseconds that a search may block the page"


def test_search_finds_text_of_either_world_and_marks_it(opened: Chromium, made: dict[str, Any]) -> None:
    def has(pair: dict[str, Any], *words: str) -> bool:
        answers = [turn[side] for turn in pair["turns"] for side in ("dream", "real") if turn[side]]
        texts = [pair["start"], *(t["action"] for t in pair["turns"]), *(a["observation"] for a in answers), pair["id"]]
        return all(any(word in text.lower() for text in texts) for word in words)

    opened.click("[name=q]")
    opened.type('"number 17" CELLAR')
    expected = sum(has(pair, "number 17", "cellar") for pair in made["pairs"])
    assert 0 < expected < 1000
    counted(opened, f"{expected} of 1,000 pairs")
    assert "number 17" in opened.run("[...document.querySelectorAll('.hit')].map((e) => e.textContent.toLowerCase())")
    opened.type(" nowhere-at-all")
    counted(opened, "0 of 1,000 pairs")
    assert "No pair matches" in opened.text("#pair")
    opened.click("button[type=reset]")
    counted(opened, "1,000 pairs")


def test_every_filter_keeps_what_it_says(opened: Chromium, made: dict[str, Any]) -> None:
    tests = {
        "source": ("log", lambda pair: pair["source"] == "log"),
        "split": ("heldout", lambda pair: pair["split"] == "heldout"),
        "task": ("game-7", lambda pair: pair["task_id"] == "game-7"),
        "dream": ("solved", lambda pair: pair["dream"]["outcome"] == "solved"),
        "real": ("unsolved", lambda pair: pair["real"]["outcome"] == "unsolved"),
        "first": ("never", lambda pair: first_kind(pair) == "never"),
        "from": ("10", lambda pair: len(pair["turns"]) >= 10),
        "to": ("10", lambda pair: len(pair["turns"]) <= 10),
    }
    for name, (value, keeps) in tests.items():
        opened.select(name, value)
        expected = sum(map(keeps, made["pairs"]))
        counted(opened, "1,000 pairs" if expected == 1000 else f"{expected:,} of 1,000 pairs")
        opened.select(name, "")
        counted(opened, "1,000 pairs")
    opened.select("source", "log")
    opened.select("first", "state")
    both = sum(tests["source"][1](pair) and first_kind(pair) == "state" for pair in made["pairs"])
    counted(opened, f"{both} of 1,000 pairs")


def test_a_link_opens_the_same_pair_in_the_same_list_also_after_a_reload(
    opened: Chromium, made: dict[str, Any]
) -> None:
    opened.select("split", "heldout")
    expected = sum(pair["split"] == "heldout" for pair in made["pairs"])
    counted(opened, f"{expected} of 1,000 pairs")
    opened.click(".row:nth-child(3)")
    chosen = current(opened)
    assert "/heldout/" in chosen
    assert opened.run("location.hash") == f"#{chosen}?split=heldout"
    opened.reload()
    counted(opened, f"{expected} of 1,000 pairs")
    assert current(opened) == chosen
    assert opened.run("document.querySelector('.row[aria-selected=true] .name').textContent") == chosen
    opened.click(".row:nth-child(5)")
    assert current(opened) != chosen
    opened.run("history.back()")
    opened.wait(f"document.querySelector('.permalink').textContent === {json.dumps(chosen)}")


def test_an_id_alone_is_a_link_and_a_broken_one_breaks_nothing(opened: Chromium, page: Path) -> None:
    opened.open(page, "#dream/train/game-7/595")
    assert current(opened) == "dream/train/game-7/595"
    opened.open(page, "#dream/train/game-7/595?split=heldout")  # its filters hide it: the pair is what was asked for
    assert current(opened) == "dream/train/game-7/595"
    counted(opened, "1,000 pairs")
    for broken in ("#%", "#nothing", "#?split=nowhere&to=x", "#a?b?c"):
        opened.open(page, broken)
        counted(opened, "1,000 pairs")
        assert current(opened)


def test_everything_can_be_reached_with_keys(opened: Chromium) -> None:
    first = current(opened)
    opened.key("j")
    second = current(opened)
    assert second != first
    assert opened.run("location.hash") == "#" + second
    opened.key("k")
    assert current(opened) == first
    opened.key("d")
    assert opened.run("document.activeElement.id") == "first"
    opened.key("/")
    assert opened.run("document.activeElement.name") == "q"
    opened.key("j")
    assert current(opened) == first, "a letter that is typed is no command"
    opened.key("Escape")
    assert opened.run("document.activeElement.id") == "pairs"
    opened.click("button[type=reset]")
    counted(opened, "1,000 pairs")
    opened.key("Escape")
    opened.key("End")
    assert opened.run("document.querySelector('.row[aria-selected=true]').getAttribute('aria-posinset')") == "1000"
    active = "document.getElementById(document.getElementById('pairs').getAttribute('aria-activedescendant'))"
    assert opened.run(f"{active}.getAttribute('aria-selected')") == "true"
    opened.key("ArrowUp")
    assert opened.run("document.querySelector('.row[aria-selected=true]').getAttribute('aria-posinset')") == "999"
    opened.key("Home")
    opened.key("Enter")
    assert opened.run("document.activeElement.id") == "pair"


def test_a_screenshot_stands_beside_the_dreamed_page_and_at_the_start(opened: Chromium, tmp_path: Path) -> None:
    names = [keep(np.full((60, 40, 3), shade, dtype=np.uint8), tmp_path) for shade in (10, 200)]
    text = "Goal: Select a.\n[1] checkbox 'a'"
    info: dict[str, float | str | bool] = {"screenshot": names[1], "screenshot_before": names[0]}
    real = [Turn("click('1')", text, 0.0, False, info), Turn("click('1')", text, 0.0, False)]
    dream = [Turn(turn.action, turn.observation, 0.0, False) for turn in real]
    made = comparison([pair_up("web", "log", "train", episode("d", dream), episode("r", real, Source.REAL))])
    page = tmp_path / "compare.html"
    page.write_text(render_page(made, [tmp_path]), encoding="utf-8")
    opened.requests.clear()
    opened.open(page)
    counted(opened, "1 pairs")
    opened.wait("[...document.querySelectorAll('#pair img')].every((image) => image.complete)")
    seen = opened.run(
        "[...document.querySelectorAll('#pair img')].map((i) => [i.naturalWidth, i.alt, i.closest('div').className])"
    )
    assert [(width, kind) for width, _, kind in seen] == [(40, "text"), (40, "text in-real")]
    assert ["start" in seen[0][1], "after" in seen[1][1]] == [True, True]
    assert opened.run("document.querySelectorAll('.cells').length") == 1, "beside it stands what was dreamed"
    assert opened.run("document.querySelectorAll('.both').length") == 1, "without a picture, one text for both"
    assert {url for url in opened.requests if not url.startswith(("about:", "data:"))} == {page.resolve().as_uri()}


def test_an_observation_cannot_run(opened: Chromium, page: Path) -> None:
    opened.open(page, "#" + "dream/a%20b%3Fc%23d%252/%C3%A9%26q%3Dx")
    assert current(opened) == ODD
    opened.run("new Promise((done) => setTimeout(done, 200))")
    assert opened.run("window.hacked") is None
    assert opened.dialogs == []
    seen = opened.run("document.getElementById('pair').textContent")
    assert seen.count(ATTACK) == 5, "task, start, action and both answers, as they were written"
    assert opened.run("document.querySelectorAll('#pair img, #pair svg, #pair script').length") == 0
    # the second line of defence: whatever got into the page as a script would be refused
    opened.run(
        "{ const s = document.createElement('script'); s.textContent = 'window.hacked = 2'; document.body.append(s);"
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 3\">'); }"
    )
    opened.run("new Promise((done) => setTimeout(done, 200))")
    assert opened.run("window.hacked") is None


CONTRAST = """(() => {
  const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const over = (colours) => { canvas.clearRect(0, 0, 1, 1);
    for (const c of colours) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
    if (e.closest('.skip, :disabled')) continue;
    const behind = [];
    for (let up = e; up; up = up.parentElement) behind.unshift(getComputedStyle(up).backgroundColor);
    const a = over(['white', ...behind]), b = over(['white', ...behind, getComputedStyle(e).color]);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${e.tagName}.${e.className}: ${ratio.toFixed(2)} ${e.textContent.slice(0, 20)}`);
  }
  return low;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_schemes(opened: Chromium, page: Path, dark: bool) -> None:
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5."""
    opened.screen(1280, 900, dark)
    opened.open(page, "#dream/train/game-10/10?q=number")
    assert opened.run("document.querySelectorAll('.hit').length") > 0
    assert opened.run("document.querySelectorAll('mark').length") > 0
    assert opened.run(CONTRAST) == []


def test_roles_and_names_for_those_who_do_not_see_it(opened: Chromium) -> None:
    nodes = opened.send("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    for role in ("banner", "main", "search", "listbox", "article", "status"):
        assert roles.count(role) == 1, role
    named = {"searchbox", "combobox", "spinbutton", "listbox", "option", "button", "region", "link", "search"}
    nameless = [n for n in nodes if not n["ignored"] and n["role"]["value"] in named and not n["name"]["value"]]
    assert nameless == []


@pytest.mark.parametrize("width", [1280, 768, 400, 320])
def test_no_width_scrolls_sideways(opened: Chromium, page: Path, width: int) -> None:
    opened.screen(width, 800)
    opened.open(page, "#dream/train/game-10/10")
    assert opened.run("document.documentElement.scrollWidth") <= width
    opened.click(".row:nth-child(2)")
    assert current(opened) != "dream/train/game-10/10"
