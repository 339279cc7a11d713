"""If these fail, training on packed rows is training on something else than the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from imagination.learning.losses.terms import token_logprobs
from policy.lm.forward import decoder, encode, hidden_before, micro_batches, packs, token_logits
from policy.lm.pack import pack
from tests.support.decoders import MODELS, ROWS, SIZES, A, B, C, batch_of, make_model


def plain_logprobs(model: Any, rows: Sequence[Sequence[int]], mask: Tensor) -> Tensor:
    """A full forward pass a row; the masked tokens in row-major order."""
    found = []
    for row, row_mask in zip(rows, mask.tolist(), strict=True):
        table = model(torch.tensor([row]), use_cache=False).logits[0].log_softmax(-1)
        found += [table[t - 1, token] for t, token in enumerate(row) if row_mask[t]]
    return torch.stack(found)


def packed_logprobs(model: Any, rows: Sequence[Sequence[int]], mask: Tensor) -> Tensor:
    ids, real = batch_of(rows)
    found = hidden_before(model, ids, real, mask)
    return token_logprobs(token_logits(model, found.states), ids[mask], which=found.which)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), materialize_grads=True), strict=True))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-10)])
def test_log_probs_and_gradients_are_those_of_row_by_row(
    name: str, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Whatever the rows share, and in every architecture: grouped heads, norms of queries, learned positions, LoRA."""
    model, rows = make_model(name, dtype), ROWS[kind]
    ids, real = batch_of(rows)
    mask = real & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.6)
    mask[:, 0] = False
    if kind in ("length one", "one row"):
        mask[-2 % len(rows), 1] = True
    weight = torch.randn(int(mask.sum()), generator=torch.Generator().manual_seed(2)).to(dtype)
    assert packs(model, ids.shape[1])
    expected, got = plain_logprobs(model, rows, mask), packed_logprobs(model, rows, mask)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    expected_gradients = gradients(model, (expected * weight).sum())
    scale = max(float(g.abs().max()) for g in expected_gradients.values())
    assert scale > 1e-2
    for key, g in gradients(model, (got * weight).sum()).items():
        torch.testing.assert_close(g, expected_gradients[key], rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("kind", ROWS)
def test_without_packing_the_log_probs_are_those_of_row_by_row_too(kind: str) -> None:
    """What supervised training does on a GPU. Padded rows are computed as they are."""
    model, rows = make_model("llama", torch.float64), ROWS[kind]
    ids, real = batch_of(rows)
    mask = real & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.6)
    mask[:, 0] = False
    if kind in ("length one", "one row"):
        mask[-2 % len(rows), 1] = True
    predictors = hidden_before(model, ids, real, mask, packed=False)
    assert predictors.computed == ids.numel()
    logits = token_logits(model, predictors.states)
    got = token_logprobs(logits, ids[mask], which=predictors.which)
    torch.testing.assert_close(got, plain_logprobs(model, rows, mask), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block", [None, 1, 3, 16, 64])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_blocks_of_attention_change_nothing(name: str, block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without blocks is what a GPU gets."""
    model, rows = make_model(name, torch.float64), ROWS["a group"] + ROWS["prefixes"]
    mask = batch_of(rows)[1]
    mask[:, 0] = False
    expected = plain_logprobs(model, rows, mask)
    monkeypatch.setattr("policy.lm.forward.pack", lambda rows, width=None, _block=None: pack(rows, width, block))
    got = packed_logprobs(model, rows, mask)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    expected_gradients = gradients(model, expected.sum())
    for key, g in gradients(model, got.sum()).items():
        torch.testing.assert_close(g, expected_gradients[key], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("limit", [1, 30, 10**6])
def test_micro_batches_leave_the_gradient_unchanged(limit: int) -> None:
    model, rows = make_model("qwen2", torch.float64), ROWS["a group"] + ROWS["prefixes"]
    _, real = batch_of(rows)
    mask = real.clone()
    mask[:, 0] = False
    expected = gradients(model, plain_logprobs(model, rows, mask).sum())
    total = {key: torch.zeros_like(g) for key, g in expected.items()}
    batches = micro_batches(model, rows, limit)
    assert (len(batches) == 10, 1 < len(batches) < 10, len(batches) == 1)[(1, 30, 10**6).index(limit)]
    for batch in batches:
        inside = [rows[i] for i in batch]
        mask = batch_of(inside)[1]
        mask[:, 0] = False
        if mask.any():
            for key, g in gradients(model, packed_logprobs(model, inside, mask).sum()).items():
                total[key] += g
    for key, g in total.items():
        torch.testing.assert_close(g, expected[key], rtol=1e-9, atol=1e-10)


def test_states_of_all_tokens_for_a_critic() -> None:
    """``encode`` gives every token a state, the last one and those of padding-free rows included."""
    model, rows = make_model("llama"), ROWS["a group"]
    ids, real = batch_of(rows, width=40)
    encoded = encode(model, ids, real)
    assert encoded.which.shape == (5, 40)
    for r, row in enumerate(rows):
        with torch.no_grad():
            expected = decoder(model)(torch.tensor([row]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(encoded.states[encoded.which[r, : len(row)]], expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_computed_twice() -> None:
    """The embedding sees each distinct prefix once and nothing behind a row's last trained token; the output head sees
    each state that predicts something once."""
    model = make_model("llama")
    start = A[:6]
    rows = [[*start, 7, 8, *B[:4]], [*start, 7, 9, *C[:4]], [*start, 10, 8, *C[:4]]]
    ids, real = batch_of(rows)
    mask = torch.zeros_like(real)
    mask[:, 6:8] = True
    seen: dict[str, Tensor] = {}
    model.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.update(embedded=args[0]))
    model.get_output_embeddings().register_forward_hook(lambda m, args, out: seen.update(scored=args[0]))
    packs(model, 12)
    found = hidden_before(model, ids, real, mask)
    token_logits(model, found.states)
    # the start, then 7 and 10; 8 and 9 are predicted but not read
    assert sorted(seen["embedded"].flatten().tolist()) == sorted([*start, 7, 10])
    assert found.computed == 8
    # the last token of the start predicts 7, 7 and 10; 7 predicts 8 and 9; 10 predicts 8
    assert seen["scored"].shape == (3, 32)
    assert found.which.shape == (6,)
    assert found.which[0] == found.which[2] == found.which[4]
    assert found.which[1] == found.which[3] != found.which[5]


def test_bf16_autocast() -> None:
    """Half precision packs too, and stays as close to fp32 as padded rows do."""
    model, rows = make_model("llama"), ROWS["a group"]
    mask = batch_of(rows)[1]
    mask[:, 0] = False
    with torch.no_grad():
        expected = plain_logprobs(model, rows, mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, padded = packed_logprobs(model, rows, mask), plain_logprobs(model, rows, mask)
    assert got.dtype == torch.float32
    assert (got - expected).abs().mean() < 1.5 * (padded - expected).abs().mean() + 1e-3


# --- what cannot be packed ---


def sliding(window: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval()


def test_a_window_shorter_than_the_rows_is_left_to_padding() -> None:
    """Packed, its tokens would see what they must not; padded, the model masks it."""
    rows = ROWS["a group"]
    mask = batch_of(rows)[1]
    mask[:, 0] = False
    assert packs(sliding(24), 24)
    assert not packs(sliding(8), 24)
    for model in (sliding(8), sliding(24)):
        torch.testing.assert_close(
            packed_logprobs(model, rows, mask), plain_logprobs(model, rows, mask), rtol=1e-5, atol=1e-5
        )
    found = hidden_before(sliding(8), *batch_of(rows), mask)
    assert found.computed == 5 * 24  # padding is computed, and counted
    assert len(micro_batches(sliding(8), rows, 5 * 24)) == 1
    assert len(micro_batches(sliding(8), rows, 5 * 24 - 1)) == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Phi3Config(**SIZES, sliding_window=8), False),
        (Qwen2Config(**SIZES, sliding_window=8, use_sliding_window=False), True),
        (Qwen2Config(**SIZES, sliding_window=8, use_sliding_window=True, max_window_layers=2), True),
        (Qwen2Config(**SIZES, sliding_window=8, use_sliding_window=True, max_window_layers=1), False),
    ],
    ids=["in all layers", "switched off", "behind the last layer", "in the last layer"],
)
def test_a_window_counts_where_a_layer_has_it(config: PreTrainedConfig, expected: bool) -> None:
    """The same windows as the engine refuses; rows of other models need no padding."""
    assert packs(AutoModelForCausalLM.from_config(config).eval(), 24) is expected


def test_a_model_whose_layers_look_elsewhere_is_found_out() -> None:
    """A layer that mixes neighbours without asking for attention, as recurrent and convolutional ones do."""
    model = make_model("llama")

    class Shift(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]

    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, Shift())
    assert not packs(model, 4)
    mask = batch_of(ROWS["a group"])[1]
    mask[:, 0] = False
    torch.testing.assert_close(
        packed_logprobs(model, ROWS["a group"], mask),
        plain_logprobs(model, ROWS["a group"], mask),
        rtol=1e-5,
        atol=1e-5,
    )


def test_checkpointed_layers_are_left_to_padding() -> None:
    model = make_model("llama")
    model.gradient_checkpointing_enable()
    assert not packs(model, 4)


def test_asking_leaves_the_model_as_it_was() -> None:
    model = make_model("llama")
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    assert packs(model, 4)
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("rows", "width", "message"), [([[]], None, "no token"), ([[1, 2, 3]], 2, "does not fit")])
def test_pack_refuses(rows: list[list[int]], width: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(rows, width)
