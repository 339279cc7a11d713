"""Attention of one new token a sequence: by torch, and on CUDA cards by a kernel in Triton, which torch brings along.

torch's kernels multiply tiles of queries, of which a decoding step has one a head, and read as many positions of every
slot as the longest has. The kernel reads the keys and values that there are, once, in blocks with a running softmax
(FlashAttention: Dao et al. 2022, arXiv 2205.14135, algorithm 1).
"""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs
    triton = None

_BLOCK = 64  # positions at a time
_LEAST = 16  # rows of queries in a tile, of which those beyond the group are padding


def single_query_attention(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Softmax attention of each slot's query over the positions up to its own, that one included.

    Args:
        q: ``[slot, head, dim]``; as many heads in a row share one of the keys. ``dim`` is a power of two of 16 or more
            on a card.
        keys, values: ``[slot, head of keys, time, dim]``, of the same strides; those of ``time`` and ``dim`` are plain.
        positions: ``[slot]``; ``time`` or more sees everything.

    Returns:
        ``[slot, head, dim]``.
    """
    heads, dim = keys.shape[1], keys.shape[3]
    group = q.shape[1] // heads
    if q.is_cuda and _kernel_is_right(q.device, q.dtype, heads, group, dim):
        return _by_kernel(q, keys, values, positions)
    return _by_torch(q, keys, values, positions)


def _by_torch(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    slots, heads, time, dim = keys.shape
    hidden = torch.arange(time, device=q.device) > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
    block = q.reshape(slots, heads, -1, dim)
    mask = mask[:, None, None].expand(-1, -1, block.shape[2], -1)
    return F.scaled_dot_product_attention(block, keys, values, attn_mask=mask).reshape(q.shape)


def _by_kernel(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    slots, heads, time, dim = keys.shape
    q, group = q.contiguous(), q.shape[1] // heads
    out = torch.empty_like(q)
    strides, rows = keys.stride()[:2], max(_LEAST, triton.next_power_of_2(group))
    _attend[(slots, heads)](q, keys, values, positions, out, *strides, time, dim**-0.5, group, rows, dim, _BLOCK)
    return out


@cache
def _kernel_is_right(device: torch.device, dtype: torch.dtype, heads: int, group: int, dim: int) -> bool:
    """Whether the kernel can be compiled on this card and gives what torch gives; asked once for each shape."""
    if triton is None or dim < _LEAST or dim & (dim - 1):
        return False
    rng = torch.Generator(device).manual_seed(0)
    kv = torch.randn(2, 3, heads, 2 * _BLOCK + 5, dim, generator=rng, device=device).to(dtype)
    q = torch.randn(3, heads * group, dim, generator=rng, device=device).to(dtype)
    asked = q, *kv[:, :, :, : 2 * _BLOCK], torch.tensor([0, _BLOCK, 2 * _BLOCK], device=device)
    try:
        got = _by_kernel(*asked)
    except Exception as error:  # a compiler that is missing, or a card that it does not know, fails in its own way
        print(f"attention by torch, as Triton fails here: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    return torch.allclose(got, _by_torch(*asked), rtol=tolerance, atol=tolerance)


if triton is not None:

    @triton.jit  # which looks types up itself, and knows none of Python's
    def _attend(  # type: ignore[no-untyped-def]
        q_at, k_at, v_at, position_at, out_at,
        slot_stride, head_stride, time, scale,
        GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        slot, head = tl.program_id(0), tl.program_id(1)
        row, column = tl.arange(0, ROWS), tl.arange(0, DIM)
        own = (slot * tl.num_programs(1) + head) * GROUP * DIM + row[:, None] * DIM + column[None, :]
        q = tl.load(q_at + own, mask=row[:, None] < GROUP, other=0.0)
        seen = tl.minimum(tl.load(position_at + slot) + 1, time)
        base = slot.to(tl.int64) * slot_stride + head * head_stride
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DIM], tl.float32)
        for start in range(0, seen, BLOCK):
            at = start + tl.arange(0, BLOCK)
            block = base + at[:, None] * DIM + column[None, :]
            k = tl.load(k_at + block, mask=at[:, None] < seen, other=0.0)
            v = tl.load(v_at + block, mask=at[:, None] < seen, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(at[None, :] < seen, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            faded = tl.exp(highest - higher)
            total = total * faded + tl.sum(weights, 1)
            summed = summed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        tl.store(out_at + own, (summed / total[:, None]).to(out_at.dtype.element_ty), mask=row[:, None] < GROUP)
