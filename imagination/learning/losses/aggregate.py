"""How tokens are averaged: weights and a denominator for the global batch, made once per optimiser step.

Every loss is ``sum of weight * token loss / denominator``. So an average is a choice of these two, and none depends
on how the batch is padded, packed or split.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from imagination.learning.shapes import check_mask

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@torch.no_grad()
def token_weights(mask: Tensor, aggregation: Aggregation, *, max_tokens: int | None = None) -> tuple[Tensor, float]:
    """Weights ``[batch, time]`` of a global batch of episodes, and the denominator of its losses.

    * ``token_mean`` (DAPO): all tokens weigh the same, so long episodes weigh more.
    * ``sequence_mean`` (GRPO, GSPO): the mean over episodes of the mean over tokens.
    * ``constant`` (Dr.GRPO, Liu et al. 2025, arXiv 2503.20783): the mean over episodes of the sum over tokens, divided
      by a constant length. A length bias neither for nor against long episodes.

    Args:
        mask: ``[batch, time]`` bool, trained tokens; a row is an episode. All rows of the optimiser step.
        aggregation: which average.
        max_tokens: the constant of ``constant``, the most agent tokens that an episode can have. It is a setting, never
            the longest of the batch: that would make the gradient depend on who is in the batch.

    Returns:
        ``(weights, denominator)``. Rows without a trained token count for nothing. The denominator is 0 where nothing
        is trained: leave the loss out.

    Raises:
        ValueError: ``mask`` is not bool, the name is unknown, or ``max_tokens`` is missing, given without use, or too
            small for an episode.

    Example::

        token_weights(tensor([[True, True], [True, False]]), "sequence_mean")  # [[0.5, 0.5], [1, 0]], 2
    """
    check_mask("token_weights", mask)
    if aggregation not in ("token_mean", "sequence_mean", "constant"):
        raise ValueError(f"aggregation must be token_mean, sequence_mean or constant, got {aggregation!r}")
    if (max_tokens is not None) != (aggregation == "constant"):
        raise ValueError("max_tokens belongs to aggregation=constant, and constant needs it")
    lengths = mask.sum(1)
    rows = float((lengths > 0).sum())
    weights = mask.float()
    if aggregation == "token_mean":
        return weights, float(lengths.sum())
    if aggregation == "sequence_mean":
        return weights / lengths.clamp(min=1)[:, None], rows
    assert max_tokens is not None
    if lengths.numel() and int(lengths.max()) > max_tokens:
        raise ValueError(f"an episode has {int(lengths.max())} agent tokens: set max_tokens to at least that")
    return weights, rows * max_tokens
