"""Losses of the policy: REINFORCE, CISPO, and PPO's clip with ratios of tokens, turns or sequences.

Segments are integers, equal within a turn or a sequence and different between any two of the batch, of rows too. They
travel with the tokens, so rows may be padded, packed, or given as the list ``[n]`` of trained tokens; only a
micro-batch must not cut through a segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from imagination.learning.losses.auxiliary import k3_of
from imagination.learning.losses.terms import LossTerms, constant, difference, largest, weighted_sum
from imagination.learning.shapes import at_least_fp32, check_integers, check_mask, check_positive, check_shapes

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
    _check(
        "ppo_clip_loss",
        importance,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        weight=weight,
    )
    active = weight != 0
    log_ratio = token_log_ratio(logprobs, behavior_logprobs, active, log_ratio_clamp)
    return _clipped(log_ratio, advantages, weight, denominator, importance, _Clip(eps_low, eps_high, dual_clip))


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
        sequences: integers of their shape, equal within an episode, see ``row_segments``.
        token_form: the gradient of the token instead of that of the sequence.

    Returns:
        as ``ppo_clip_loss``; ``ratio`` is that of the sequence.

    Raises:
        ValueError: shapes disagree, or a number is outside its range.

    Example::

        now, old, ones, row = tensor([log(2.0), 0.0]), tensor([0.0, 0.0]), tensor([1.0, 1.0]), tensor([0, 0])
        gspo_loss(now, old, ones, ones, row, denominator=2, eps_high=1.0)  # loss -1.414: the geometric mean of 2 and 1
    """
    _check(
        "gspo_loss",
        importance,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        weight=weight,
    )
    active = weight != 0
    token = token_log_ratio(logprobs, behavior_logprobs, active)
    log_ratio = segment_mean(token, active, sequences)
    if token_form:
        log_ratio = straight_through(log_ratio, token)
    return _clipped(log_ratio, advantages, weight, denominator, importance, _Clip(eps_low, eps_high, None))


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
        turns: integers of their shape, equal within a turn, see ``turn_segments``.
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
    _check(
        "turn_ratio_loss",
        importance,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        weight=weight,
    )
    active = weight != 0
    log_ratio = segment_mean(token_log_ratio(logprobs, behavior_logprobs, active), active, turns)
    if not correct_bias:
        return _clipped(log_ratio, advantages, weight, denominator, importance, _Clip(eps_low, eps_high, dual_clip))
    check_clip(eps_low, eps_high, dual_clip)
    ratio = log_ratio.detach().exp()
    correction = 1.0 / (1.0 + (ratio - ratio.clamp(1.0 - eps_low, 1.0 + eps_high)).abs())
    scale = correction if importance is None else correction * constant(importance, active)
    terms = _clipped(log_ratio, advantages, weight, denominator, scale, _Clip(eps_low, eps_high, dual_clip))
    weighed = correction.masked_fill(~active, 0.0).sum()
    return LossTerms(terms.loss, terms.tokens, {**terms.sums, "bias_weight": weighed}, terms.maxima)


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
    _check("reinforce_loss", importance, logprobs=logprobs, advantages=advantages, weight=weight)
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
    _check(
        "cispo_loss",
        importance,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        weight=weight,
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


class _Clip(NamedTuple):
    """The range of the ratio around 1, and the bound of the loss where the advantage is negative."""

    low: float
    high: float
    dual: float | None


def _clipped(
    log_ratio: Tensor, advantages: Tensor, weight: Tensor, denominator: float, importance: Tensor | None, clip: _Clip
) -> LossTerms:
    """The surrogate of log-ratios that are exactly 0 where the weight is."""
    check_clip(*clip)
    active = weight != 0
    advantages = constant(advantages, active).to(log_ratio.dtype)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    per_token = torch.maximum(free, clipped)
    dual_clipped = torch.zeros_like(active)
    if clip.dual is not None:
        ceiling = -clip.dual * advantages
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


def _check(where: str, importance: Tensor | None, **tensors: Tensor) -> None:
    check_shapes(where, **tensors, importance=tensors["weight"] if importance is None else importance)


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
