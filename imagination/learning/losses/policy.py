"""Losses of the policy: REINFORCE, CISPO, PPO's clip with ratios of tokens, turns or sequences, and replays.

Segments are integers, equal within a turn or a sequence and different between any two of the batch, of rows too. They
travel with the tokens, so rows may be padded, packed, or given as the list ``[n]`` of trained tokens; only a
micro-batch must not cut through a segment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from imagination.learning.losses.auxiliary import k3_of
from imagination.learning.losses.terms import LossTerms, constant, difference, largest, loss_terms
from imagination.learning.shapes import at_least_fp32, check_integers, check_mask, check_positive, check_shapes


class Clip(NamedTuple):
    """The range of the ratio around 1 in which it has a gradient.

    Attributes:
        dual_clip: bound of the loss where the advantage is negative, in units of it; larger than 1, or ``None``.
        log_ratio_clamp: bound of the log-ratio, in nats, which keeps ``exp`` finite.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = 3.0
    log_ratio_clamp: float = 20.0


class SequenceClip(NamedTuple):
    """GSPO's range, and whether a token has the gradient of its own ratio.

    A geometric mean over hundreds of tokens hardly leaves 1, so it is small; short episodes need more.
    """

    eps_low: float = 3e-4
    eps_high: float = 4e-4
    token_form: bool = False


# --- ratios and segments ---


def token_log_ratio(logprobs: Tensor, behavior_logprobs: Tensor, active: Tensor, clamp: float = 20.0) -> Tensor:
    """``logprobs - behavior_logprobs`` of each active token, bounded, exactly 0 elsewhere; gradient to the first only.

    Raises:
        ValueError: ``clamp`` is not positive.
    """
    if clamp <= 0.0:
        raise ValueError(f"log_ratio_clamp must be positive, got {clamp}")
    return difference(logprobs, behavior_logprobs.detach(), active).clamp(-clamp, clamp)


def segment_mean(x: Tensor, active: Tensor, segments: Tensor) -> Tensor:
    """Mean of ``x`` over the active tokens of each segment, given to each of them; exactly 0 where not active.

    Of log-ratios this is the log of the geometric mean of the ratios: the length does not enter, so a long episode's
    ratio neither explodes nor vanishes. The gradient flows through.

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


# --- clipped ratios ---


def ppo_clip_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    **clip: Any,
) -> LossTerms:
    """PPO's clipped surrogate, one ratio per token.

    With ``rho = exp(clamp(logprobs - behavior_logprobs))``: ``max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high))``,
    Schulman et al. 2017 (arXiv 1707.06347, eq. 7), two-sided range from DAPO (arXiv 2503.14476, section 3.1). Where
    ``A < 0`` it is at most ``-dual_clip A`` (dual clip, arXiv 1912.09729), so that one token whose ratio
    exploded cannot dominate the step.

    Args:
        behavior_logprobs: of the policy that acted. Where engine and trainer compute differently they are the
            trainer's own, of the policy before the update.
        importance: factor of each token's loss that corrects for the engine (``engine_mismatch.py``); ``None`` for 1.
        clip: see ``Clip``.

    Returns:
        sums ``clip_fraction`` (the clipped branch won), ``dual_clip_fraction``, ``kl_k3`` (KL(behaviour || policy), k3,
        nats), ``ratio``; maxima ``ratio``.

    Example::

        ppo_clip_loss(tensor([[log(1.5)]]), tensor([[0.0]]), tensor([[1.0]]), tensor([[1.0]]), denominator=1)
        # loss -1.2: the ratio 1.5 is worth no more than 1.2
    """
    bounds = Clip(**clip)
    _check("ppo_clip_loss", logprobs, behavior_logprobs, advantages, weight, importance)
    log_ratio = token_log_ratio(logprobs, behavior_logprobs, weight != 0, bounds.log_ratio_clamp)
    return _clipped(log_ratio, advantages, weight, denominator, importance, bounds)


def gspo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    sequences: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    **clip: Any,
) -> LossTerms:
    """GSPO: one ratio per sequence, ``s = exp(mean over agent tokens of the log-ratio)``.

    Zheng et al. 2025 (arXiv 2507.18071, eq. 5 to 7; the clip of section 5.1). The token form (eq. 13 and 14) has the
    value ``s`` with the gradient of each token's own ratio, which allows advantages that differ within the sequence.
    Where they do not, and tokens weigh ``1 / length`` (``sequence_mean``), both have the same value and gradient.

    Args:
        sequences: integers, equal within an episode, see ``row_segments``.
        clip: see ``SequenceClip``; all else as in ``ppo_clip_loss``.

    Returns:
        as ``ppo_clip_loss``; ``ratio`` is that of the sequence.

    Example::

        now, old, ones, row = tensor([log(2.0), 0.0]), tensor([0.0, 0.0]), tensor([1.0, 1.0]), tensor([0, 0])
        gspo_loss(now, old, ones, ones, row, denominator=2, eps_high=1.0)  # loss -1.414: the geometric mean of 2 and 1
    """
    eps_low, eps_high, token_form = SequenceClip(**clip)
    _check("gspo_loss", logprobs, behavior_logprobs, advantages, weight, importance)
    token = token_log_ratio(logprobs, behavior_logprobs, weight != 0)
    log_ratio = segment_mean(token, weight != 0, sequences)
    if token_form:
        log_ratio = log_ratio.detach() + token - token.detach()
    return _clipped(log_ratio, advantages, weight, denominator, importance, Clip(eps_low, eps_high, None))


def turn_ratio_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    turns: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    **clip: Any,
) -> LossTerms:
    """Turn-PPO and ST-PPO: one ratio per turn, the geometric mean of the ratios of its tokens.

    Li et al. 2025 (arXiv 2511.20718): an agent acts by turns, so the clip judges turns. ST-PPO adds a correction of the
    clip's bias that down-weights strongly off-policy samples by the norm of that bias. The paper's normaliser could not
    be verified; the one chosen here is a constant factor per turn,

        ``c = 1 / (1 + |rho - clip(rho, 1 - eps_low, 1 + eps_high)|)``,

    1 inside the clip's range and falling with the distance from it. It depends on the turn alone and on no norm over
    the batch, so a split into micro-batches does not change the gradient.

    Args:
        turns: integers, equal within a turn, see ``turn_segments``.
        clip: see ``Clip``; and ``correct_bias``, true by default (ST-PPO). All else as in ``ppo_clip_loss``.

    Returns:
        as ``ppo_clip_loss``, ``ratio`` being the turn's; with the correction also the sum ``bias_weight``.

    Example::

        now, old, turn, ones = tensor([log(4.0), 0.0]), tensor([0.0, 0.0]), tensor([3, 3]), tensor([1.0, 1.0])
        turn_ratio_loss(now, old, -ones, ones, turn, denominator=2, correct_bias=False)  # loss 2: sqrt(4 * 1)
        turn_ratio_loss(now, old, -ones, ones, turn, denominator=2)  # loss 1.111 = 2 / (1 + 0.8)
    """
    correct_bias, bounds = clip.pop("correct_bias", True), Clip(**clip)
    _check("turn_ratio_loss", logprobs, behavior_logprobs, advantages, weight, importance)
    active = weight != 0
    log_ratio = segment_mean(token_log_ratio(logprobs, behavior_logprobs, active), active, turns)
    if not correct_bias:
        return _clipped(log_ratio, advantages, weight, denominator, importance, bounds)
    ratio = log_ratio.detach().exp()
    correction = 1.0 / (1.0 + (ratio - ratio.clamp(1.0 - bounds.eps_low, 1.0 + bounds.eps_high)).abs())
    scale = correction if importance is None else correction * constant(importance, active)
    clipped = _clipped(log_ratio, advantages, weight, denominator, scale, bounds)
    return replace(clipped, sums={**clipped.sums, "bias_weight": correction.masked_fill(~active, 0.0).sum()})


def replay_loss(
    logprobs: Tensor,
    recorded_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    clip_high: float = 0.2,
) -> LossTerms:
    """Self-imitation in its off-policy form: PPO's clip around the policy that played the episode.

    SPEAR (arXiv 2509.22601): replayed episodes did better than the running median, so advantages are positive and only
    the upper clip binds: ``-A min(rho, 1 + clip_high)`` with ``rho = exp(logprobs - recorded_logprobs)``. The ratio is
    to the log-probs that were recorded when the tokens were sampled, several updates ago, never to the policy before
    this update, under which they were not sampled.

    Raises:
        ValueError: an advantage is negative: an episode to unlearn is not one to imitate.

    Example::

        replay_loss(tensor([log(0.6)]), tensor([log(0.3)]), tensor([0.5]), tensor([1.0]), denominator=1)
        # loss -0.6: the ratio 2 is worth no more than 1.2
    """
    if ((advantages < 0) & (weight != 0)).any():
        raise ValueError("replay_loss imitates: advantages must be at least 0 where the weight is not 0")
    # the lower bound never binds where advantages are positive
    clip: dict[str, Any] = {"eps_low": 1.0, "eps_high": clip_high, "dual_clip": None}
    return ppo_clip_loss(logprobs, recorded_logprobs, advantages, weight, denominator=denominator, **clip)


# --- the policy gradient ---


def reinforce_loss(
    logprobs: Tensor, advantages: Tensor, weight: Tensor, *, denominator: float, importance: Tensor | None = None
) -> LossTerms:
    """``-A log pi``: on-policy only (Williams 1992). A second step on the same tokens follows a wrong gradient.

    Returns:
        sums ``logprob``, unweighted.

    Example::

        reinforce_loss(tensor([-2.0]), tensor([0.5]), tensor([1.0]), denominator=1)  # loss 1.0
    """
    _check("reinforce_loss", logprobs, None, advantages, weight, importance)
    active = weight != 0
    logprobs = at_least_fp32(logprobs).masked_fill(~active, 0.0)
    per_token = -constant(advantages, active) * logprobs
    if importance is not None:
        per_token = per_token * constant(importance, active)
    return loss_terms(per_token, weight, denominator, {"logprob": logprobs})


class _WeightClip(NamedTuple):
    lowest: float = 0.0
    highest: float = 5.0


def cispo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    **bounds: float,
) -> LossTerms:
    """CISPO: ``-sg[clip(rho, lowest, highest)] A log pi``; the weight is clipped, no token loses its gradient.

    MiniMax 2025 (arXiv 2506.13585, eq. 4 and 5). ``lowest = 0`` means no lower bound, as in the paper; implementations
    differ in the upper one (SkyRL takes 5.0, verl ``1 + eps`` and a lower bound of ``1 - eps``).

    Args:
        bounds: ``lowest`` (0) and ``highest`` (5), of the ratio itself, not distances from 1; all else as in
            ``ppo_clip_loss``.

    Returns:
        sums ``clip_fraction`` (the ratio was outside), ``kl_k1`` (KL(behaviour || policy), nats) and ``ratio``, the
        unclipped one; maxima ``ratio``.

    Example::

        cispo_loss(tensor([log(0.6)]), tensor([log(0.1)]), tensor([1.0]), tensor([1.0]), denominator=1)
        # the ratio 6 counts as 5: loss 2.554 = -5 log(0.6), slope -5
    """
    lowest, highest = _WeightClip(**bounds)
    _check("cispo_loss", logprobs, behavior_logprobs, advantages, weight, importance)
    if not 0.0 <= lowest <= 1.0 <= highest:
        raise ValueError(f"lowest must lie in [0, 1] and highest be at least 1, got {lowest} and {highest}")
    active = weight != 0
    log_ratio = token_log_ratio(logprobs, behavior_logprobs, active).detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(lowest, highest)
    factor = clipped if importance is None else clipped * constant(importance, active)
    terms = reinforce_loss(logprobs, advantages, weight, denominator=denominator, importance=factor)
    ratios = ratio.masked_fill(~active, 0.0)
    sums = {
        "clip_fraction": ((clipped != ratio) & active).sum().to(ratio.dtype),
        "kl_k1": -log_ratio.sum(),
        "ratio": ratios.sum(),
    }
    return LossTerms(terms.loss, terms.tokens, sums, {"ratio": largest(ratios)})


def _clipped(
    log_ratio: Tensor, advantages: Tensor, weight: Tensor, denominator: float, importance: Tensor | None, clip: Clip
) -> LossTerms:
    """The surrogate of log-ratios that are exactly 0 where the weight is."""
    if not (0.0 <= clip.eps_low <= 1.0 and clip.eps_high >= 0.0):
        raise ValueError(
            f"eps_low must lie in [0, 1] and eps_high be at least 0, got {clip.eps_low} and {clip.eps_high}"
        )
    if clip.dual_clip is not None:
        check_positive("clip", dual_clip=clip.dual_clip)
        if clip.dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be larger than 1 or None, got {clip.dual_clip}")
    active = weight != 0
    advantages = constant(advantages, active).to(log_ratio.dtype)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.eps_low, 1.0 + clip.eps_high)
    per_token = torch.maximum(free, clipped)
    dual_clipped = torch.zeros_like(active)
    if clip.dual_clip is not None:
        ceiling = -clip.dual_clip * advantages
        dual_clipped = (advantages < 0) & (per_token > ceiling)
        per_token = torch.where(dual_clipped, ceiling, per_token)
    if importance is not None:
        per_token = per_token * constant(importance, active).to(per_token.dtype)
    ratios = ratio.detach().masked_fill(~active, 0.0)
    sums = {
        "clip_fraction": clipped > free,
        "dual_clip_fraction": dual_clipped,
        "kl_k3": k3_of(-log_ratio.detach()),
        "ratio": ratios,
    }
    return loss_terms(per_token, weight, denominator, sums, {"ratio": largest(ratios)})


def _check(
    where: str,
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    advantages: Tensor,
    weight: Tensor,
    importance: Tensor | None,
) -> None:
    check_shapes(
        where,
        logprobs=logprobs,
        behavior_logprobs=logprobs if behavior_logprobs is None else behavior_logprobs,
        advantages=advantages,
        weight=weight,
        importance=weight if importance is None else importance,
    )
