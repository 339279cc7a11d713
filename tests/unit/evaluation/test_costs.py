"""Money is told by these numbers: a wrong one would sell dreams that cost more than they save."""

from __future__ import annotations

from typing import Any

import pytest

from imagination.evaluation.costs import (
    Control,
    ledger,
    price_of,
    read_control,
    running_mean,
    share_of,
    spent_to_learn,
    steps_interval,
    steps_to_reach,
    without_dreams,
)
from worldmodel.evaluation.proportions import Proportion

# means of three updates: 0.2, 0.4, 0.6, 0.8
RISING = Control((0, 100, 200, 300, 400, 500), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (5,) * 6, 600)
FLAT = Control((0, 100, 200, 300), (0.5,) * 4, (4,) * 4, 400)


# how many steps


def test_the_first_update_from_which_the_mean_is_as_high() -> None:
    assert list(running_mean(RISING.success)) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    lucky = Control((0, 100, 200, 300, 400), (0.1, 0.9, 0.1, 0.7, 0.7), (4,) * 5, 500)  # means 0.37, 0.57, 0.5
    fewer_than_the_window = Control((0, 100), (0.2, 0.6), (4, 4), 200)
    ended = Control(FLAT.steps, FLAT.success, FLAT.groups, FLAT.total, Proportion(9, 10))  # what the last update taught
    for control, expected in (
        (RISING, {0.0: 0, 0.2: 0, 0.21: 100, 0.6: 200, 0.8: 300}),
        (lucky, {0.9: None, 0.5: 100}),
        (FLAT, {0.5: 0, 0.51: None}),
        (fewer_than_the_window, {0.4: 0, 0.5: None}),
        (ended, {0.9: 400, 0.95: None, 0.5: 0}),
    ):
        assert {p: steps_to_reach(control, p) for p in expected} == expected


# the interval


def test_without_chance_the_interval_is_that_of_the_success() -> None:
    """Shares of 0 and 1 are drawn again as they are: means 0, 1/3, 2/3, 1."""
    sure = Control((0, 10, 20, 30, 40, 50), (0.0, 0.0, 0.0, 1.0, 1.0, 1.0), (4,) * 6, 60)
    assert steps_interval(sure, 0.45, (0.3, 0.6)) == (10, 20)
    assert steps_interval(sure, 1.0, (0.7, 1.0)) == (30, 30)
    never = Control((0, 10, 20), (0.0,) * 3, (4,) * 3, 30)
    assert steps_interval(never, 0.0, (0.0, 0.5)) == (0, None)
    assert steps_interval(never, 0.3, (0.1, 0.5)) == (None, None)


def test_more_groups_leave_less_to_chance() -> None:
    """3 updates of 4 groups at 0.5 fall short of 0.4 with at most 4 of 12: in 19 % of draws, both means in 10 %."""
    assert steps_interval(FLAT, 0.4, (0.4, 0.4)) == (0, None)
    many = Control(FLAT.steps, FLAT.success, (4000,) * 4, FLAT.total)
    assert steps_interval(many, 0.4, (0.4, 0.4)) == (0, 0)
    assert steps_interval(many, 0.6, (0.6, 0.6)) == (None, None)


def test_the_same_seed_gives_the_same_interval() -> None:
    assert steps_interval(RISING, 0.6, (0.4, 0.7), 3) == steps_interval(RISING, 0.6, (0.4, 0.7), 3)


# what the report says


def test_what_the_same_success_would_have_cost() -> None:
    """24 of 40 tasks: Clopper and Pearson's [0.433, 0.751]; by the means, that is 200 to 300 steps."""
    tasks = {str(k): (6, 10) for k in range(40)}
    control = Control(RISING.steps, RISING.success, (5000,) * 6, RISING.total)
    found = without_dreams(control, Proportion(240, 400, by_task=tasks), spent=50, shared=20, price=0.5)
    assert found is not None
    assert (found["steps"], found["steps_ci95"], found["within"]) == (200, [200, 300], 600)
    assert found["ratio"] == pytest.approx(50 / 220)
    assert found["ratio_ci95"] == pytest.approx([50 / 320, 50 / 220])
    assert (found["cost"], found["cost_ci95"]) == (100.0, [100.0, 150.0])


def test_not_reached_has_no_number() -> None:
    found = without_dreams(FLAT, Proportion(40, 40), spent=50)
    assert found is not None
    assert (found["steps"], found["ratio"], found["within"]) == (None, None, 400)
    assert found["steps_ci95"][1] is None
    assert "cost" not in found


def test_nothing_measured_says_nothing() -> None:
    assert without_dreams(FLAT, Proportion(0, 0), spent=0) is None


@pytest.mark.parametrize(
    ("spent", "shared", "steps", "share"), [(50, 0, 200, 0.25), (50, 50, 50, 0.5), (5, 0, 0, None), (5, 0, None, None)]
)
def test_shares(spent: int, shared: int, steps: int | None, share: float | None) -> None:
    assert share_of(spent, shared, steps) == share


# the control's files


def line(step: int, turns: int, success: float | None = None, **more: Any) -> dict[str, Any]:
    shown = {} if success is None else {"real_success": success}
    return {"stage": "train", "step": step, "turns": turns, **shown, **more}


def test_a_control_is_read_from_its_lines() -> None:
    """The second update crashed in every episode: its steps were taken and it has no success."""
    metrics: list[dict[str, Any]] = [line(2, 40, 0.75), line(0, 30, 0.25), line(1, 10), {"stage": "clone", "step": 0}]
    rollouts: list[dict[str, Any]] = [
        {"stage": "train", "step": 0},
        {"stage": "train", "step": 0},
        {"stage": "evaluate"},
    ]
    assert read_control(metrics, rollouts) == Control((0, 40), (0.25, 0.75), (2, 1), 80)


def test_steps_of_episodes_that_were_not_learned_from_were_taken() -> None:
    metrics = [line(0, 30, 0.25, played_turns=60), line(1, 40, 0.75, played_turns=80)]
    assert read_control(metrics, []) == Control((0, 60), (0.25, 0.75), (1, 1), 140)


def test_dreams_are_no_control() -> None:
    assert read_control([], []) is None
    assert read_control([line(0, 30, dream_success=0.5)], []) is None
    assert read_control([line(0, 30, 0.4, dream_success=0.5)], []) is None  # real games beside dreams


# the ledger

LOOP = {"charged": 500, "cold": True, "rounds": [{"charged": 120, "dreamed_turns": 900}, {"charged": 500}]}


def test_learning_and_measuring_are_apart() -> None:
    summary = {
        "real_steps": {"collect": 100, "train": 20, "probe": 4, "evaluate": 50, "audit": 30},
        "real_cost": {"collect": 1.0, "train": 0.2, "evaluate": 0.5},
        "wall_seconds": {"collect": 60.0, "train": 3600.0, "evaluate": 1800.0},
        "dreamed_turns": 7000,
    }
    found = ledger(summary, machine_price=2.0)
    assert [row["source"] for row in found["rows"]] == ["collect", "train", "probe", "evaluate", "audit"]
    assert (found["learn"]["real_steps"], found["measure"]["real_steps"]) == (124, 80)
    assert found["learn"]["real_cost"] == pytest.approx(1.2)
    assert found["learn"]["machine_cost"] == pytest.approx(3660 / 1800)
    assert found["measure"]["machine_cost"] == pytest.approx(1.0)
    assert (found["learn"]["dreamed_turns"], found["measure"]["dreamed_turns"]) == (7000, None)
    assert price_of(summary) == pytest.approx(0.01)
    assert spent_to_learn(summary) == (24, 0)
    summary["real_steps"] = {"learn_experience": 6, "train": 20, "probe": 4}
    assert spent_to_learn(summary) == (30, 0)
    assert spent_to_learn({**summary, "loop": LOOP}) == (506, 120)


def test_first_episodes_of_a_loop_are_apart_and_add_up() -> None:
    summary = {"real_steps": {"loop": 504}, "real_cost": {"loop": 50.4}, "wall_seconds": {"loop": 9.0}, "loop": LOOP}
    first, rest = ledger(summary)["rows"]
    assert (first["source"], first["real_steps"], first["wall_seconds"]) == ("first_episodes", 120, None)
    assert (rest["source"], rest["real_steps"], rest["wall_seconds"], rest["dreamed_turns"]) == ("loop", 384, 9.0, 900)
    assert (first["real_cost"], rest["real_cost"]) == (pytest.approx(12.0), pytest.approx(38.4))
    assert spent_to_learn(summary) == (500, 120)


def test_seconds_of_a_loop_are_counted_once() -> None:
    """The first world model and the clone were timed as their own and as a part of the loop."""
    seconds = {"loop": 100.0, "fit_world_model": 30.0, "clone": 10.0}
    cold = ledger({"wall_seconds": seconds, "loop": LOOP})
    assert cold["learn"]["wall_seconds"] == 100.0
    for other in ({"cold": False}, {"origin": "outputs/other"}):
        assert ledger({"wall_seconds": seconds, "loop": LOOP | other})["learn"]["wall_seconds"] == 140.0


def test_a_loop_with_a_log_has_no_first_episodes() -> None:
    summary = {"real_steps": {"loop": 504}, "loop": {**LOOP, "cold": False}}
    assert [row["source"] for row in ledger(summary)["rows"]] == ["loop"]
    assert spent_to_learn(summary) == (500, 0)


def test_nothing_known_is_not_zero() -> None:
    found = ledger({"real_steps": {"collect": None}, "wall_seconds": {}}, machine_price=1.0)
    assert found["learn"]["real_steps"] is None
    assert ledger({})["rows"] == []
    assert price_of({}) == 0.0
