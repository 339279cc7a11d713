"""Arithmetic of a budget. If these fail, a loop takes real steps that nobody allowed, or leaves some that were."""

from __future__ import annotations

import random

import pytest

from imagination.loop.budget import Budget, wave
from imagination.settings import LoopSettings


def test_what_is_left_is_the_least_that_any_limit_leaves() -> None:
    assert Budget(100).left(30) == 70
    assert Budget(100).left(130) == 0
    assert Budget(100, price=0.3, step_price=0.1).left(1) == 2, "0.3 / 0.1 is 3, rounding aside"
    assert Budget(5, price=100.0, step_price=0.1).left(1) == 4
    assert Budget(100, seconds=2.0).left(30, 1.9) == 70
    assert Budget(100, seconds=2.0).left(30, 2.0) == 0


def test_a_wave_begins_episodes_only_with_what_is_left_as_their_limit() -> None:
    assert wave(["a", "b", "c"], left=20, longest=12) == {"a": 12, "b": 8}
    assert wave(["a", "b", "c"], left=100, longest=12, most=2) == {"a": 12, "b": 12}
    assert wave(["a"], left=0, longest=12) == {}
    assert wave([], left=10, longest=12) == {}


@pytest.mark.parametrize("seed", range(20))
def test_waves_spend_the_budget_to_its_last_step_and_never_more(seed: int) -> None:
    """Whatever the episodes come to, as long as there are enough of them."""
    rng = random.Random(seed)
    budget, spent, waiting = Budget(50), 0, [str(n) for n in range(100)]
    while limits := wave(waiting, budget.left(spent), 12):
        assert sum(limits.values()) <= budget.left(spent)
        spent += sum(rng.randint(1, limit) for limit in limits.values())
        waiting = [name for name in waiting if name not in limits]
    assert spent == 50


@pytest.mark.parametrize(
    "wrong", [{"budget": -1}, {"epsilon": 1.5}, {"tasks": 0}, {"own_share": 1.0}, {"tolerance": -0.1}, {"looks": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoopSettings(**wrong)  # type: ignore[arg-type]
