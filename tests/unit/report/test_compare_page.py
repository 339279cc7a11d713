"""The page and the terminal view hold what compare.json says, and text of games and models stays text."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from imagination.evaluation.compare.free_play import free_play
from imagination.evaluation.compare.pairs import pair_up
from imagination.report.compare_page import headline, page_data, render_page
from imagination.report.compare_text import diverging, pair_view, printable, summary_table
from imagination.report.page import embed_json
from real_envs.screens import keep
from real_envs.trajectory import Source, Turn
from tests.support.comparisons import comparison, episode, made_up_pair

EVIL = "</script><script>alert(1)</script><!-- [bold]\x1b[31m\x07"


def shown(renderable: RenderableType, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_embedded_json_cannot_leave_its_element_and_says_the_same(value: Any) -> None:
    text = embed_json(value)
    assert not re.search("[<>&\u2028\u2029]", text)
    assert text.isascii()
    assert json.loads(text) == value


def test_the_data_of_the_page_is_that_of_the_comparison() -> None:
    made = comparison([made_up_pair(n, first=n % 4 or None) for n in range(8)])
    data = page_data(made)
    assert len(set(data["texts"])) == len(data["texts"])
    for small, pair in zip(data["pairs"], made["pairs"], strict=True):
        assert data["texts"][small["start"]] == pair["start"]
        assert (small["id"], small["first"], small["dream"]) == (pair["id"], pair["first"], pair["dream"])
        for (action, kind, _, dream, real), turn in zip(small["turns"], pair["turns"], strict=True):
            assert (data["texts"][action], kind) == (turn["action"], turn["kind"])
            for side, whole in ((dream, turn["dream"]), (real, turn["real"])):
                if whole is None:
                    assert side == 0
                else:
                    assert data["texts"][side[0]] == whole["observation"]
                    assert (side[1], side[2]) == (whole["reward"], whole["terminated"])
                    assert [list(span) for span in side[4] or []] == whole["marks"]


def test_marks_are_counted_as_javascript_counts() -> None:
    """An emoji is one character here and two there."""
    turns = [Turn("look", "\U0001f511 a red key", 0.0, False)], [Turn("look", "\U0001f511 a blue key", 0.0, False)]
    made = comparison([pair_up("p", "log", "s", episode("d", turns[0]), episode("r", turns[1], Source.REAL))])
    assert made["pairs"][0]["turns"][0]["dream"]["marks"] == [[4, 7]]
    assert page_data(made)["pairs"][0]["turns"][0][3][4] == [[5, 8]]


def test_a_web_page_stands_in_the_data_once_whoever_names_it(tmp_path: Path) -> None:
    """Names come out of a log, so nothing but a picture in the folders may get into the page."""
    other, missing, outside = (f"{k:032x}.png" for k in (1, 2, 3))
    name = keep(np.full((2, 3, 3), 9, dtype=np.uint8), tmp_path / "log")
    (tmp_path / outside).write_bytes(b"secret")
    (tmp_path / "log" / other).write_bytes((tmp_path / "log" / name).read_bytes())  # the same picture by another name
    real = [
        Turn("click('1')", "a page", 0.0, False, {"screenshot": name, "screenshot_before": name}),
        Turn("click('2')", "a page", 0.0, False, {"screenshot": other}),
        Turn("click('3')", "a page", 0.0, False, {"screenshot": missing}),
        Turn("click('4')", "a page", 0.0, False, {"screenshot": f"../{outside}"}),
        Turn("click('5')", "a page", 0.0, False),
    ]
    dream = [Turn(turn.action, "a page", 0.0, False) for turn in real]
    made = comparison([pair_up("p", "log", "s", episode("d", dream), episode("r", real, Source.REAL))])
    assert [turn["real"]["screenshot"] for turn in made["pairs"][0]["turns"]] == [name, other, missing, None, None]
    data = page_data(made, [tmp_path / "nowhere", tmp_path / "log"])
    (pair,) = data["pairs"]
    assert len(data["pictures"]) == 1
    assert base64.b64decode(data["pictures"][0].removeprefix("data:image/png;base64,"))[1:4] == b"PNG"
    assert pair["screenshot"] == 1
    assert [(turn[3][5], turn[4][5]) for turn in pair["turns"]] == [(0, 1), (0, 1), (0, 0), (0, 0), (0, 0)]
    assert page_data(made)["pictures"] == []


def test_the_page_asks_for_nothing_and_escapes_what_it_writes_itself() -> None:
    turns = [Turn(EVIL, EVIL, 0.0, False)]
    evil = pair_up(EVIL, "dream", EVIL, episode("d", turns, task=EVIL), episode("r", turns, Source.REAL, task=EVIL))
    free = {"split": EVIL, **free_play([evil.dream], [evil.real], lambda text: [ord(c) for c in text])}
    page = render_page(comparison([evil], run=EVIL, notes=[EVIL], hardware=EVIL, policy=EVIL, free=[free]))
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(1)</script>" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import""", page)
    assert "default-src 'none'" in page


def test_the_headline_counts() -> None:
    pairs = [made_up_pair(n, first=None if n % 2 else 1) for n in (1, 2, 5, 10)]  # 10 is solved for nothing
    assert re.fullmatch("2 of 4 .* never parted .* 1 was .* only in the dream", headline(comparison(pairs)))
    assert "Nothing" in headline(comparison([]))
    of_both = comparison(pairs)
    of_both["aligned"].append({**of_both["aligned"][0], "split": "heldout", "pairs": 3, "first": {}})
    assert headline(of_both).startswith("2 of 4 (train) and 0 of 3 (heldout) ")


def test_the_terminal_shows_where_a_pair_parts_and_nothing_moves_the_cursor() -> None:
    dream = [Turn("go east", "A hall.", 0.0, False), Turn("take lamp", f"A red lamp. {EVIL}", 1.0, True)]
    real = [Turn("go east", "A hall.", 0.0, False), Turn("take lamp", "A blue lamp.", 0.0, False)]
    pair = pair_up("dream/x/0", "dream", "train", episode("d", dream), episode("r", real, Source.REAL))
    made = comparison([pair])
    for width in (110, 50):
        text = shown(pair_view(made["pairs"][0], width), width)
        for words in ("parts at turn 2 of 2", "differs", "2 > take", "A red lamp.", "blue", "reward 1", "[bold]"):
            assert words in text, words
        assert "\x07" not in text
        assert "[31m" in text, "shown, not obeyed"
    assert printable("a\x1b[2Jb\tc\n\x9b") == "a\ufffd[2Jb c\n\ufffd"
    table = shown(summary_table(made))
    assert "the policy's dreams" in table
    assert "1 state" in table


def test_the_pairs_that_part_earliest_come_first() -> None:
    made = comparison([made_up_pair(n, first=first) for n, first in ((1, 5), (2, 1), (3, None), (4, 0), (5, 3))])
    ids = [pair["id"].rsplit("/", 1)[1] for pair in diverging(made["pairs"], 3)]
    assert ids == ["2", "5", "1"], "4 is of the log"
    brief = shown(pair_view(made["pairs"][0], 100, brief=True))
    assert "8 more turns: compare.show=dream/train/game-1/1" in brief
    assert diverging(made["pairs"], 0) == []


@pytest.mark.parametrize("pairs", [0, 1])
def test_an_empty_comparison_is_a_page_too(pairs: int) -> None:
    assert "</html>" in render_page(comparison([made_up_pair(n) for n in range(pairs)]))
    assert shown(summary_table(comparison([]))) is not None
