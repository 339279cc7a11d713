"""The table of `make rules-table`, from numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks import rules_table

SHARE = {"success": 0.25, "n": 4, "ci95": [0.1, 0.5], "failures": 0, "tasks": 2, "by_task": [["a", 1, 2], ["b", 0, 2]]}


def test_training_seeds_are_pooled_and_shown_one_by_one(tmp_path: Path) -> None:
    part = {
        "seed": 0,
        "world": "coin",
        "rules": {"rules": 7, "refusing": 3, "turns": 10, "answered": 4, "wrong": 1},
        "contradictions": {"off": {"rate": {"value": 0.4}}, "repair": {"rate": {"value": 0.0}}},
        "clone": SHARE,
        "arms": {
            "off-1": {"heldout_tasks": SHARE},
            "repair-1": {"heldout_tasks": SHARE},
            "repair-2": {"heldout_tasks": SHARE},
        },
    }
    folder = tmp_path / "coin" / "seed-0"
    folder.mkdir(parents=True)
    (folder / rules_table.PART).write_text(json.dumps(part))
    row = rules_table.write_table(tmp_path).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["coin", "0", "7 (3)", "0.40", "1 of 4", "0.400 / – / 0.000"]
    assert [cell.rpartition(" (")[2] for cell in cells[7:]] == ["0.25)", "–", "0.25, 0.25)", "–"]


def test_a_world_without_rules_has_no_rate() -> None:
    assert rules_table._rate(None) == "–"
    assert rules_table._rate({"rate": {"value": None}}) == "–"
