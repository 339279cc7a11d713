"""NaN and infinities where numbers are learned from. If these fail, one of them makes every weight NaN, without a word.

Rewards of worlds and of logs are refused elsewhere; docs/reliability.md names those tests.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from imagination.learning.algorithms.registry import build_algorithm
from imagination.learning.policy_module import PolicyModule, Update
from imagination.learning.supervised import SupervisedModule
from imagination.settings import AlgorithmSettings, FitSettings, UserError
from policy.lm.batch import RowBatch, collate
from tests.support.plain import DEFAULTS, EXPERTS, fit, grpo_rows, make_model

Record = list[dict[str, float]]


def poison(model: Any, passes: set[int], value: float) -> None:
    """Puts ``value`` into the gradient of one weight at some of the backward passes, counted from 0."""
    weight = model.model.layers[0].mlp.down_proj.weight
    done = iter(range(10**6))

    def broken(gradient: torch.Tensor) -> torch.Tensor:
        if next(done) not in passes:
            return gradient
        gradient = gradient.clone()
        gradient[0, 0] = value
        return gradient

    weight.register_hook(broken)


def weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def supervised(model: Any, steps: int, optimizer: str, record: Record) -> None:
    settings = FitSettings(steps=40, precision="fp32", optimizer=optimizer, warmup=1)  # type: ignore[arg-type]
    module = SupervisedModule(model, settings, lambda step, metrics: record.append({"step": step, **metrics}))
    fit(module, collate(EXPERTS, pad=0), steps)


class Credited(PolicyModule):
    """Rows bring their advantages."""

    def _assign_credit(self, batch: RowBatch) -> dict[str, float]:
        return {}


def reinforced(model: Any, updates: int, record: Record) -> None:
    algorithm = build_algorithm(AlgorithmSettings(tis_cap=0.0), None)
    module = Credited(
        model, algorithm, replace(DEFAULTS, micro_tokens=8192), lambda step, metrics: record.append(dict(metrics))
    )
    fit(module, Update(0, grpo_rows(make_model()), exact=True), updates)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_of_broken_gradients_is_counted_and_changes_nothing(value: float, optimizer: str) -> None:
    """After one good step, so that momentum and weight decay are there to move weights."""
    record: Record = []
    one, two = make_model(), make_model()
    supervised(one, 1, optimizer, [])
    poison(two, {1}, value)
    supervised(two, 2, optimizer, record)
    assert same(weights(one), weights(two))
    assert not same(weights(one), weights(make_model())), "the good step taught nothing"
    assert [row["step"] for row in record if row.get("skipped_steps")] == [1]


def test_ten_broken_steps_in_a_row_end_a_training_in_a_line() -> None:
    model, record = make_model(), list[dict[str, float]]()
    poison(model, set(range(20)), math.nan)
    with pytest.raises(UserError, match="10 steps"):
        supervised(model, 20, "adamw", record)
    assert all(p.isfinite().all() for p in model.parameters())
    assert sum(row.get("skipped_steps", 0) for row in record) == 9


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_update_of_broken_gradients_is_counted_and_changes_nothing(value: float) -> None:
    record: Record = []
    one, two = make_model(), make_model()
    reinforced(one, 1, [])
    poison(two, {1}, value)
    reinforced(two, 2, record)
    assert same(weights(one), weights(two))
    assert not same(weights(one), weights(make_model())), "the good update taught nothing"
    assert [row.get("skipped_steps", 0) for row in record] == [0, 1]
    assert "grad_norm" not in record[1], "the mean of no steps"
