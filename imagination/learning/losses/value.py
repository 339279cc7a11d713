"""What trains the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.losses.terms import LossTerms, difference, weighted_sum
from imagination.learning.shapes import check_shapes


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    clip: float | None = 0.2,
) -> LossTerms:
    """The critic's squared error, pessimistic about steps larger than ``clip``.

    ``1/2 max((v - R)^2, (v_old + clamp(v - v_old, -clip, clip) - R)^2)`` as in OpenAI baselines ``ppo2/model.py``.

    Args:
        values, old_values, returns: ``[batch, time]``, in units of return; the last two are constants.
        mask: ``[batch, time]`` bool, agent tokens; the tokens that ``masked_gae`` read values of.
        denominator: number of such tokens in the global batch.
        clip: largest step that still pays, in units of return; ``None`` for the plain squared error.

    Returns:
        sums ``clip_fraction`` and ``squared_error`` (without the 1/2 and the clip); no maxima.

    Raises:
        ValueError: shapes disagree, ``mask`` is not bool, or a number is outside its range.

    Example::

        value_loss(tensor([[1.0]]), tensor([[0.0]]), tensor([[1.0]]), tensor([[True]]), denominator=1, clip=0.2)
        # loss 0.32 = 1/2 (0.2 - 1)^2: right, but reached in too large a step
    """
    check_shapes("value_loss", values=values, old_values=old_values, returns=returns, mask=mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"value_loss needs a bool mask, got {mask.dtype}")
    if clip is not None and clip <= 0.0:
        raise ValueError(f"clip must be positive or None, got {clip}")

    error = difference(values, returns.detach(), mask)
    squared = error.square()
    worst, clipped = squared, torch.zeros_like(mask)
    if clip is not None:
        step = difference(values, old_values.detach(), mask)
        # Within the clip the correction is exactly zero, so rounding makes no token look clipped.
        squared_clipped = (error + (step.clamp(-clip, clip) - step)).square()
        clipped = squared_clipped > squared
        worst = torch.maximum(squared, squared_clipped)
    return LossTerms(
        loss=weighted_sum(0.5 * worst, mask, denominator),
        tokens=mask.sum().to(squared.dtype),
        sums={"clip_fraction": clipped.sum().to(squared.dtype), "squared_error": squared.detach().sum()},
        maxima={},
    )
