"""If these fail, an update takes tokens for its own that another policy sampled, or pays for checking one that did not.

``rl_row`` makes engine log-probs that are off by up to a half: the engine of these tests is a bad one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy.lm.batch import Row
from real_envs.seeding import derive_seed
from tests.support.plain import (
    DEFAULTS,
    EXPERTS,
    assert_same,
    gradients_of,
    grpo_rows,
    make_model,
    plain_rl,
    plain_surrogate,
    scored,
    update,
)

CAP = 1.25  # the largest difference is a factor of 1.6


def own_tokens(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return [(r, t) for r, row in enumerate(rows) for t, w in enumerate(row.rl_weight) if w]


def corrected(model: PreTrainedModel, old: PreTrainedModel, rows: Sequence[Row], cap: float = CAP) -> Tensor:
    """Mean over tokens of PPO's loss of new / old, each times min(old / engine, cap)."""
    now = [scored(model, row.ids, 1.0) for row in rows]
    with torch.no_grad():
        before = [scored(old, row.ids, 1.0) for row in rows]
    losses = []
    for r, t in own_tokens(rows):
        factor = min(math.exp(float(before[r][t]) - rows[r].behavior_logprobs[t]), cap)
        losses.append(factor * plain_surrogate(torch.exp(now[r][t] - before[r][t]), rows[r].advantages[t]))
    return torch.stack(losses).mean()


def exact(model: PreTrainedModel, rows: Sequence[Row]) -> list[Row]:
    """The rows as an engine would have sampled them that computes what the trainer computes."""
    with torch.no_grad():
        return [replace(row, behavior_logprobs=[float(s) for s in scored(model, row.ids, 1.0)]) for row in rows]


def test_the_mismatch_is_that_of_the_first_minibatch_before_any_step() -> None:
    """Later ones have moved on purpose; and it is measured whether or not it is corrected."""
    model = make_model()
    rows = grpo_rows(model)
    with torch.no_grad():
        scores = [scored(model, row.ids, 1.0) for row in rows]
    d = [float(rows[r].behavior_logprobs[t] - scores[r][t]) for r, t in own_tokens(rows)]
    for cap, epochs in ((0.0, 1), (CAP, 1), (CAP, 3)):
        train = replace(DEFAULTS, epochs=epochs)
        _, metrics = update(copy.deepcopy(model), [*rows, *EXPERTS], train=train, tis_cap=cap, nudge=0.3)
        assert metrics["mismatch_k3"] == pytest.approx(sum(math.exp(-x) + x - 1 for x in d) / len(d), rel=1e-4)
        assert metrics["mismatch_ratio_max"] == pytest.approx(math.exp(max(map(abs, d))), rel=1e-4)


@pytest.mark.parametrize("micro_tokens", [1, 10**6])
def test_the_correction_is_that_of_the_plain_loop(micro_tokens: int) -> None:
    """In the first step, where new and old are one, and in the second, after the weights have moved."""
    model = make_model()
    rows = grpo_rows(model)
    before = copy.deepcopy(model)
    after = copy.deepcopy(model)
    with torch.no_grad():
        after.lm_head.weight.mul_(1.2)
    train = replace(DEFAULTS, epochs=2, micro_tokens=micro_tokens)
    (first, second), metrics = update(model, rows, train=train, tis_cap=CAP, nudge=0.2)
    assert_same(first, gradients_of(corrected(before, before, rows), before))
    assert_same(second, gradients_of(corrected(after, before, rows), after))
    with torch.no_grad():
        scores = [scored(before, row.ids, 1.0) for row in rows]
    factors = [math.exp(float(scores[r][t]) - rows[r].behavior_logprobs[t]) for r, t in own_tokens(rows)]
    assert metrics["tis_weight"] == pytest.approx(sum(min(x, CAP) for x in factors) / len(factors), rel=1e-4)
    assert max(factors) > CAP > 1 > min(factors)


def test_minibatches_that_come_later_remember_the_policy_from_before_the_first_step() -> None:
    """Without the memory their ratio would compare the moved policy with itself, or with the engine."""
    model = make_model()
    rows = grpo_rows(model)
    before, after = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        after.lm_head.weight.mul_(1.2)
    (first, second), _ = update(model, rows, train=replace(DEFAULTS, minibatches=2), tis_cap=CAP, nudge=0.2, seed=3)
    order = shuffled(5, seed=3)
    early, late = [rows[i] for i in order[:3]], [rows[i] for i in order[3:]]
    assert_same(first, gradients_of(corrected(before, before, early), before))
    assert_same(second, gradients_of(corrected(after, before, late), after))


def shuffled(n: int, seed: int) -> list[int]:
    """The rows of update 0 in the order in which a run of this seed takes them."""
    chance = torch.Generator().manual_seed(derive_seed("minibatches", seed, 0))
    return list(torch.randperm(n, generator=chance).tolist())


def outlier_in_the_second_half(model: PreTrainedModel, seed: int) -> tuple[list[Row], list[Row], list[Row]]:
    """Five rows of an engine that is right but for two tokens of the second minibatch, which the trainer finds 3 times
    and half as likely; with the rows of both minibatches."""
    order = shuffled(5, seed)
    rows = exact(model, grpo_rows(model))
    late = order[4]
    one, other = [t for t, w in enumerate(rows[late].rl_weight) if w][:2]
    told = list(rows[late].behavior_logprobs)
    told[one] -= math.log(3.0)
    told[other] -= math.log(0.5)
    rows[late] = replace(rows[late], behavior_logprobs=told)
    return rows, [rows[i] for i in order[:3]], [rows[i] for i in order[3:]]


@pytest.mark.parametrize("epochs", [1, 3])
def test_an_outlier_in_the_second_half_by_hand(epochs: int) -> None:
    """The first minibatch cannot know of it. Of an engine that is not exact all rows are compared before any step, and
    the outlier gets its weight: 3, cut to 2. k3 of a ratio r is r - 1 - log r; all other tokens have r = 1."""
    seed = 3
    model = make_model()
    rows, early, late = outlier_in_the_second_half(model, seed)
    before, after = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        after.lm_head.weight.mul_(1.2)
    n = len(own_tokens(rows))
    assert n == 22
    train = replace(DEFAULTS, minibatches=2, epochs=epochs)
    (first, second, *_), metrics = update(model, rows, train=train, tis_cap=2.0, nudge=0.2, seed=seed, exact=False)
    assert metrics["mismatch_ratio_max"] == pytest.approx(3.0, rel=1e-4)
    k3 = (3 - 1 - math.log(3)) + (0.5 - 1 - math.log(0.5))
    assert metrics["mismatch_k3"] == pytest.approx(k3 / n, rel=1e-3)
    assert metrics["tis_weight"] == pytest.approx((n - 2 + 2.0 + 0.5) / n, rel=1e-4)
    assert_same(first, gradients_of(corrected(before, before, early, 2.0), before))
    assert_same(second, gradients_of(corrected(after, before, late, 2.0), after))


def test_what_is_not_corrected_is_measured_on_all_rows_too() -> None:
    model = make_model()
    rows, early, late = outlier_in_the_second_half(model, 3)
    train = replace(DEFAULTS, minibatches=2)
    steps, metrics = update(copy.deepcopy(model), rows, train=train, seed=3, exact=False)
    assert metrics["mismatch_ratio_max"] == pytest.approx(3.0, rel=1e-4)
    assert "tis_weight" not in metrics
    for got, minibatch in zip(steps, (early, late), strict=True):
        assert_same(got, gradients_of(plain_rl(model, minibatch, 1.0), model))


@pytest.mark.parametrize(("minibatches", "epochs", "passes"), [(1, 1, 1), (2, 1, 3), (1, 2, 3), (2, 2, 5)])
def test_an_engine_that_is_not_exact_costs_one_pass_before_the_first_step(
    minibatches: int, epochs: int, passes: int
) -> None:
    """However well it happens to agree; and none where the only step reads all rows anyway."""
    model = make_model()
    rows = exact(model, grpo_rows(model))
    update(model, rows)  # asks once whether the model can be packed
    calls = []
    model.model.register_forward_hook(lambda module, args, output: calls.append(1))
    train = replace(DEFAULTS, minibatches=minibatches, epochs=epochs, micro_tokens=10**6)
    update(model, rows, train=train, tis_cap=2.0, exact=False)
    assert len(calls) == passes


def test_experts_alone_need_no_log_probs_of_their_own() -> None:
    model = make_model()
    train = replace(DEFAULTS, minibatches=2)
    steps, metrics = update(model, EXPERTS, train=train, tis_cap=2.0, exact=False)
    assert len(steps) == 2
    assert "mismatch_k3" not in metrics


def test_an_exact_engine_costs_no_forward_pass_and_changes_no_gradient() -> None:
    model = make_model()
    rows = exact(model, grpo_rows(model))
    calls = []
    model.model.register_forward_hook(lambda module, args, output: calls.append(1))
    train = replace(DEFAULTS, epochs=2, minibatches=2, micro_tokens=10**6)
    update(model, rows, train=train)  # asks once whether the model can be packed
    found, counted = {}, {}
    for cap in (0.0, CAP):
        calls.clear()
        found[cap], metrics = update(model, rows, train=train, tis_cap=cap, nudge=0.0)
        counted[cap] = len(calls)
        assert metrics["mismatch_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert counted == {0.0: 4, CAP: 4}
    for plain, corrected_step in zip(found[0.0], found[CAP], strict=True):
        assert_same(corrected_step, plain)

    calls.clear()
    update(model, grpo_rows(model), train=train, tis_cap=CAP)
    assert len(calls) > 4 + 5  # five rows scored by the test; one more pass for the rows


def test_a_first_minibatch_of_experts_alone_leaves_nothing_uncorrected() -> None:
    """It says nothing about the engine, and after its step it is too late to ask."""
    model = make_model()
    rows = [*grpo_rows(model)[:1], EXPERTS[0]]
    before, after = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        after.lm_head.weight.mul_(1.2)
    seed = next(s for s in range(99) if shuffled(2, s)[0])
    (_, second), _ = update(model, rows, train=replace(DEFAULTS, minibatches=2), tis_cap=CAP, nudge=0.2, seed=seed)
    assert_same(second, gradients_of(corrected(after, before, rows[:1]), after))
