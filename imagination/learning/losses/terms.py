"""What a loss returns, and the two operations that keep tokens without weight out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from imagination.learning.shapes import at_least_fp32


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss and what is to be logged about it.

    Attributes:
        loss: scalar; the only part with a gradient.
        tokens: scalar, how many tokens had a weight other than 0.
        sums: scalars that add over micro-batches and ranks; divided by ``tokens`` they are means over tokens.
        maxima: scalars of which to take the largest; 0 where no token counted.

    Example::

        LossTerms(loss=tensor(0.7), tokens=tensor(3.0), sums={"ratio": tensor(3.3)}, maxima={"ratio": tensor(1.4)})
    """

    loss: Tensor
    tokens: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def means(self) -> dict[str, Tensor]:
        """``sums`` per token; zeros where no token counted."""
        return {name: total / self.tokens.clamp(min=1) for name, total in self.sums.items()}


def difference(a: Tensor, b: Tensor, active: Tensor) -> Tensor:
    """``a - b`` where active, else 0. Subtraction is linear: a junk operand cannot turn a zero gradient into NaN."""
    return (at_least_fp32(a) - at_least_fp32(b)).masked_fill(~active, 0.0)


def constant(x: Tensor, active: Tensor) -> Tensor:
    """``x`` without gradient, exactly 0 where not active."""
    return at_least_fp32(x.detach()).masked_fill(~active, 0.0)


def weighted_sum(per_token: Tensor, weight: Tensor, denominator: float) -> Tensor:
    """``per_token`` must already be finite where the weight is 0."""
    if not (denominator > 0 and math.isfinite(denominator)):
        raise ValueError(
            f"denominator is the global number of tokens and must be positive, got {denominator}; "
            "leave a loss out of a step in which nothing has weight"
        )
    return (per_token * weight.to(per_token.dtype)).sum() / denominator


def largest(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_zeros(())
