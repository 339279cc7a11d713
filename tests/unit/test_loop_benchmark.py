"""`make loop-table`: what its table and its figure say, from numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagination.commands.check_train import check as check_train
from imagination.commands.loop import check
from imagination.settings import Config
from imagination.settings.compose import load_config
from tests.benchmarks.loop_table import (
    ARMS,
    CURVE,
    DREAMS,
    NEW_TASKS,
    REAL_ONLY,
    SETTINGS,
    SHOWN,
    Arm,
    Curve,
    draw,
    read_curves,
    table,
)
from worldmodel.evaluation.proportions import Proportion


def proportion(successes: int) -> Proportion:
    """Of ten episodes of two tasks."""
    half = min(successes, 5)
    return Proportion(successes, 10, by_task={"a": (half, 5), "b": (successes - half, 5)})


def curve(arm: str, seed: int, *points: tuple[int, int]) -> Curve:
    return Curve(arm, seed, tuple((steps, proportion(successes)) for steps, successes in points), 60.0)


CURVES = [
    curve("real-only", 0, (0, 2), (3000, 4), (6000, 7)),
    curve("real-only", 1, (0, 2), (3000, 4), (6000, 5)),
    curve("real-only-small", 0, (0, 2), (2000, 6), (4000, 9)),
    curve("loop", 0, (0, 2), (0, 4), (400, 6), (800, 5)),
    curve("loop", 1, (0, 2), (0, 3), (500, 7), (900, 8)),
]


def test_steps_to_a_level_are_those_of_the_first_policy_that_has_it() -> None:
    assert [one.steps_to(0.6) for one in CURVES] == [6000, None, 2000, 400, 500]
    assert CURVES[3].steps_to(0.4) == 0


def test_the_table_compares_with_the_better_real_only_arm_seed_by_seed() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(CURVES, [0.6]).splitlines()]
    head, _, *rows = lines
    assert head == ["arm", "seeds", "n", "real steps", "success", "seconds", "real steps to 0.6",
                    "fewer than real only, 0.6"]  # fmt: skip
    by_arm = {row[0]: row[1:] for row in rows}
    titles = {arm.name: arm.title for arm in ARMS}
    assert by_arm[titles["real-only"]][0:3] == ["2", "20", "6,000"]
    assert by_arm[titles["real-only"]][5:] == ["6,000, > 6,000", "–"]
    assert table(CURVES, [0.3]).splitlines()[-1].endswith("| without any, without any |")
    # seed 0: 2,000 against 400; of seed 1 no real-only policy came so far
    assert by_arm[titles["loop"]][0:3] == ["2", "20", "850"]
    assert by_arm[titles["loop"]][3].startswith("0.65 [")  # 5 and 8 of 10
    assert by_arm[titles["loop"]][5:] == ["400, 500", "5.0x, –"]


def test_curves_are_read_in_order_and_drawn(tmp_path: Path) -> None:
    assert read_curves(tmp_path) == []
    for seed, arm, points in ((1, "loop", [(500, 7), (0, 2)]), (0, "real-only", [(0, 2)])):
        folder = tmp_path / f"seed-{seed}" / arm
        folder.mkdir(parents=True)
        told = [{"policy": "p", "real_steps": s, "success": proportion(k).to_json()} for s, k in points]
        (folder / CURVE).write_text(json.dumps({"arm": arm, "seed": seed, "seconds": 3.0, "points": told}))
    found = read_curves(tmp_path)
    assert [(one.arm, one.seed) for one in found] == [("real-only", 0), ("loop", 1)]
    assert [steps for steps, _ in found[1].points] == [0, 500]
    draw(found, tmp_path / "loop.png")
    assert (tmp_path / "loop.png").stat().st_size > 1000


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_the_settings_of_an_arm_are_valid(arm: Arm) -> None:
    config = load_config([*SETTINGS, *NEW_TASKS, *arm.settings], Config)
    (check if arm.kind == "loop" else check_train)(config)


def test_arms_have_names_of_their_own() -> None:
    names = [arm.name for arm in ARMS]
    assert len(set(names)) == len(names)
    assert {*SHOWN, *REAL_ONLY, DREAMS.name} <= set(names)
