"""A loop's report, round by round; if these fail, a reader takes what a policy believed for what it did."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from imagination.report.run_page import write_report
from imagination.report.run_plots import loop_curve
from imagination.report.run_text import loop_view
from tests.support.reports import Page, page, summary, write_run

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
    view = loop_view(REPORT)
    assert view is not None
    assert re.search("1,800 real steps in 3 rounds; .* 2 refits .* 1 ", view["sentence"])
    assert view["rows"] == [
        ["0", "0", "–", "1.00", "version 0, new", "14", "–"],
        ["1", "400", "0.25 [0.03, 0.65] of 8", "0.90", "version 0, kept", "14", "3"],
        ["2", "1,800", "0.50 [0.03, 0.65] of 8", "0.75", "version 1, new", "14", "3"],
    ]


def test_the_picture_has_both_lines_where_there_are_two_rounds_of_real_play() -> None:
    drawn = loop_curve(REPORT)
    assert drawn is not None
    assert "dream 0.75" in drawn.svg
    assert "real 0.50" in drawn.svg
    assert loop_curve({"loop": {**REPORT["loop"], "rounds": ROUNDS[:2]}}) is None


def test_the_page_and_the_text_have_a_row_for_each_round(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {**summary(), **REPORT}, [])
    write_report(folder, partial=True)
    words = " ".join(Page(page(folder)).text)
    for row in (loop_view(REPORT) or {})["rows"]:
        assert " ".join(row) in words
        assert f"| {' | '.join(row)} |" in (folder / "report.md").read_text()


def test_other_runs_have_no_rounds() -> None:
    assert loop_view({}) is None
    assert loop_view({"loop": {"rounds": []}}) is None
