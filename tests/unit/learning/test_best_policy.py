"""If these fail, the policy that is kept is chosen by dreams it learned from, or is not the best of its training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from imagination.learning.trainer import BestPolicy, split_starts
from imagination.rollout.dream_env import Start, dream_starts
from real_envs.trajectory import StopReason, Turn
from tests.support.rooms_world import rooms_log


def test_tasks_that_validate_are_not_learned_from() -> None:
    starts = dream_starts(rooms_log(6, 2, 4), 4)
    learned, validation = split_starts(starts, 2, seed=0)
    apart = {starts[name].task_id for name in validation}
    assert len(apart) == len(validation) == 2
    assert not apart & {start.task_id for start in learned.values()}
    assert all(not starts[name].history for name in validation)  # the beginning of each
    assert split_starts(starts, 2, seed=0) == (learned, validation)


@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 3))
def test_half_of_the_tasks_at_least_are_learned_from(tasks: int, asked: int, seed: int) -> None:
    starts = {f"s{k}": Start(f"t{k}", "x") for k in range(tasks)}
    learned, validation = split_starts(starts, asked, seed)
    assert len(learned) + len(validation) == tasks
    assert len(validation) == min(asked, tasks // 2)


def test_the_best_policy_is_put_back_and_the_latest_of_equals() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    (won,) = rooms_log(1, 1, 1)
    won = replace(won, turns=(Turn("take", "Taken.", 1.0, True),), stop=StopReason.TERMINATED)
    lost = replace(won, turns=(Turn("take", "No.", 0.0, False),), stop=StopReason.TURN_LIMIT)
    broken = replace(lost, stop=StopReason.ENGINE_FAILED)
    best = BestPolicy(model, ["s"], ["t"], every=2, seed=0)
    assert [best.due(k) for k in range(3)] == [True, False, True]
    assert best.due(5, last=True)

    def at(weight: float, *played: object) -> dict[str, float]:
        torch.nn.init.constant_(model.weight, weight)
        return best.consider(int(weight), list(played))  # type: ignore[arg-type]

    assert at(1, won, lost)["validation_success"] == 0.5
    assert at(2, lost, lost)["validation_success"] == 0.0
    assert at(3, won, lost, broken) == {"validation_success": 0.5, "validation_dreams": 2.0}  # an outage is no dream
    assert at(4, broken) == {}
    at(5, lost)
    best.restore()
    assert float(model.weight.detach()) == 3
    again = BestPolicy(model, ["s"], ["t"], every=2, seed=0)
    again.load_state_dict(best.state_dict())
    at(6, lost)
    again.restore()
    assert (float(model.weight.detach()), again.best) == (3, (3, pytest.approx(0.5)))
