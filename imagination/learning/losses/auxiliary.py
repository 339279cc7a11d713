"""Losses beside that of the policy: KL to a reference, entropy, the critic's error, imitation, preferences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from imagination.learning.losses.terms import LossTerms, constant, difference, loss_terms
from imagination.learning.shapes import at_least_fp32, check_shapes
from imagination.settings.algorithm_parts import Critic, Entropy, Kl

# --- KL ---


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Per-token estimate ``d`` of KL(policy || reference), ``d = logprobs - ref_logprobs``, tokens sampled from policy.

    Estimators k1, k2, k3 of Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). k1 is
    unbiased and may be negative; as a loss its gradient is zero in expectation, so it serves logs and rewards only.
    All three give nats, exactly 0 where ``mask`` is false.

    Example::

        kl_k1(tensor([-1.0]), tensor([-1.5]))  # [0.5]; kl_k2 gives [0.125], kl_k3 gives [0.1065]
    """
    return _log_ratio("kl_k1", logprobs, ref_logprobs, mask)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """``d^2 / 2``: biased, never negative; as a loss its gradient is that of the KL. See ``kl_k1``."""
    return 0.5 * _log_ratio("kl_k2", logprobs, ref_logprobs, mask).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """``exp(-d) + d - 1``: unbiased, never negative; overflows to inf where ``d < -88``. See ``kl_k1``."""
    return k3_of(_log_ratio("kl_k3", logprobs, ref_logprobs, mask))


def k3_of(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d  # expm1 keeps the digits that exp(-d) - 1 loses where d is small


def _log_ratio(where: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    active = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    check_shapes(where, logprobs=logprobs, ref_logprobs=ref_logprobs, mask=active)
    return difference(logprobs, ref_logprobs, active)


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, weight: Tensor, kl: Kl, *, denominator: float) -> LossTerms:
    """KL to a frozen reference as a term of the loss, times its coefficient.

    k2 has the gradient of the KL of an on-policy batch, k3 that of GRPO (Shao et al. 2024, eq. 4). ``Kl`` refuses k1:
    its gradient is zero in expectation, so it would pull the policy nowhere.

    Returns:
        sums ``kl``, nats, unweighted.

    Example::

        half = Kl(kl_coef=0.5, kl_estimator="k2")
        kl_loss(tensor([-1.0]), tensor([-1.5]), tensor([1.0]), half, denominator=1)  # loss 0.0625 = 0.5 * 0.125
    """
    check_shapes("kl_loss", logprobs=logprobs, ref_logprobs=ref_logprobs, weight=weight)
    per_token = KL[kl.kl_estimator](logprobs, ref_logprobs.detach(), weight != 0)
    return loss_terms(per_token, weight, denominator, {"kl": per_token}).times(kl.kl_coef)


# --- entropy ---


@dataclass(frozen=True, slots=True)
class EntropyHistory:
    """Mean entropy over the updates so far, in nats per token; ``None`` before the first."""

    total: float = 0.0
    updates: int = 0

    @property
    def mean(self) -> float | None:
        return self.total / self.updates if self.updates else None

    def add(self, entropy: float) -> EntropyHistory:
        """The history after one more update of this mean entropy."""
        return EntropyHistory(self.total + entropy, self.updates + 1)


def entropy_loss(
    entropy: Tensor, weight: Tensor, settings: Entropy, *, denominator: float, history: float | None = None
) -> LossTerms:
    """``-coef (H - smoothing P)``, where ``P`` is how far each token's entropy lies outside a band.

    Entropy-regularised policy optimisation (EPO, arXiv 2509.22576). The band is ``(low, high)`` times the mean entropy
    of earlier updates. With a constant penalty outside the band, as released, the gradient of ``P`` is zero and the
    smoothing does nothing; here it is a hinge,

        ``P_t = max(low h - H_t, 0) + max(H_t - high h, 0)``,

    with slope -1 below the band and +1 above. The numbers of the band are this project's choice.

    Args:
        entropy: with a gradient, nats, as ``token_entropy`` gives it; anything where the weight is 0.
        history: ``h``, mean entropy of earlier updates; ``None`` for none, then ``P`` is 0.

    Returns:
        sums ``entropy``, ``entropy_penalty`` and ``outside_fraction``, unweighted.

    Example::

        epo = Entropy(entropy_coef=0.1, entropy_smoothing=1.0)
        entropy_loss(tensor([0.5, 2.0]), tensor([1.0, 1.0]), epo, denominator=2, history=1.0)
        # H = 1.25, P = (0.3 + 0.8) / 2 = 0.55: loss -0.07
    """
    check_shapes("entropy_loss", entropy=entropy, weight=weight)
    active = weight != 0
    entropy = at_least_fp32(entropy).masked_fill(~active, 0.0)
    penalty = entropy.new_zeros(entropy.shape)
    if history is not None:
        below = (settings.entropy_low * history - entropy).clamp(min=0.0)
        above = (entropy - settings.entropy_high * history).clamp(min=0.0)
        penalty = (below + above).masked_fill(~active, 0.0)
    sums = {"entropy": entropy, "entropy_penalty": penalty, "outside_fraction": penalty > 0}
    per_token = -settings.entropy_coef * (entropy - settings.entropy_smoothing * penalty)
    return loss_terms(per_token, weight, denominator, sums)


# --- the critic ---


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, critic: Critic, *, denominator: float
) -> LossTerms:
    """The critic's squared error, pessimistic about steps larger than ``value_clip``, times its coefficient.

    ``1/2 max((v - R)^2, (v_old + clamp(v - v_old, -clip, clip) - R)^2)`` as in OpenAI baselines ``ppo2/model.py``.

    Args:
        values, old_values, returns: in units of return; only the first has a gradient.
        mask: bool, the tokens that have a target.
        denominator: number of such tokens in the global batch.

    Returns:
        sums ``clip_fraction`` and ``squared_error`` (without the 1/2 and the clip).

    Example::

        critic = Critic(value_coef=0.5, value_clip=0.2)
        value_loss(tensor([[1.0]]), tensor([[0.0]]), tensor([[1.0]]), tensor([[True]]), critic, denominator=1)
        # loss 0.16 = 0.5 * 1/2 (0.2 - 1)^2: right, but reached in too large a step
    """
    check_shapes("value_loss", values=values, old_values=old_values, returns=returns, mask=mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"value_loss needs a bool mask, got {mask.dtype}")
    error = difference(values, returns.detach(), mask)
    squared = error.square()
    worst, clipped, clip = squared, torch.zeros_like(mask), critic.value_clip
    if clip is not None:
        step = difference(values, old_values.detach(), mask)
        # Within the clip the correction is exactly zero, so rounding makes no token look clipped.
        squared_clipped = (error + (step.clamp(-clip, clip) - step)).square()
        clipped = squared_clipped > squared
        worst = torch.maximum(squared, squared_clipped)
    sums = {"clip_fraction": clipped, "squared_error": squared}
    return loss_terms(0.5 * worst, mask, denominator, sums).times(critic.value_coef)


# --- imitation: an expert's tokens have no behaviour log-probs, so they never get an importance ratio ---


def cross_entropy_loss(logprobs: Tensor, weight: Tensor, *, denominator: float) -> LossTerms:
    """Negative log-likelihood at temperature 1: clones experts, fits world models.

    Returns:
        sums ``nll``, nats, unweighted.

    Example::

        cross_entropy_loss(tensor([[-1.0, -3.0, nan]]), tensor([[1.0, 0.5, 0.0]]), denominator=1.5)
        # loss 1.6667 = (1 + 0.5 * 3) / 1.5
    """
    check_shapes("cross_entropy_loss", logprobs=logprobs, weight=weight)
    nll = -at_least_fp32(logprobs).masked_fill(weight == 0, 0.0)
    return loss_terms(nll, weight, denominator, {"nll": nll})


def expert_policy_loss(
    logprobs: Tensor, advantages: Tensor, weight: Tensor, *, denominator: float, gamma: float = 0.1
) -> LossTerms:
    """Off-policy learning from expert tokens: ``-A f(pi)`` with ``f(pi) = pi / (pi + gamma)``, at temperature 1.

    LUFFY (Yan et al. 2025, arXiv 2504.14945, section 3.3). The expert's own probability is taken as 1, and the shaping
    gives unlikely tokens more gradient than ``-A pi`` would: the slope by the log-prob is
    ``-A gamma pi / (pi + gamma)^2``, largest at ``pi = gamma``.

    Returns:
        sums ``probability``, unweighted.

    Example::

        expert_policy_loss(tensor([log(0.3)]), tensor([1.0]), tensor([1.0]), denominator=1)  # loss -0.75 = -0.3 / 0.4
    """
    check_shapes("expert_policy_loss", logprobs=logprobs, advantages=advantages, weight=weight)
    if not gamma > 0.0:
        raise ValueError(f"expert_policy_loss: gamma must be positive, got {gamma}")
    active = weight != 0
    probability = at_least_fp32(logprobs).masked_fill(~active, 0.0).exp()
    shaped = probability / (probability + gamma)
    probabilities = {"probability": probability.masked_fill(~active, 0.0)}
    return loss_terms(-constant(advantages, active) * shaped, weight, denominator, probabilities)


# --- a process reward model, by which of two episodes was better ---


def trajectory_preference_loss(scores: Tensor, better: Tensor, worse: Tensor) -> LossTerms:
    """``-log sigmoid(score(better) - score(worse))``, the mean over pairs of episodes.

    The loss of iStar's process reward model (Liu et al. 2025, arXiv 2509.19199, section 3): DPO's (Rafailov et al.
    2023, arXiv 2305.18290, eq. 7) of whole episodes, with the policy that acted as the reference.

    Args:
        scores: ``[n]``, ``beta log(pi_prm / pi_old)`` of each episode: sums of ``implicit_step_rewards``.
        better, worse: indices ``[pairs]`` of ``preferences``; at least one pair.

    Returns:
        sums ``preferred``, the pairs whose order the scores have right.

    Example::

        trajectory_preference_loss(tensor([1.0, 0.0]), tensor([0]), tensor([1]))  # loss 0.3133 = log(1 + exp(-1))
    """
    check_shapes("trajectory_preference_loss", better=better, worse=worse)
    margin = at_least_fp32(scores)[better] - at_least_fp32(scores)[worse]
    return loss_terms(-logsigmoid(margin), torch.ones_like(margin), len(margin), {"preferred": margin > 0})
