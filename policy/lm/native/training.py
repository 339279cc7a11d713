"""Compiled steps of training on CPUs, in fp32: attention over packed rows, and what stands between matrix products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from policy.lm.native.decoding import library_for
from policy.lm.pack import Pack

_WIDEST = 16  # numbers of a vector


class NativeTraining:
    """Each function computes what ``policy.lm.fused_llama`` says it does; all tensors are contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def attention(self, q: Tensor, k: Tensor, v: Tensor, packing: Pack) -> tuple[Tensor, Tensor]:
        """Causal attention of each token to its past: ``[n, query_head, dim]``, and levels ``[n, query_head]``.

        Args:
            q: ``[n, query_head, dim]``.
            k, v: ``[n, head, dim]``.
        """
        n, query_heads, dim = q.shape
        out, levels = torch.empty_like(q), q.new_empty(n, query_heads)
        self._library.tree_attention(
            *_pointers(q, k, v, out, levels), packing.chunks.ctypes.data, packing.runs.ctypes.data,
            len(packing.chunks), query_heads, k.shape[1], dim, torch.get_num_threads(),
        )  # fmt: skip
        return out, levels

    def attention_backward(self, saved: Sequence[Tensor], grad: Tensor, packing: Pack) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; saved are those, and what ``attention`` made of them."""
        q, k, v, _, _ = saved
        n, query_heads, dim = q.shape
        grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        self._library.tree_attention_backward(
            *_pointers(*saved, grad, *grads), packing.chunks.ctypes.data, packing.runs.ctypes.data,
            len(packing.chunks), n, query_heads, k.shape[1], dim, torch.get_num_threads(),
        )  # fmt: skip
        return grads

    def normed(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``[..., width]`` over its root mean square, and the factors ``[..., 1]``."""
        y, scales = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        self._library.normed(*_pointers(x, y, scales), scales.numel(), x.shape[-1], eps, torch.get_num_threads())
        return y, scales

    def normed_backward(self, grad: Tensor, y: Tensor, scales: Tensor) -> Tensor:
        """The gradient of ``normed``."""
        out = torch.empty_like(y)
        given = _pointers(grad, y, scales, out)
        self._library.normed_backward(*given, scales.numel(), y.shape[-1], torch.get_num_threads())
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[n, 2 * width]``."""
        n, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(n, width)
        self._library.gated_float32(*_pointers(gate_up, out), n, width, torch.get_num_threads())
        return out

    def gated_backward(self, gate_up: Tensor, grad: Tensor) -> Tensor:
        """The gradient of ``gated``."""
        out = torch.empty_like(gate_up)
        self._library.gated_backward(*_pointers(gate_up, grad, out), *grad.shape, torch.get_num_threads())
        return out

    def turned(self, joined: Tensor, rotation: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values of ``[n, head, dim]``.

        Args:
            rotation: ``[n, 1, dim / 2]``, complex; pairs of neighbours are rotated.
            counts: heads of each.
        """
        n, _, dim = joined.shape
        q, k, v = (joined.new_empty(n, heads, dim) for heads in counts)
        self._turn(self._library.turned_apart, joined, rotation, (q, k, v))
        return q, k, v

    def turned_backward(self, grads: tuple[Tensor, Tensor, Tensor], rotation: Tensor) -> Tensor:
        """The gradient of ``turned``."""
        n, _, dim = grads[0].shape
        joined = rotation.real.new_empty(n, sum(grad.shape[1] for grad in grads), dim)
        self._turn(self._library.turned_together, joined, rotation, grads)
        return joined

    def _turn(
        self, function: ctypes._NamedFuncPointer, joined: Tensor, rotation: Tensor, parts: Sequence[Tensor]
    ) -> None:
        n, queries, dim = parts[0].shape
        assert rotation.numel() * 2 == n * dim
        given = _pointers(joined, rotation, *parts)
        function(*given, n, queries, parts[1].shape[1], dim, torch.get_num_threads())


def native_training(dtype: torch.dtype, dim: int, device: torch.device) -> NativeTraining | None:
    """For heads of ``dim`` numbers; ``None`` where they do not fill vectors, or nothing could be compiled."""
    library = library_for(dtype, device) if dtype == torch.float32 and dim % _WIDEST == 0 else None
    return None if library is None else NativeTraining(library)


def _pointers(*tensors: Tensor) -> list[int]:
    assert all(x.is_contiguous() and x.dtype in (torch.float32, torch.complex64) for x in tensors)
    return [tensor.data_ptr() for tensor in tensors]
