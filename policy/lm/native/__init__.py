"""What is compiled, or multiplied by another library than torch's default. Read through ``policy.lm.compiled``.

On CPUs torch multiplies in fp32 by MKL. On processors of AMD that compute with whole vectors of AVX-512, oneDNN, which
torch has for other purposes, takes half the time (measured on Zen 5, docs/log/). Elsewhere all is as torch does it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from policy.lm.native.steps import NativeTraining as NativeTraining
from policy.lm.native.steps import native_attention as native_attention
from policy.lm.native.steps import native_layers as native_layers
from policy.lm.native.steps import native_training as native_training

_LEAST = 16  # rows; below, what is done once for each product takes as long as it saves
_ZEN_5 = 26  # the family of processors


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``torch.nn.functional.linear``: ``[n, in]`` by ``[out, in]``, differentiable once."""
    if not _suits(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        out: Tensor = _Linear.apply(x, weight, bias)
        return out
    return _product(x, weight, bias)


def linear_onto(onto: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``onto + linear(x, weight)``: ``[n, out]``."""
    if not _suits(x, weight):
        return torch.addmm(onto, x, weight.T)
    made = linear(x, weight)
    return onto + made if made.requires_grad or onto.requires_grad else made.add_(onto)


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        onednn_is_faster()
        and x.dim() == 2
        and len(x) >= _LEAST
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def onednn_is_faster() -> bool:
    """Whether products in fp32 are left to oneDNN here."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return there and _is_wide_amd(Path("/proc/cpuinfo"))


def _is_wide_amd(cpuinfo: Path) -> bool:
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    family = re.search(r"^cpu family\s*: (\d+)$", text, re.MULTILINE)
    return "AuthenticAMD" in text and "avx512f" in text and family is not None and int(family[1]) >= _ZEN_5


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    """``linear`` with its gradients; those of weights are asked for in the faster one of two orders."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        to_x = to_weight = None
        if of_x:
            to_x = _product(grad, weight.T)
        if of_weight:
            wide = weight.shape[0] > weight.shape[1]
            to_weight = _product(x.T, grad.T).T if wide else _product(grad.T, x.T)
        return to_x, to_weight, grad.sum(0) if of_bias else None
