"""If these fail, GRPO follows another gradient than the formulas say: wiring is where masks get lost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.policy_module import PolicyModule
from imagination.settings import AlgorithmSettings
from policy.lm.batch import Row
from policy.lm.forward import micro_batches
from tests.support.plain import (
    DEFAULTS,
    EXPERTS,
    assert_same,
    gradient,
    gradients_of,
    grpo_rows,
    make_model,
    plain_imitation,
    plain_kl,
    plain_rl,
    update,
)

# --- GRPO ---


@pytest.mark.parametrize("weights", [[0.25] * 5, [1.0, 0.5, 0.05, 0.9, 0.3]])
def test_a_weight_scales_the_gradient_of_its_tokens_and_nothing_else(weights: list[float]) -> None:
    """What dreams of doubt count for: the gradient is the weighted sum of those of the rows alone, over *all* tokens.
    Divided by the sum of weights instead, a batch full of doubt would move the policy as far as a sure one."""
    model = make_model()
    rows = grpo_rows(model)
    sizes = [sum(row.rl_weight) for row in rows]
    expected: dict[str, torch.Tensor] = {}
    for row, size, weight in zip(rows, sizes, weights, strict=True):
        for name, alone in gradient(model, [row]).items():
            expected[name] = expected.get(name, torch.zeros_like(alone)) + weight * size / sum(sizes) * alone
    weighed = [
        replace(row, rl_weight=[weight * w for w in row.rl_weight]) for row, weight in zip(rows, weights, strict=True)
    ]
    assert_same(gradient(model, weighed), expected)


@pytest.mark.parametrize(("micro_tokens", "batches"), [(1, 7), (36, 3), (10**6, 1)])
def test_micro_batches_and_padding_leave_the_gradient_unchanged(micro_tokens: int, batches: int) -> None:
    """Row by row without any padding, in a few padded batches, or all at once: memory is no hyperparameter."""
    model = make_model()
    rows = [*grpo_rows(model), *EXPERTS]
    loss = plain_rl(model, rows[:5], 1.0) + 0.3 * plain_imitation(model, EXPERTS)
    (got,), metrics = update(model, rows, train=replace(DEFAULTS, micro_tokens=micro_tokens))
    assert len(micro_batches(model, [row.ids for row in rows], micro_tokens)) == batches
    assert_same(got, gradients_of(loss, model))
    assert metrics["policy_loss"] == pytest.approx(plain_rl(model, rows[:5], 1.0).item(), rel=1e-4)
    assert metrics["expert_loss"] == pytest.approx(plain_imitation(model, EXPERTS).item(), rel=1e-4)
    assert (metrics["rl_tokens"], metrics["ce_tokens"]) == (22, 12)


def test_masked_tokens_have_exactly_no_gradient() -> None:
    """Junk on tokens that are not trained changes no bit; and what comes after the last trained token is not even a
    context, so its embedding stays untouched."""
    model = make_model()
    after = 7  # a token that occurs only behind everything that is trained
    rows = []
    for row in (*grpo_rows(model), *EXPERTS):
        ids = [token if token != after else after + 1 for token in row.ids]
        tail = len(ids) - max(i for i, m in enumerate(row.action_mask) if m) - 1
        rows.append(replace(row, ids=[*ids[: len(ids) - tail], *[after] * tail]))
    assert sum(after in row.ids for row in rows) >= 2
    clean = gradient(model, rows)
    assert not clean["model.embed_tokens.weight"][after].any()
    assert clean["model.embed_tokens.weight"][rows[0].ids[0]].any()  # the first token of a row is context

    def junk(row: Row, number: float) -> Row:
        hidden = [not m for m in row.action_mask]
        if not len(row.rl_weight):
            return row
        return replace(
            row,
            advantages=[number if h else a for h, a in zip(hidden, row.advantages, strict=True)],
            behavior_logprobs=[number if h else a for h, a in zip(hidden, row.behavior_logprobs, strict=True)],
        )

    for number in (math.inf, -1e30, 3.0):
        dirty = gradient(model, [junk(row, number) for row in rows])
        assert all(torch.equal(dirty[name], clean[name]) for name in clean)


# --- experts ---


def test_dreams_do_not_dilute_the_experts() -> None:
    """Cross-entropy divides by its own tokens. Divided by all, the more is dreamed the less is learned from experts,
    whatever ``expert_coef`` says."""
    model = make_model()
    dreams = grpo_rows(model)
    alone = gradient(model, EXPERTS)
    assert_same(alone, gradients_of(0.3 * plain_imitation(model, EXPERTS), model))
    for few in (dreams[:1], dreams):
        mixed, pure = gradient(model, [*few, *EXPERTS]), gradient(model, few)
        assert_same({name: mixed[name] - pure[name] for name in mixed}, alone)


# --- KL to the reference ---


def test_the_kl_term_holds_the_policy_to_its_reference() -> None:
    """Its gradient is that of the plain loop, over the trained tokens only, at the sampling temperature."""
    model, reference = make_model(), make_model(seed=1).requires_grad_(False)
    rows = grpo_rows(model, 1.3)
    settings = AlgorithmSettings(kl_coef=0.4)
    (got,), metrics = update(model, [*rows, *EXPERTS], settings, reference=reference)
    kl = plain_kl(model, reference, rows, 1.3)
    loss = plain_rl(model, rows, 1.3) + 0.4 * kl + 0.3 * plain_imitation(model, EXPERTS)
    assert_same(got, gradients_of(loss, model))
    assert metrics["kl_reference"] == pytest.approx(kl.item(), rel=1e-4)
    assert metrics["kl_reference"] > 0.1


def test_the_reference_is_neither_trained_nor_saved() -> None:
    """As a submodule it would be in the optimiser and in every checkpoint."""
    model, reference = make_model(), make_model(seed=1)
    module = PolicyModule(
        model, ALGORITHMS["grpo"].with_settings(kl_coef=1.0), DEFAULTS, lambda i, m: None, reference=reference
    )
    mine = {id(p) for p in module.parameters()}
    assert mine == {id(p) for p in model.parameters()}
    assert set(module.state_dict()) == {f"model.{name}" for name in model.state_dict()}
