"""Sums within groups of episodes that share a start: what every estimator without a critic is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from imagination.learning.shapes import at_least_fp32, check_integers


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
        """``x`` minus the smallest valid ``x`` of the group; zero where invalid."""
        x = x.masked_fill(~self.valid, float("inf"))
        smallest = x.new_full((len(x),), float("inf")).scatter_reduce(0, self.index, x, reduce="amin")[self.index]
        return torch.where(self.valid, x - smallest, 0.0)


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
