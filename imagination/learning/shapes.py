"""Checks that the pure functions of advantages and losses share: shapes, masks, precision."""

from __future__ import annotations

import math

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


def check_unit(where: str, **numbers: float) -> None:
    """Raises ``ValueError`` where a number lies outside [0, 1]."""
    if not all(0.0 <= x <= 1.0 for x in numbers.values()):
        names, values = " and ".join(numbers), " and ".join(str(x) for x in numbers.values())
        raise ValueError(f"{where}: {names} must lie in [0, 1], got {values}")


def check_positive(where: str, **numbers: float) -> None:
    """Raises ``ValueError`` where a number is not positive and finite."""
    for name, x in numbers.items():
        if not (x > 0.0 and math.isfinite(x)):
            raise ValueError(f"{where}: {name} must be positive, got {x}")


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precision becomes fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()
