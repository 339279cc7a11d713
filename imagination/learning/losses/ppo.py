"""PPO's clipped surrogate, with ratios of tokens, turns or sequences. DAPO is it with a higher upper clip."""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.losses.kl import k3_of
from imagination.learning.losses.ratios import check_clip, segment_mean, straight_through, token_log_ratio
from imagination.learning.losses.terms import LossTerms, constant, largest, weighted_sum
from imagination.learning.shapes import check_shapes


def ppo_clip_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
    log_ratio_clamp: float = 20.0,
) -> LossTerms:
    """PPO's clipped surrogate, one ratio per token.

    With ``rho = exp(clamp(logprobs - behavior_logprobs))``: ``max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high))``,
    Schulman et al. 2017 (arXiv 1707.06347, eq. 7), two-sided range from DAPO (arXiv 2503.14476, section 3.1). Where
    ``A < 0`` it is at most ``-dual_clip A`` (dual clip, arXiv 1912.09729), so that one token whose ratio
    exploded cannot dominate the step.

    ``behavior_logprobs`` were taken by the engine at its sampling temperature T. ``logprobs`` must be taken at the same
    T (``token_logprobs``), or ratios of an unchanged policy are not 1. Where engine and trainer compute differently
    they are the trainer's own, of the policy before the update, and ``importance`` corrects for the engine
    (``imagination/learning/engine_mismatch.py``).

    Args:
        logprobs: ``[batch, time]``, natural log, of the policy that is trained.
        behavior_logprobs: ``[batch, time]``, of the policy that acted; constants.
        advantages: ``[batch, time]``; constants.
        weight: ``[batch, time]``, 0 on every token that RL does not train.
        denominator: weight (usually the number of trained tokens) of the global batch.
        importance: ``[batch, time]``, a constant factor of each token's loss; ``None`` for 1.
        eps_low, eps_high: the range in which the ratio has a gradient, around 1.
        dual_clip: larger than 1, or ``None`` for none.
        log_ratio_clamp: bound of the log-ratio, in nats, against overflow.

    Returns:
        sums ``clip_fraction`` (the clipped branch won), ``dual_clip_fraction``, ``kl_k3`` (KL(behaviour || policy), k3,
        nats), ``ratio``; maxima ``ratio``.

    Raises:
        ValueError: shapes disagree, or a number is outside its range.

    Example::

        ppo_clip_loss(tensor([[log(1.5)]]), tensor([[0.0]]), tensor([[1.0]]), tensor([[1.0]]), denominator=1)
        # loss -1.2: the ratio 1.5 is worth no more than 1.2
    """
    _check("ppo_clip_loss", logprobs, behavior_logprobs, advantages, weight, importance)
    active = weight != 0
    log_ratio = token_log_ratio(logprobs, behavior_logprobs, active, log_ratio_clamp)
    return _clipped(log_ratio, advantages, weight, denominator, importance, eps_low, eps_high, dual_clip)


def gspo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    sequences: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    token_form: bool = False,
) -> LossTerms:
    """GSPO: one ratio per sequence, ``s = exp(mean over agent tokens of the log-ratio)``.

    Zheng et al. 2025 (arXiv 2507.18071, eq. 5 to 7; the clip of section 5.1). The token form (eq. 13 and 14) has the
    value ``s`` with the gradient of each token's own ratio, which allows advantages that differ within the sequence.
    Where they do not, and tokens weigh ``1 / length`` (``sequence_mean``), both have the same value and gradient.

    Args:
        logprobs, behavior_logprobs, advantages, weight, denominator, importance, eps_low, eps_high: as in
            ``ppo_clip_loss``; the mean runs over tokens of weight other than 0.
        sequences: integers of their shape, equal within an episode, see ``ratios.py``.
        token_form: the gradient of the token instead of that of the sequence.

    Returns:
        as ``ppo_clip_loss``; ``ratio`` is that of the sequence.

    Raises:
        ValueError: shapes disagree, or a number is outside its range.

    Example::

        now, old, ones, row = tensor([log(2.0), 0.0]), tensor([0.0, 0.0]), tensor([1.0, 1.0]), tensor([0, 0])
        gspo_loss(now, old, ones, ones, row, denominator=2, eps_high=1.0)  # loss -1.414: the geometric mean of 2 and 1
    """
    _check("gspo_loss", logprobs, behavior_logprobs, advantages, weight, importance)
    active = weight != 0
    token = token_log_ratio(logprobs, behavior_logprobs, active)
    log_ratio = segment_mean(token, active, sequences)
    if token_form:
        log_ratio = straight_through(log_ratio, token)
    return _clipped(log_ratio, advantages, weight, denominator, importance, eps_low, eps_high, None)


def turn_ratio_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    turns: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
    correct_bias: bool = True,
) -> LossTerms:
    """Turn-PPO and ST-PPO: one ratio per turn, the geometric mean of the ratios of its tokens.

    Li et al. 2025 (arXiv 2511.20718): an agent acts by turns, so the clip judges turns. ST-PPO adds a correction of the
    clip's bias that down-weights strongly off-policy samples by the norm of that bias. The paper's normaliser could not
    be verified; the one chosen here is a constant factor per turn,

        ``c = 1 / (1 + |rho - clip(rho, 1 - eps_low, 1 + eps_high)|)``,

    1 inside the clip's range and falling with the distance from it. It depends on the turn alone and on no norm over
    the batch, so a split into micro-batches does not change the gradient.

    Args:
        logprobs, behavior_logprobs, advantages, weight, denominator, importance, eps_low, eps_high, dual_clip: as in
            ``ppo_clip_loss``.
        turns: integers of their shape, equal within a turn, see ``ratios.py``.
        correct_bias: ST-PPO; without it, Turn-PPO.

    Returns:
        as ``ppo_clip_loss``, ``ratio`` being the turn's; with the correction also the sum ``bias_weight``.

    Raises:
        ValueError: shapes disagree, or a number is outside its range.

    Example::

        now, old, turn, ones = tensor([log(4.0), 0.0]), tensor([0.0, 0.0]), tensor([3, 3]), tensor([1.0, 1.0])
        turn_ratio_loss(now, old, -ones, ones, turn, denominator=2, correct_bias=False)  # loss 2: sqrt(4 * 1)
        turn_ratio_loss(now, old, -ones, ones, turn, denominator=2)  # loss 1.111 = 2 / (1 + 0.8)
    """
    _check("turn_ratio_loss", logprobs, behavior_logprobs, advantages, weight, importance)
    active = weight != 0
    log_ratio = segment_mean(token_log_ratio(logprobs, behavior_logprobs, active), active, turns)
    if not correct_bias:
        return _clipped(log_ratio, advantages, weight, denominator, importance, eps_low, eps_high, dual_clip)
    check_clip(eps_low, eps_high, dual_clip)
    ratio = log_ratio.detach().exp()
    correction = 1.0 / (1.0 + (ratio - ratio.clamp(1.0 - eps_low, 1.0 + eps_high)).abs())
    scale = correction if importance is None else correction * constant(importance, active)
    terms = _clipped(log_ratio, advantages, weight, denominator, scale, eps_low, eps_high, dual_clip)
    weighed = correction.masked_fill(~active, 0.0).sum()
    return LossTerms(terms.loss, terms.tokens, {**terms.sums, "bias_weight": weighed}, terms.maxima)


def _clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    weight: Tensor,
    denominator: float,
    importance: Tensor | None,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> LossTerms:
    """The surrogate of log-ratios that are exactly 0 where the weight is."""
    check_clip(eps_low, eps_high, dual_clip)
    active = weight != 0
    advantages = constant(advantages, active).to(log_ratio.dtype)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    per_token = torch.maximum(free, clipped)
    dual_clipped = torch.zeros_like(active)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (per_token > ceiling)
        per_token = torch.where(dual_clipped, ceiling, per_token)
    if importance is not None:
        per_token = per_token * constant(importance, active).to(per_token.dtype)
    ratio = ratio.detach()
    return LossTerms(
        loss=weighted_sum(per_token, weight, denominator),
        tokens=active.sum().to(ratio.dtype),
        sums={
            "clip_fraction": (clipped > free).sum().to(ratio.dtype),
            "dual_clip_fraction": dual_clipped.sum().to(ratio.dtype),
            "kl_k3": k3_of(-log_ratio.detach()).sum(),
            "ratio": ratio.masked_fill(~active, 0.0).sum(),
        },
        maxima={"ratio": largest(ratio.masked_fill(~active, 0.0))},
    )


def _check(
    where: str,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    importance: Tensor | None,
) -> None:
    check_shapes(
        where,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        weight=weight,
        importance=weight if importance is None else importance,
    )
