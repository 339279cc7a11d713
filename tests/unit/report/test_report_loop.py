"""A loop's report, round by round; if these fail, a reader takes what a policy believed for what it did."""

from __future__ import annotations

from typing import Any

from imagination.report.loop_panel import loop_curve, loop_lines, render_loop

REAL = {"success": 0.25, "n": 8, "ci95": [0.03, 0.65]}


def line(
    number: int, charged: int, promoted: bool | None, real: dict[str, Any] | None, dreamed: float
) -> dict[str, Any]:
    return {
        "round": number,
        "charged": charged,
        "promoted": promoted,
        "version": 1 if promoted and number else 0,
        "real_success": real,
        "dreamed_success": dreamed,
        "horizon": 14,
        "staleness": 3 if number else None,
    }


ROUNDS = [
    line(0, 0, True, None, 1.0),
    line(1, 400, False, REAL, 0.9),
    line(2, 1800, True, {**REAL, "success": 0.5}, 0.75),
]
VERSIONS = [{"round": number, "promoted": promoted} for number, promoted in ((0, True), (1, False), (2, True))]
REPORT = {"loop": {"charged": 1800, "rounds": ROUNDS, "versions": VERSIONS}}


def test_rounds_are_told_with_their_world_model() -> None:
    lines = loop_lines(REPORT)
    assert (
        "1,800 real steps in 3 rounds; of 2 refits of the world model, 1 took the place of the last version." in lines
    )
    assert "| 0 | 0 | – | 1.00 | version 0, new | 14 | – |" in lines
    assert "| 1 | 400 | 0.25 [0.03, 0.65] of 8 | 0.90 | version 0, kept | 14 | 3 |" in lines
    assert "| 2 | 1,800 | 0.50 [0.03, 0.65] of 8 | 0.75 | version 1, new | 14 | 3 |" in lines


def test_the_page_shows_both_lines_where_there_are_two_rounds_of_real_play() -> None:
    page = render_loop(REPORT)
    assert "dream 0.75" in page
    assert "real 0.50" in page
    assert loop_curve({"loop": {**REPORT["loop"], "rounds": ROUNDS[:2]}}) is None


def test_other_runs_have_no_rounds() -> None:
    assert render_loop({}) == ""
    assert loop_lines({"loop": {"rounds": []}}) == []
