"""How far the policy is from a reference: three estimators, and the loss that keeps it near."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from imagination.learning.losses.terms import LossTerms, difference, weighted_sum
from imagination.learning.shapes import check_shapes

Estimator = Literal["k1", "k2", "k3"]


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Per-token estimate ``d`` of KL(policy || reference), ``d = logprobs - ref_logprobs``, tokens sampled from policy.

    Estimators k1, k2, k3 of Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). k1 is
    unbiased and may be negative; as a loss its gradient is zero in expectation, so it serves logs and rewards only.
    All three take tensors of one shape and give that shape in nats, exactly 0 where ``mask`` is false.

    Raises:
        ValueError: shapes disagree.

    Example::

        kl_k1(tensor([-1.0]), tensor([-1.5]))  # [0.5]; kl_k2 gives [0.125], kl_k3 gives [0.1065]
    """
    return _masked_log_ratio("kl_k1", logprobs, ref_logprobs, mask)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """``d^2 / 2``: biased, never negative; as a loss its gradient is that of the KL. See ``kl_k1``."""
    return 0.5 * _masked_log_ratio("kl_k2", logprobs, ref_logprobs, mask).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """``exp(-d) + d - 1``: unbiased, never negative; overflows to inf where ``d < -88``. See ``kl_k1``."""
    return k3_of(_masked_log_ratio("kl_k3", logprobs, ref_logprobs, mask))


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, weight: Tensor, *, denominator: float, estimator: Estimator = "k3"
) -> LossTerms:
    """KL to a frozen reference as a term of the loss, to be multiplied by its coefficient.

    Args:
        logprobs: ``[batch, time]``, nats, of the policy that is trained.
        ref_logprobs: ``[batch, time]``, of the reference, at the same temperature; constants.
        weight: ``[batch, time]``, 0 on every token that RL does not train.
        denominator: weight of the global batch.
        estimator: k2 has the gradient of the KL of an on-policy batch, k3 that of GRPO (Shao et al. 2024, eq. 4).

    Returns:
        sums ``kl``, nats, unweighted; no maxima.

    Raises:
        ValueError: shapes disagree, or the estimator is k1, whose gradient as a loss is zero in expectation: it pulls
            the policy nowhere.

    Example::

        kl_loss(tensor([-1.0]), tensor([-1.5]), tensor([1.0]), denominator=1, estimator="k2")  # loss 0.125
    """
    if estimator == "k1":
        raise ValueError("k1 has no gradient in expectation as a loss: take k2 or k3, or k1 as a reward")
    if estimator not in ("k2", "k3"):
        raise ValueError(f"estimator must be k2 or k3, got {estimator!r}")
    check_shapes("kl_loss", logprobs=logprobs, ref_logprobs=ref_logprobs, weight=weight)
    active = weight != 0
    per_token = (kl_k2 if estimator == "k2" else kl_k3)(logprobs, ref_logprobs.detach(), active)
    return LossTerms(
        loss=weighted_sum(per_token, weight, denominator),
        tokens=active.sum().to(per_token.dtype),
        sums={"kl": per_token.detach().sum()},
        maxima={},
    )


def k3_of(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d  # expm1 keeps the digits that exp(-d) - 1 loses where d is small


def _masked_log_ratio(where: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    active = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    check_shapes(where, logprobs=logprobs, ref_logprobs=ref_logprobs, mask=active)
    return difference(logprobs, ref_logprobs, active)
