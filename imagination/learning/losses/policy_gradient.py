"""Policy gradients that do not clip the gradient away: REINFORCE and CISPO."""

from __future__ import annotations

from torch import Tensor

from imagination.learning.losses.ratios import token_log_ratio
from imagination.learning.losses.terms import LossTerms, constant, largest, weighted_sum
from imagination.learning.shapes import at_least_fp32, check_shapes


def reinforce_loss(
    logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
) -> LossTerms:
    """``-A log pi``: on-policy only (Williams 1992). A second step on the same tokens follows a wrong gradient.

    Args:
        logprobs: ``[batch, time]``, nats, of the policy that is trained, at the temperature it was sampled at.
        advantages: ``[batch, time]``; constants.
        weight: ``[batch, time]``, 0 on every token that RL does not train.
        denominator: weight of the global batch.
        importance: ``[batch, time]``, a constant factor of each token's loss; ``None`` for 1.

    Returns:
        sums ``logprob``, unweighted; no maxima.

    Raises:
        ValueError: shapes disagree or ``denominator`` is not positive.

    Example::

        reinforce_loss(tensor([-2.0]), tensor([0.5]), tensor([1.0]), denominator=1)  # loss 1.0
    """
    factor = weight if importance is None else importance
    check_shapes("reinforce_loss", logprobs=logprobs, advantages=advantages, weight=weight, importance=factor)
    active = weight != 0
    logprobs = at_least_fp32(logprobs).masked_fill(~active, 0.0)
    per_token = -constant(advantages, active) * logprobs
    if importance is not None:
        per_token = per_token * constant(importance, active)
    return LossTerms(
        loss=weighted_sum(per_token, weight, denominator),
        tokens=active.sum().to(per_token.dtype),
        sums={"logprob": logprobs.detach().sum()},
        maxima={},
    )


def cispo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    lowest: float = 0.0,
    highest: float = 5.0,
) -> LossTerms:
    """CISPO: ``-sg[clip(rho, lowest, highest)] A log pi``; the weight is clipped, no token loses its gradient.

    MiniMax 2025 (arXiv 2506.13585, eq. 4 and 5). ``lowest = 0`` means no lower bound, as in the paper; implementations
    differ in the upper one (SkyRL takes 5.0, verl ``1 + eps`` and a lower bound of ``1 - eps``).

    Args:
        logprobs, behavior_logprobs, advantages, weight, denominator, importance: as in ``ppo_clip_loss``.
        lowest, highest: bounds of the ratio itself, not distances from 1.

    Returns:
        sums ``clip_fraction`` (the ratio was outside), ``kl_k1`` (KL(behaviour || policy), nats) and ``ratio``, the
        unclipped one; maxima ``ratio``.

    Raises:
        ValueError: shapes disagree, or a number is outside its range.

    Example::

        cispo_loss(tensor([log(0.6)]), tensor([log(0.1)]), tensor([1.0]), tensor([1.0]), denominator=1)
        # the ratio 6 counts as 5: loss 2.554 = -5 log(0.6), slope -5
    """
    check_shapes(
        "cispo_loss",
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        weight=weight,
        importance=weight if importance is None else importance,
    )
    if not 0.0 <= lowest <= 1.0 <= highest:
        raise ValueError(f"lowest must lie in [0, 1] and highest be at least 1, got {lowest} and {highest}")
    active = weight != 0
    log_ratio = token_log_ratio(logprobs, behavior_logprobs, active).detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(lowest, highest)
    factor = clipped if importance is None else clipped * constant(importance, active)
    terms = reinforce_loss(logprobs, advantages, weight, denominator=denominator, importance=factor)
    return LossTerms(
        loss=terms.loss,
        tokens=terms.tokens,
        sums={
            "clip_fraction": ((clipped != ratio) & active).sum().to(ratio.dtype),
            "kl_k1": -log_ratio.sum(),
            "ratio": ratio.masked_fill(~active, 0.0).sum(),
        },
        maxima={"ratio": largest(ratio.masked_fill(~active, 0.0))},
    )
