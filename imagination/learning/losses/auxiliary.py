"""Losses that may be added to that of the policy: KL to a reference, an entropy bonus, the error of the critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from imagination.learning.losses.terms import LossTerms, difference, weighted_sum
from imagination.learning.shapes import at_least_fp32, check_shapes

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


@dataclass(frozen=True, slots=True)
class EntropyHistory:
    """Mean entropy over the updates so far, in nats per token; ``None`` before the first.

    Example::

        EntropyHistory().add(2.0).add(1.0).mean  # 1.5
    """

    total: float = 0.0
    updates: int = 0

    @property
    def mean(self) -> float | None:
        return self.total / self.updates if self.updates else None

    def add(self, entropy: float) -> EntropyHistory:
        """The history after one more update of this mean entropy."""
        return EntropyHistory(self.total + entropy, self.updates + 1)


def entropy_loss(
    entropy: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    coef: float,
    history: float | None = None,
    smoothing: float = 0.0,
    low: float = 0.8,
    high: float = 1.2,
) -> LossTerms:
    """``-coef (H - smoothing P)``, where ``P`` is how far each token's entropy lies outside a band.

    Entropy-regularised policy optimisation (EPO, arXiv 2509.22576). The band is ``(low, high)`` times the mean entropy
    of earlier updates. With a constant penalty outside the band, as released, the gradient of ``P`` is zero and the
    smoothing does nothing; here it is a hinge,

        ``P_t = max(low h - H_t, 0) + max(H_t - high h, 0)``,

    with slope -1 below the band and +1 above. The numbers of the band are this project's choice.

    Args:
        entropy: ``[batch, time]`` with a gradient, nats, as ``token_entropy`` gives it; anything where the weight is 0.
        weight: ``[batch, time]``, 0 on every token that RL does not train.
        denominator: weight of the global batch.
        coef: of the entropy, at least 0.
        history: mean entropy of earlier updates, a constant; ``None`` for none, then ``P`` is 0.
        smoothing: of the penalty, at least 0; 0 for the plain entropy bonus.
        low, high: the band, ``low <= 1 <= high``.

    Returns:
        sums ``entropy``, ``entropy_penalty`` and ``outside_fraction``, unweighted; no maxima.

    Raises:
        ValueError: shapes disagree, or a number is outside its range.

    Example::

        entropy_loss(tensor([0.5, 2.0]), tensor([1.0, 1.0]), denominator=2, coef=0.1, history=1.0, smoothing=1.0)
        # H = 1.25, P = (0.3 + 0.8) / 2 = 0.55: loss -0.07
    """
    check_shapes("entropy_loss", entropy=entropy, weight=weight)
    if coef < 0.0 or smoothing < 0.0:
        raise ValueError(f"coef and smoothing must be at least 0, got {coef} and {smoothing}")
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"the band must be low <= 1 <= high, got {low} and {high}")
    active = weight != 0
    entropy = at_least_fp32(entropy).masked_fill(~active, 0.0)
    penalty = entropy.new_zeros(entropy.shape)
    if history is not None:
        below, above = (low * history - entropy).clamp(min=0.0), (entropy - high * history).clamp(min=0.0)
        penalty = (below + above).masked_fill(~active, 0.0)
    return LossTerms(
        loss=weighted_sum(-coef * (entropy - smoothing * penalty), weight, denominator),
        tokens=active.sum().to(entropy.dtype),
        sums={
            "entropy": entropy.detach().sum(),
            "entropy_penalty": penalty.detach().sum(),
            "outside_fraction": (penalty > 0).sum().to(entropy.dtype),
        },
        maxima={},
    )


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
