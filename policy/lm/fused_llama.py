"""A forward pass with gradients over packed tokens, for decoders shaped like Llama, in fp32 or better on CPUs.

It reads the model's own parameters, so gradients arrive where an optimiser looks for them. Products that share their
input are one; a norm's weight is multiplied into the product behind it; norm, rotation and gate have backward passes
that write each number once; the last layer computes only what is asked for. In fp32 all but the products is compiled
where it can be (``native_training``), and attention walks the tree of prefixes instead of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from policy.lm.compiled import NativeTraining, linear, linear_onto, native_training
from policy.lm.pack import Pack, packed_attention

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PRODUCTS = {*_HEADS, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
_LAYER = {*_PRODUCTS, "", "self_attn", "mlp", "mlp.act_fn", "input_layernorm", "post_attention_layernorm"}
_NORMED_HEADS = {"self_attn.q_norm", "self_attn.k_norm"}


def is_fusable(core: Any) -> bool:
    """Whether ``fused_states`` may stand for the forward pass of ``core``, the part of a causal LM below its head."""
    config, weight = core.config, core.embed_tokens.weight if hasattr(core, "embed_tokens") else None
    if weight is None or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64):
        return False
    if config.model_type not in _FAMILY or config.hidden_act != "silu" or torch.is_autocast_enabled("cpu"):
        return False
    if core.training and config.attention_dropout:
        return False
    if any(is_hooked(module) for module in (core, core.norm, *core.layers.modules())):
        return False
    return all(_is_plain(dict(layer.named_modules())) for layer in core.layers)


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether ``module`` has hooks, which the fused pass does not call."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_plain(modules: dict[str, Any]) -> bool:
    """A layer of the parts that are known, without adapters, quantisation, or biases in odd places."""
    return (modules.keys() - _NORMED_HEADS == _LAYER) and all(
        type(modules[name]) is torch.nn.Linear and (name in _HEADS or modules[name].bias is None) for name in _PRODUCTS
    )


def fused_states(core: Any, packing: Pack, wanted: Tensor | None = None) -> Tensor:
    """Final hidden states ``[wanted, hidden]`` of packed tokens; of all ``[n, hidden]`` by default."""
    eps = core.config.rms_norm_eps
    x = core.embed_tokens(packing.ids)
    cos, sin = core.rotary_emb(x, packing.positions[None])
    half = cos.shape[-1] // 2
    rotation = torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]  # [n, 1, dim / 2]
    last = len(core.layers) - 1
    native = native_training(x.dtype, 2 * half, x.device)
    for index, layer in enumerate(core.layers):
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = _heads(attention, RMSNorm.apply(x, eps, native), layer.input_layernorm.weight, rotation, eps, native)
        if native is not None:
            seen = CausalAttention.apply(q, k, v, packing, native).flatten(1)
        else:
            q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
            seen = packed_attention(attention, q, k, v, None, packing=packing)[0][0].flatten(1)
        if index == last and wanted is not None:
            x, seen = x.index_select(0, wanted), seen.index_select(0, wanted)
        x = linear_onto(x, seen, attention.o_proj.weight)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * layer.post_attention_layernorm.weight
        gated = SwiGLU.apply(linear(RMSNorm.apply(x, eps, native), gate_up), native)
        x = linear_onto(x, gated, mlp.down_proj.weight)
    return RMSNorm.apply(x, eps, native) * core.norm.weight


def _heads(
    attention: Any, x: Tensor, norm: Tensor, rotation: Tensor, eps: float, native: NativeTraining | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values: ``[n, head, dim]``. Pairs ``(i, i + dim / 2)`` are next to each other."""
    dim = attention.head_dim
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    joined = torch.cat([_paired(q.weight, dim), _paired(k.weight, dim), v.weight]) * norm
    bias = None if q.bias is None else torch.cat([_paired(q.bias, dim), _paired(k.bias, dim), v.bias])
    heads = linear(x, joined, bias).view(len(x), -1, dim)
    counts = [len(p.weight) // dim for p in (q, k, v)]
    if not hasattr(attention, "q_norm"):
        return RoPE.apply(heads, rotation, counts, native)
    parts = heads.split(counts, 1)
    normed = [
        RMSNorm.apply(part, eps, native) * _paired(n.weight, dim)
        for part, n in zip(parts, (attention.q_norm, attention.k_norm), strict=False)
    ]
    return RoPE.apply(torch.cat([*normed, parts[2]], 1), rotation, counts, native)


def _paired(rows: Tensor, dim: int) -> Tensor:
    """Rows (or entries) ``i`` and ``i + dim / 2`` of each head next to each other; scores do not notice."""
    return rows.view(-1, 2, dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class RMSNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps)`` (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4, without its gain)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, native: NativeTraining | None) -> Tensor:
        if native is not None:
            y, scale = native.rms_norm(x.contiguous(), eps)
        else:
            scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            y = x * scale
        ctx.save_for_backward(y, scale)
        ctx.native = native
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        y, scale = ctx.saved_tensors
        if ctx.native is not None:
            return ctx.native.rms_norm_backward(grad.contiguous(), y, scale), None, None
        along = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul_(scale), None, None


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` of both side by side, ``[n, 2 * mlp]`` (Shazeer 2020, arXiv 2002.05202, equation 6)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, native: NativeTraining | None) -> Tensor:
        ctx.native = native
        if native is not None:
            ctx.save_for_backward(gate_up)
            return native.swiglu(gate_up)
        gate, up = gate_up.chunk(2, -1)
        passed = F.silu(gate)
        ctx.save_for_backward(gate_up, passed)
        return passed * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.native is not None:
            return ctx.native.swiglu_backward(*ctx.saved_tensors, grad.contiguous()), None
        gate_up, passed = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        to_gate, to_up = out.chunk(2, -1)
        torch.mul(grad, passed, out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return out, None


class RoPE(torch.autograd.Function):
    """Splits ``[n, head, dim]`` into queries, keys and values, and rotates the first two (as complex numbers)."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, rotation: Tensor, counts: list[int], native: NativeTraining | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(rotation)
        ctx.counts, ctx.native = counts, native
        if native is not None:
            return native.rope(heads.contiguous(), rotation, counts)
        q, k, v = heads.split(counts, 1)
        return _rotated(q, rotation), _rotated(k, rotation), v.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rotation,) = ctx.saved_tensors
        if ctx.native is not None:
            q, k, v = (grad.contiguous() for grad in grads)
            return ctx.native.rope_backward((q, k, v), rotation), None, None, None
        out = grads[0].new_empty(len(rotation), sum(ctx.counts), grads[0].shape[-1])
        back, parts = rotation.conj().resolve_conj(), out.split(ctx.counts, 1)
        for grad, part in zip(grads[:2], parts[:2], strict=True):
            torch.mul(_complex(grad), back, out=_complex(part))
        parts[2].copy_(grads[2])
        return out, None, None, None


class CausalAttention(torch.autograd.Function):
    """Causal attention of packed tokens, ``[n, head, dim]``, to their own past."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Pack, native: NativeTraining) -> Tensor:
        out, levels = native.attention(q, k, v, packing)
        ctx.save_for_backward(q, k, v, out, levels)
        ctx.packing, ctx.native = packing, native
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return *ctx.native.attention_backward(ctx.saved_tensors, grad.contiguous(), ctx.packing), None, None


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    return torch.view_as_real(_complex(x) * rotation).flatten(-2)
