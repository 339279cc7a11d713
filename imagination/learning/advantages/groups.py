"""Sums within groups of episodes that share a start: what every estimator without a critic is made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from imagination.learning.shapes import at_least_fp32, check_integers

# Returns are sums of rewards in fp32: ten times 0.1 is 1.00000012, and 0.4 + 0.3 + 0.2 + 0.1 is 1. Numbers that differ
# by less than this share of their size are one number: their difference is rounding, whatever it is divided by.
ROUNDING = 1e-5


def differ(numbers: Collection[float]) -> bool:
    """Whether any two of them differ by more than rounding."""
    return bool(numbers) and max(numbers) - min(numbers) > ROUNDING * max(map(abs, numbers))


@dataclass(frozen=True)
class Groups:
    """Sums within groups of valid rows, given back to every row: all methods map ``[n]`` to ``[n]``."""

    index: Tensor  # [n], dense: 0 .. number of groups - 1
    valid: Tensor  # [n]

    @classmethod
    def of(cls, group_ids: Tensor, valid: Tensor) -> Groups:
        return cls(torch.unique(group_ids, return_inverse=True)[1], valid)

    def size(self) -> Tensor:
        return self.sum(torch.ones_like(self.index))

    def sum(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(len(x))
        return zeros.scatter_add(0, self.index, torch.where(self.valid, x, zeros))[self.index]

    def above_smallest(self, x: Tensor) -> Tensor:
        """``x`` minus the smallest valid ``x`` of the group; zero within ``ROUNDING`` of it and where invalid."""
        zeros = x.new_zeros(len(x))
        filled = x.masked_fill(~self.valid, float("inf"))
        smallest = zeros.fill_(float("inf")).scatter_reduce(0, self.index, filled, reduce="amin")[self.index]
        size = x.abs().masked_fill(~self.valid, 0.0)
        largest = x.new_zeros(len(x)).scatter_reduce(0, self.index, size, reduce="amax")[self.index]
        above = torch.where(self.valid, x - smallest, 0.0)
        return above.masked_fill(above <= ROUNDING * largest, 0.0)


def checked_returns(where: str, returns: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """``returns`` in fp32 or better.

    Raises:
        ValueError: not three tensors ``[n]`` of floats, integers and bools, or a valid return is not finite.
    """
    if returns.ndim != 1 or not returns.shape == group_ids.shape == valid.shape:
        raise ValueError(
            f"{where} needs returns, group_ids and valid of one shape [n], "
            f"got {tuple(returns.shape)}, {tuple(group_ids.shape)} and {tuple(valid.shape)}"
        )
    if valid.dtype != torch.bool:
        raise ValueError(f"{where}: valid must be bool, got {valid.dtype}")
    check_integers(where, "group_ids", group_ids)
    returns = at_least_fp32(returns)
    broken = valid & ~returns.isfinite()
    if broken.any():
        row = int(broken.nonzero()[0])
        raise ValueError(f"row {row} is valid but its return is {float(returns[row])}")
    return returns
