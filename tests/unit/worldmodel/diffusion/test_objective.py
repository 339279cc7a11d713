"""If these fail, a world model by diffusion learns from other canvases, or at another price, than it should."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from policy.lm.batch import Row, RowBatch, collate
from policy.lm.engine import UnsupportedModel
from real_envs.trajectory import Source
from tests.support.decoders import MODELS, SIZES
from tests.support.decoders import make_model as make_decoder
from worldmodel.diffusion.engine import check_canvases
from worldmodel.diffusion.objective import Canvas, DiffusionStep, MaskedDiffusion, canvases, hide

STOP, MASK = 2, 63
OBJECTIVE = MaskedDiffusion(block=4, mask=MASK, stop=STOP, context=40)
TEXTS = [  # ids and weights; answers of 3, 6 and 4 tokens with their stop, and one that was cut
    ([9, 8, 11, 12, STOP, 7, 7, 13, 14, 15, 16, 17, STOP, 9], [0, 0, *[1.0] * 3, 0, 0, *[0.5] * 6, 0]),
    ([5, 21, 22, 23, STOP, 6, 31, 32, 33, 34, 35], [0, *[2.0] * 4, 0, *[1.0] * 5]),
]


def batch_of(texts: list[tuple[list[int], list[float]]]) -> RowBatch:
    rows = [Row(ids, [False] * len(ids), Source.REAL, ce_weight=weights) for ids, weights in texts]
    return collate(rows, pad=0)


def plain_nll(model: Any, text: list[int], noisy: list[int], truth: list[int]) -> list[float]:
    """-log p of each hidden token of one canvas behind one text: one pass, its mask written out place by place."""
    n, ids = len(text), [*text, *noisy]
    seen = torch.tensor([[[[k <= q or q >= n for k in range(len(ids))] for q in range(len(ids))]]])
    with torch.no_grad():
        logits = model(torch.tensor([ids]), attention_mask=seen, use_cache=False).logits[0, n:].float()
    found = []
    for place, right in enumerate(truth):
        if noisy[place] == MASK:
            others = [logits[place, v].item() for v in range(logits.shape[1]) if v != MASK]
            found.append(torch.logsumexp(torch.tensor(others), 0).item() - logits[place, right].item())
    return found


def test_answers_become_canvases() -> None:
    batch = batch_of(TEXTS)
    assert OBJECTIVE.canvases(batch) == [
        Canvas(0, 2, (11, 12, STOP, STOP), 1.0),
        Canvas(0, 7, (13, 14, 15, 16), 0.5),
        Canvas(0, 11, (17, STOP, STOP, STOP), 0.5),
        Canvas(1, 1, (21, 22, 23, STOP), 2.0),
        Canvas(1, 6, (31, 32, 33, 34), 1.0),  # 35 was behind it, and what came then nobody knows
    ]
    assert [c.start for c in canvases(0, *TEXTS[0], block=4, stop=STOP, context=11)] == [2, 7]
    assert canvases(0, [STOP, STOP], [1.0, 1.0], 2, STOP, 9) == [
        Canvas(0, 0, (2, 2), 1.0),
        Canvas(0, 1, (2, 2), 1.0),
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-lora"])
def test_the_loss_is_that_of_a_plain_loop(name: str) -> None:
    """Several canvases of several texts in one pass, against one pass a canvas; and in parts as in one piece."""
    model = make_decoder(name)
    step = OBJECTIVE.step(batch_of(TEXTS), seed=3)
    expected = 0.0
    for canvas, hidden in zip(step.canvases, step.hidden.tolist(), strict=True):
        noisy = [MASK if h else token for h, token in zip(hidden, canvas.ids, strict=True)]
        nll = sum(plain_nll(model, TEXTS[canvas.row][0][: canvas.start], noisy, list(canvas.ids)), 0.0)
        expected += canvas.weight * len(hidden) / sum(hidden) * nll
    expected /= 4 * (1.0 + 0.5 + 0.5 + 2.0 + 1.0)
    assert 3 < step.count < 20
    whole, _ = step.part(model, slice(0, 8))
    parts = [step.part(model, slice(k, k + 1))[0] for k in range(2)]
    assert whole.item() == pytest.approx(expected, rel=1e-4)
    assert sum(parts).item() == pytest.approx(expected, rel=1e-4)
    whole.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in trained)


def test_the_text_is_told_beside_the_canvases() -> None:
    """Against a causal pass of each text alone: what stands beside it must not be seen, and the weight must count."""
    model = make_decoder("llama")
    expected = 0.0
    for ids, weights in TEXTS:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float()
        logits[:, MASK] = float("-inf")
        for at, weight in enumerate(weights):
            if weight:
                expected -= weight * logits[at - 1].log_softmax(-1)[ids[at]].item()
    expected /= sum(sum(weights) for _, weights in TEXTS)
    batch = batch_of(TEXTS)
    alone, told = (replace(OBJECTIVE, causal_weight=w).step(batch, seed=3) for w in (0.0, 0.25))
    parts = [sum(step.part(model, slice(k, k + 1))[0].detach().item() for k in range(2)) for step in (alone, told)]
    assert parts[1] - parts[0] == pytest.approx(0.25 * expected, rel=1e-4)


def test_its_mean_is_the_sum_over_all_ways_to_hide() -> None:
    """With each token hidden with probability t and t uniform, k chosen tokens of L are the hidden ones with a density
    whose integral over 1 / t is (k - 1)! (L - k)! / L!: the loss is a finite sum. What is drawn otherwise, so
    many tokens at a time, must have it as its mean."""
    model = make_decoder("llama")
    text, truth = [7, 9, 8], [11, 12, STOP]
    exact = 0.0
    for k in (1, 2, 3):
        for chosen in combinations(range(3), k):
            noisy = [MASK if i in chosen else token for i, token in enumerate(truth)]
            share = math.factorial(k - 1) * math.factorial(3 - k) / math.factorial(3)
            exact += share * sum(plain_nll(model, text, noisy, truth))
    objective = MaskedDiffusion(3, MASK, STOP, 40)
    batch = batch_of([([*text, *truth], [0, 0, 0, 1, 1, 1])] * 64)
    with torch.no_grad():
        drawn = torch.tensor([objective.step(batch, seed).part(model, slice(0, 64))[0] * 3 for seed in range(40)])
    error = drawn.std() / len(drawn) ** 0.5
    assert error < 0.05 * exact
    assert abs(drawn.mean() - exact) < 4 * error


def test_all_numbers_of_hidden_tokens_come_equally_often_and_spread_over_a_step() -> None:
    drawn = [hide(8, 4, torch.Generator().manual_seed(seed)) for seed in range(800)]
    hidden, shares = torch.stack([d[0] for d in drawn]), torch.stack([d[1] for d in drawn])
    counts = hidden.sum(-1)
    assert torch.equal(counts, (shares * 4).round().long())
    for k in range(1, 5):  # each within 5 standard errors
        assert ((counts == k).float().mean(0) - 1 / 4).abs().max() < 5 * (1 / 4 * 3 / 4 / 800) ** 0.5
    assert (hidden.float().mean(0) - 5 / 8).abs().max() < 5 * 0.5 / 800**0.5
    assert all(row.sort().values.tolist() == [1, 1, 2, 2, 3, 3, 4, 4] for row in counts)  # a step has all of them


def test_a_seed_decides_what_is_hidden_and_an_empty_batch_costs_nothing() -> None:
    batch = batch_of(TEXTS)
    one, same, other = (OBJECTIVE.step(batch, seed) for seed in (1, 1, 2))
    assert torch.equal(one.hidden, same.hidden)
    assert not torch.equal(one.hidden, other.hidden)
    model = make_decoder("llama")
    empty = OBJECTIVE.step(batch_of([([5, 6, 7], [0, 0, 1.0])]), 1)  # no whole canvas and no end
    assert isinstance(empty, DiffusionStep)
    loss, right = empty.part(model, slice(0, 1))
    loss.backward()
    assert loss.item() == right.item() == empty.count == 0


def test_a_model_that_attends_in_its_own_way_is_refused() -> None:
    for name in ("llama", "qwen2", "llama-lora", "gpt2"):
        check_canvases(make_decoder(name), 64)
    from transformers import MistralConfig, MistralForCausalLM

    narrow = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16))
    with pytest.raises(UnsupportedModel, match=r"16 tokens: lower worldmodel\.context"):
        check_canvases(narrow, 64)
    deaf = MODELS["llama"]()
    forward = deaf.model.forward
    deaf.model.forward = lambda **given: forward(**{**given, "attention_mask": None})  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="attention mask"):
        check_canvases(deaf, 64)
