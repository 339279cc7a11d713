"""Checks that the pure functions of advantages and losses share: shapes, masks, precision."""

from __future__ import annotations

import torch
from torch import Tensor


def check_shapes(where: str, **tensors: Tensor) -> None:
    """Raises ``ValueError`` where the tensors are not all of one shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{where} needs tensors of one shape, [batch, time] or [n], got {got}")


def check_mask(where: str, mask: Tensor) -> None:
    """Raises ``ValueError`` where it is not a bool mask ``[batch, time]``."""
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(f"{where} needs a bool mask [batch, time], got {mask.dtype} {tuple(mask.shape)}")


def check_integers(where: str, name: str, x: Tensor) -> None:
    """Raises ``ValueError`` where the tensor does not hold integers."""
    if x.is_floating_point() or x.dtype == torch.bool:
        raise ValueError(f"{where}: {name} must hold integers, got {x.dtype}")


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precision becomes fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()
