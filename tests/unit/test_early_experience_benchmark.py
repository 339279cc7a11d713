"""The table of `make early-experience`, from numbers by hand. If this fails, it says what nobody measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import early_experience as benchmark
from tests.benchmarks.early_experience import ARMS, HEAD, Arm, part_config, pooled, table
from worldmodel.evaluation.proportions import Proportion


def part(seed: int, **heldout: int) -> dict[str, Any]:
    """Two episodes of each game; how many are solved in which."""
    by_task = {name: (hits, 2) for name, hits in heldout.items()}
    held = Proportion(sum(heldout.values()), 2 * len(heldout), by_task=by_task)
    return {"seed": seed, "train_tasks": Proportion(1, 4).to_json(), "heldout_tasks": held.to_json()}


def test_games_of_different_seeds_are_different_games() -> None:
    both = pooled([part(0, a=2, b=0), part(1, a=1)], "heldout")
    assert (both.successes, both.n, len(both.by_task)) == (3, 6, 3)


def test_an_arm_is_compared_on_the_seeds_that_both_have() -> None:
    """By hand: on seed 0 the clone solves 1 of 4, hindsight 3 of 4; seed 1 of the clone alone changes nothing there."""
    found = {"clone": [part(0, a=1, b=0), part(1, a=2, b=2)], "hindsight": [part(0, a=2, b=1)]}
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table(found).splitlines()}
    titles = {arm.name: arm.title for arm in ARMS}
    assert table(found).startswith(HEAD)
    assert "+0.50 [" in rows[titles["hindsight"]]
    assert "| 2 |" in rows[titles["clone"]]
    assert rows[titles["clone"]].endswith("| – |")  # its own arm to compare with was not made
    assert rows[titles["reflections"]].count("–") == 3


def test_arms_differ_only_in_what_they_name_and_learn_for_the_same_number_of_steps() -> None:
    steps = set()
    for arm in ARMS:
        clone = part_config(0, arm.settings).clone
        steps.add(clone.steps + clone.world_steps)
        assert clone.agents == ["expert"]
        assert bool(clone.supplements) == bool(arm.before)
    assert len(steps) == 1
    assert {arm.beside for arm in ARMS} - {""} <= {arm.name for arm in ARMS}


def test_a_part_that_is_there_is_not_made_again_and_one_of_other_settings_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for name in benchmark.SHARED:
        (tmp_path / "base" / name).mkdir(parents=True)
    monkeypatch.setattr(benchmark, "clone", lambda config, there: made.append(there.name))
    played = {"train_tasks": Proportion(1, 2).to_json(), "heldout_tasks": Proportion(0, 2).to_json()}
    monkeypatch.setattr(benchmark, "play_clone", lambda config, there: played)
    arm = Arm("new", "a new one", before=(lambda config, there: made.append("before"),))
    for settings in ([], [], ["clone.lr=0.1"]):
        benchmark.make_part(arm, part_config(3, settings), tmp_path)
    assert made == ["before", "new", "before", "new"]
