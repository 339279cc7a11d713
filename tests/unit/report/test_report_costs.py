"""The report must not make dreams look cheaper than they were: what it says of money follows from the numbers."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.report import report
from imagination.report.run_page import write_report
from imagination.settings import Config, UserError
from tests.support.reports import TRAINED, Json, Page, page, summary, write_run
from worldmodel.evaluation.proportions import Proportion


def control_lines(success: list[float]) -> list[Json]:
    return [
        {"stage": "train", "step": s, "time": s, "turns": 100, "real_success": p, "mean_turns": 4.0, "failures": 0}
        for s, p in enumerate(success)
    ]


def compared(folder: Path, success: list[float], numbers: Json | None = None, **control: Any) -> str:
    """The Markdown of a run of 41 solved episodes of 64 beside a control with this curve; its page is well formed."""
    write_run(folder, numbers or summary(), [])
    groups = [{"stage": "train", "step": s, "id": f"real/{s}/{g}"} for s in range(len(success)) for g in range(900)]
    write_run(folder / "control", {"seed": 0, **control}, groups, control_lines(success))
    write_report(folder)
    Page(page(folder))
    return (folder / "report.md").read_text()


def test_without_a_control_the_report_says_how_to_get_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", summary(), [])
    write_report(folder)
    for text in ((folder / "report.md").read_text(), page(folder)):
        assert "no control" in text
        assert "train.world=real" in text
    # dreams that were copied and not trained again are no control
    write_run(folder / "control", summary(), [], TRAINED)
    write_report(folder)
    assert "no control" in page(folder)


def test_a_control_itself_needs_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", summary(), [], control_lines([0.1, 0.2]))
    write_report(folder)
    assert "the real games" in page(folder)


def test_what_the_control_needed_is_told_with_its_interval_and_price(tmp_path: Path) -> None:
    """41 of 64 is 0.64 [0.52, 0.75]; means of three: 0.2, 0.4, 0.6, 0.8, 0.9, so it is passed at 300 steps."""
    text = compared(
        tmp_path / "run", [0.2, 0.2, 0.2, 0.8, 0.8, 0.8, 1.0], real_steps={"train": 700}, real_cost={"train": 7.0}
    )
    assert "needed 300 real steps [200, 300]" in text
    assert "policy, 0.64 [0.52, 0.75]. This run took none" in text
    assert "control cost 3.00 [2.00, 3.00]." in text
    assert "The control on" in page(tmp_path / "run")


def test_what_is_never_reached_has_an_open_interval(tmp_path: Path) -> None:
    assert "500 real steps did" in compared(tmp_path / "never", [0.1] * 5)
    assert ": [more than 500]." in (tmp_path / "never" / "report.md").read_text()
    near = compared(tmp_path / "near", [0.1, 0.1, 0.6, 0.6, 0.6])
    assert ": [200, more than 500]." in near


def test_a_clone_that_was_as_good_needed_nothing(tmp_path: Path) -> None:
    text = compared(tmp_path / "run", [0.9] * 4, real_steps={"train": 400}, real_cost={"train": 4.0})
    assert "before any training: 0 real steps [0, 0]." in text
    assert "control cost 0.00 [0.00, 0.00]." in text


def test_a_loop_is_compared_with_what_it_was_charged(tmp_path: Path) -> None:
    """Both needed the 60 steps of scripted episodes: 150 of 60 + 300, and of 60 + 200 at the low end."""
    numbers = summary()
    unknown = dict.fromkeys(("real_success", "dreamed_success", "horizon", "staleness"))
    first = {"round": 0, "charged": 60, "dreamed_turns": 800, "version": 0, "promoted": True, **unknown}
    version = {"version": 0, "round": 0, "promoted": True}
    numbers["loop"] = {"charged": 150, "cold": True, "rounds": [first], "versions": [version]}
    numbers["real_steps"]["loop"] = 150
    text = compared(tmp_path / "run", [0.2, 0.2, 0.2, 0.8, 0.8, 0.8, 1.0], numbers)
    assert "took 150, 0.42 times as many [0.42, 0.58], with 60 of" in text
    assert "| first_episodes | 60 |" in text
    assert "| loop | 90 | 800 |" in text
    never = compared(tmp_path / "never", [0.1] * 5, numbers)
    assert "This run took 150: less than 0.27 times as many" in never  # of 60 + 500


def test_an_evaluation_that_is_missing_is_asked_for(tmp_path: Path) -> None:
    numbers = summary()
    numbers["policy"]["after"]["train_tasks"] = Proportion(0, 0).to_json()
    assert "is evaluated" in compared(tmp_path / "run", [0.5] * 4, numbers)


def test_an_hour_of_the_machine_has_a_price(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", summary(), [])
    config = Config(run="run", output=str(tmp_path), machine_price=36.0)
    report(config, folder)
    assert "| train | 0 | 184,320 | 6.10 | 610 |" in (folder / "report.md").read_text()  # a hundredth of a second each
    assert json.loads((folder / "report.json").read_text())["money"]["machine_price"] == 36.0
    for price in (-1.0, float("nan"), float("inf")):
        config.machine_price = price
        with pytest.raises(UserError, match="machine_price"):
            report(config, folder)


def test_an_imported_log_has_no_world_that_a_control_could_be_played_in(tmp_path: Path) -> None:
    numbers = summary()
    numbers["wall_seconds"]["import"] = 1.0
    numbers["world_model"]["heldout_tasks"] = {**numbers["world_model"]["on_policy"], "exact_match": 0.31, "n": 1234}
    del numbers["policy"]
    folder = write_run(tmp_path / "run", numbers, [])
    write_report(folder, partial=True)
    for text in ((folder / "report.md").read_text(), page(folder)):
        assert "cannot be played here" in text
        assert "right in 0.31 of 1,234 turns" in unescape(text)
        assert "cannot be known" in text
        assert "train.world=real" not in text
