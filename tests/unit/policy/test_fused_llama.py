"""If these fail, updates learn by wrong gradients, or go the slow way without anybody noticing.

That the states and gradients of whole models are those of transformers is asked in ``test_pack``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from policy.lm.backbone import with_lora
from policy.lm.forward import decoder, encode, hidden_before, packs
from policy.lm.fused_llama import RMSNorm, RoPE, SwiGLU, is_fusable
from policy.lm.settings import LoraSettings
from tests.support.decoders import ROWS, SIZES, batch_of, make_model


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more)).eval()


@pytest.mark.parametrize(("name", "expected"), [("llama", True), ("qwen2", True), ("qwen3", True), ("gpt2", False)])
def test_who_is_fusable(name: str, expected: bool) -> None:
    assert is_fusable(decoder(make_model(name))) is expected


@pytest.mark.parametrize(
    "more", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}], ids=lambda more: next(iter(more))
)
def test_who_differs_in_a_detail_is_not(more: dict[str, Any]) -> None:
    """A product with a bias where none is added, or another gate."""
    assert not is_fusable(decoder(llama(**more)))


def test_the_rest_goes_the_way_of_transformers() -> None:
    """Dropout of attention while it is on, autocast, half precision, adapters: none of it is in the fused pass."""
    model = llama(attention_dropout=0.1)
    assert is_fusable(decoder(model))
    assert not is_fusable(decoder(model.train()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_fusable(decoder(model.eval()))
    assert not is_fusable(decoder(llama().to(torch.bfloat16)))
    plain = llama()
    assert packs(plain, 4)
    adapted = with_lora(plain, LoraSettings(rank=2))  # in place: the same decoder, asked before
    assert not is_fusable(decoder(adapted))
    assert packs(adapted, 4)


@pytest.mark.parametrize("where", ["", "norm", "layers.1.mlp.up_proj"])
def test_who_asked_to_be_told_of_calls_is_told(where: str) -> None:
    """Parts that the fused pass does not call have no hooks while it is used."""
    model = make_model("llama")
    calls: list[int] = []
    hook = decoder(model).get_submodule(where).register_forward_hook(lambda *_: calls.append(1))
    assert packs(model, 20)
    calls.clear()
    encode(model, *batch_of(ROWS["one row"]))
    assert calls == [1]
    hook.remove()
    assert is_fusable(decoder(model))


def test_wanted_states_are_those_of_all() -> None:
    """The last layer leaves out what nobody asks for, and nothing else."""
    model, rows = make_model("qwen3", torch.float64), ROWS["a group"]
    ids, real = batch_of(rows)
    mask = torch.zeros_like(real)
    mask[0, 9], mask[1, 3], mask[4, 17] = True, True, True
    found = hidden_before(model, ids, real, mask)
    everything = encode(model, ids, real)
    expected = torch.stack([everything.states[everything.which[r, t - 1]] for r, t in ((0, 9), (1, 3), (4, 17))])
    torch.testing.assert_close(found.states[found.which], expected, rtol=1e-10, atol=1e-12)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=chance, dtype=torch.float64).requires_grad_()


def test_the_norm_by_hand() -> None:
    """Of (3, 4) the mean square is 12.5; and the gradient is the numerical one."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    expected = torch.tensor([[3.0, 4.0]], dtype=torch.float64) / 12.5**0.5
    torch.testing.assert_close(RMSNorm.apply(x, 0.0, None), expected)
    assert torch.autograd.gradcheck(lambda x: RMSNorm.apply(x, 1e-3, None), (numbers(3, 5),))


def test_the_gate_by_hand() -> None:
    """``silu(0) = 0`` and ``silu(ln 3) = 3/4 ln 3``, times what lies in the other half."""
    log3 = torch.tensor(3.0, dtype=torch.float64).log()
    gate_up = torch.stack([torch.zeros_like(log3), log3, torch.full_like(log3, 7.0), torch.full_like(log3, 2.0)])[None]
    expected = torch.stack([torch.zeros_like(log3), 1.5 * log3])[None]
    torch.testing.assert_close(SwiGLU.apply(gate_up, None), expected)
    x = numbers(3, 8)
    torch.testing.assert_close(SwiGLU.apply(x, None), F.silu(x[:, :4]) * x[:, 4:])
    assert torch.autograd.gradcheck(lambda x: SwiGLU.apply(x, None), (x,))


def test_the_rotation_by_hand() -> None:
    """A quarter turn takes (1, 2) to (-2, 1); values stay; and the gradient is the numerical one."""
    heads = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]], dtype=torch.float64)
    quarter = torch.tensor([[[1j]]], dtype=torch.complex128)
    q, k, v = RoPE.apply(heads, quarter, [1, 1, 1], None)
    assert q.tolist() == [[[-2.0, 1.0]]]
    assert k.tolist() == [[[-4.0, 3.0]]]
    assert v.tolist() == [[[5.0, 6.0]]]
    angles = torch.rand(3, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rotation = torch.polar(torch.ones_like(angles), angles)
    assert torch.autograd.gradcheck(lambda x: RoPE.apply(x, rotation, [2, 1, 1], None), (numbers(3, 4, 4),))
