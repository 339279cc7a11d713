"""`make diffusion-table`: what its table says, from a part written down by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks.diffusion_table import FITTED_AS, KINDS, kind_folder, part_folder, table, write_table


def part(kind: str, **speed: Any) -> dict[str, Any]:
    elsewhere = {"exact_match": 0.5, "reward_precision": None, "reward_recall": 0.0, "n": 40}
    card = {"exact_match": 0.826, "reward_precision": 0.9, "reward_recall": 1.0, "invalid": 3, "n": 200}
    card |= {"heldout_tasks": elsewhere, "calibration": {"ece_before": 0.21, "ece_after": 0.04}}
    return {"world": "textworld", "kind": kind, "seed": 0, "fit_seconds": 61.4, "world_model": card, "speed": speed}


def test_a_line_a_part_in_the_order_of_the_kinds(tmp_path: Path) -> None:
    for kind in reversed(KINDS):
        folder = kind_folder(part_folder(tmp_path, "textworld", 0), kind)
        folder.mkdir(parents=True)
        told = part(kind, turns_per_second=41.7, without_drafts=20.2, tokens=34.0, passes=3.25)
        (folder / "part.json").write_text(json.dumps(told))
    lines = write_table(tmp_path).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == list(KINDS)
    assert lines[2] == (
        "| textworld | text | 0 | 61 | 0.83, n=200 | 0.90 / 1.00 | 0.21 | 0.04 | 3 | 0.50, n=40 | – / 0.00 | 34.0 | 42 "
        "| 20 | 3.2 |"
    )
    assert (tmp_path / "table.md").read_text().splitlines() == lines
    assert len({line.count("|") for line in lines}) == 1
    assert set(FITTED_AS) < set(KINDS)
    assert (
        table([part("text", turns_per_second=0.0, without_drafts=1.0, tokens=None, passes=None)])
        .splitlines()[2]
        .endswith("| – | 0 | 1 | – |")
    )


def test_actions_are_told_below_the_table() -> None:
    asked = part("diffusion", turns_per_second=9.0, without_drafts=9.0, tokens=9.0, passes=9.0)
    told = table([asked | {"actions": {"n": 40, "right": 0.725, "usual": 0.1}}]).splitlines()
    assert told[-1].startswith("textworld, diffusion, seed 0: 0.72 of 40 actions")
    assert told[-1].endswith("right in 0.10.")
