"""Importance ratios at three levels: a token, a turn, a whole sequence; and which tokens belong to which.

Segments are integers, equal within a segment and different between any two of the batch, of rows too. They travel with
the tokens, so rows may be padded, packed, or given as the list ``[n]`` of trained tokens; only a micro-batch must not
cut through a segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.losses.terms import difference
from imagination.learning.shapes import check_integers, check_mask, check_positive, check_shapes

LOG_RATIO_CLAMP = 20.0  # nats; keeps exp finite


def token_log_ratio(
    logprobs: Tensor, behavior_logprobs: Tensor, active: Tensor, clamp: float = LOG_RATIO_CLAMP
) -> Tensor:
    """``logprobs - behavior_logprobs`` of each active token, bounded, exactly 0 elsewhere; gradient to the first only.

    Raises:
        ValueError: ``clamp`` is not positive.
    """
    if clamp <= 0.0:
        raise ValueError(f"log_ratio_clamp must be positive, got {clamp}")
    return difference(logprobs, behavior_logprobs.detach(), active).clamp(-clamp, clamp)


def segment_mean(x: Tensor, active: Tensor, segments: Tensor) -> Tensor:
    """Mean of ``x`` over the active tokens of each segment, given to each of them.

    Of log-ratios this is the log of the geometric mean of the ratios: the length does not enter, so a long episode's
    ratio neither explodes nor vanishes. The gradient flows through.

    Args:
        x: any shape; finite where active.
        active: bool, of the same shape.
        segments: integers of the same shape; read where active.

    Returns:
        of the same shape, exactly 0 where not active.

    Raises:
        ValueError: shapes disagree or segments are not integers.

    Example::

        segment_mean(tensor([1.0, 3.0, 5.0]), tensor([True, True, True]), tensor([7, 7, 2]))  # [2, 2, 5]
    """
    check_shapes("segment_mean", x=x, active=active, segments=segments)
    check_integers("segment_mean", "segments", segments)
    if not x.numel():
        return x
    # Tokens that are not active may fall into any segment: they add nothing to its sum and nothing to its size.
    names, index = torch.unique(segments.masked_fill(~active, 0).flatten(), return_inverse=True)
    flat = x.masked_fill(~active, 0.0).flatten()
    zeros = flat.new_zeros(len(names))
    sums = zeros.scatter_add(0, index, flat)
    sizes = zeros.scatter_add(0, index, active.flatten().to(flat.dtype)).clamp(min=1)
    return (sums / sizes)[index].view_as(x).masked_fill(~active, 0.0)


def straight_through(segment: Tensor, token: Tensor) -> Tensor:
    """The value of the segment's log-ratio with the gradient of the token's: ``sg[segment] + token - sg[token]``.

    GSPO's token form, Zheng et al. 2025 (arXiv 2507.18071, eq. 14), as logarithms.
    """
    return segment.detach() + token - token.detach()


def row_segments(mask: Tensor) -> Tensor:
    """Each row a segment.

    Example::

        row_segments(tensor([[True, True], [True, False]]))  # [[0, 0], [1, 1]]
    """
    check_mask("row_segments", mask)
    return torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)


def turn_segments(action_turn_index: Tensor) -> Tensor:
    """Each turn of each row a segment; what stands between two turns is one, too, with a negative number.

    No segment spans two rows: a split into micro-batches would change its mean otherwise.

    Args:
        action_turn_index: ``[batch, time]`` integers, the turn of an agent token and -1 for all others.

    Example::

        turn_segments(tensor([[0, 0, -1, 1], [0, -1, -1, -1]]))  # [[0, 0, -1, 1], [2, -2, -2, -2]]
    """
    check_integers("turn_segments", "action_turn_index", action_turn_index)
    turns = int(action_turn_index.max()) + 1 if action_turn_index.numel() else 0
    row = torch.arange(len(action_turn_index), device=action_turn_index.device)[:, None]
    between = action_turn_index < 0
    begins = between & ~torch.cat([torch.zeros_like(between[:, :1]), between[:, :-1]], dim=1)
    numbers = begins.flatten().long().cumsum(0).view_as(between)
    return torch.where(between, -numbers, row * turns + action_turn_index)


def check_clip(eps_low: float, eps_high: float, dual_clip: float | None) -> None:
    """
    Raises:
        ValueError: a bound is out of range.
    """
    if not (0.0 <= eps_low <= 1.0 and eps_high >= 0.0):
        raise ValueError(f"eps_low must lie in [0, 1] and eps_high be at least 0, got {eps_low} and {eps_high}")
    if dual_clip is not None:
        check_positive("clip", dual_clip=dual_clip)
        if dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be larger than 1 or None, got {dual_clip}")
