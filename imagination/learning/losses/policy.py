"""Losses of the policy: REINFORCE, CISPO, PPO's clip with ratios of tokens, turns or sequences, and replays.

Segments are integers, equal within a turn or a sequence and different between any two of the batch, of rows too. They
travel with the tokens, so rows may be padded, packed, or given as the list ``[n]`` of trained tokens; only a
micro-batch must not cut through a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from imagination.learning.losses.auxiliary import cross_entropy_loss, k3_of, kl_k1, kl_k3
from imagination.learning.losses.terms import LossInputs, LossTerms, constant, difference, largest, loss_terms
from imagination.learning.shapes import at_least_fp32, check_integers, check_mask, check_shapes
from imagination.settings.algorithm_parts import (
    Imitate,
    LossPart,
    PolicyGradient,
    PpoClip,
    SequenceClip,
    TurnClip,
    WeightClip,
)

MAX_LOG_RATIO = 20.0  # nats; keeps ``exp`` finite
_INSTEAD = "an algorithm whose ratio is of tokens: this one's is of a segment, see row_segments and turn_segments"

# --- ratios and segments ---


def token_log_ratio(inputs: LossInputs) -> Tensor:
    """``logprobs - behavior_logprobs`` of each trained token, at most ``MAX_LOG_RATIO``, exactly 0 elsewhere."""
    log_ratio = difference(inputs.logprobs, inputs.behavior_logprobs.detach(), inputs.active)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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


def ppo_clip_loss(inputs: LossInputs, clip: PpoClip, denominator: float) -> LossTerms:
    """PPO's clipped surrogate, one ratio per token.

    With ``rho = exp(clamp(logprobs - behavior_logprobs))``: ``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))``,
    Schulman et al. 2017 (arXiv 1707.06347, eq. 7), two-sided range from DAPO (arXiv 2503.14476, section 3.1). Where
    ``A < 0`` it is at most ``-dual_clip A`` (dual clip, arXiv 1912.09729), so that one token whose ratio
    exploded cannot dominate the step.

    Returns:
        sums ``clip_fraction`` (the clipped branch won), ``dual_clip_fraction``, ``kl_k3`` (KL(behaviour || policy), k3,
        nats), ``ratio``; maxima ``ratio``.

    Example::

        inputs = LossInputs(tensor([log(1.5)]), tensor([0.0]), tensor([1.0]), tensor([1.0]))
        ppo_clip_loss(inputs, PpoClip(), denominator=1)  # loss -1.2: the ratio 1.5 is worth no more than 1.2
    """
    inputs.check_shapes("ppo_clip_loss")
    return _clipped(token_log_ratio(inputs), inputs, clip, denominator)


def gspo_loss(inputs: LossInputs, clip: SequenceClip, denominator: float) -> LossTerms:
    """GSPO: one ratio per sequence, ``s = exp(mean over agent tokens of the log-ratio)``.

    Zheng et al. 2025 (arXiv 2507.18071, eq. 5 to 7; the clip of section 5.1). The token form (eq. 13 and 14) has the
    value ``s`` with the gradient of each token's own ratio, which allows advantages that differ within the sequence.
    Where they do not, and tokens weigh ``1 / length`` (``sequence_mean``), both have the same value and gradient.

    Returns:
        as ``ppo_clip_loss``; ``ratio`` is that of the sequence.

    Example::

        now, old, ones, row = tensor([log(2.0), 0.0]), tensor([0.0, 0.0]), tensor([1.0, 1.0]), tensor([0, 0])
        gspo_loss(LossInputs(now, old, ones, ones, sequences=row), SequenceClip(clip_high=1.0), denominator=2)
        # loss -1.414: the geometric mean of 2 and 1
    """
    inputs.check_shapes("gspo_loss")
    token = token_log_ratio(inputs)
    log_ratio = segment_mean(token, inputs.active, inputs.given("sequences", _INSTEAD))
    if clip.token_form:
        log_ratio = log_ratio.detach() + token - token.detach()
    return _clipped(log_ratio, inputs, PpoClip(clip.clip_low, clip.clip_high, None), denominator)


def turn_ratio_loss(inputs: LossInputs, clip: TurnClip, denominator: float) -> LossTerms:
    """Turn-PPO and ST-PPO: one ratio per turn, the geometric mean of the ratios of its tokens.

    Li et al. 2025 (arXiv 2511.20718): an agent acts by turns, so the clip judges turns. ST-PPO adds a correction of the
    clip's bias that down-weights strongly off-policy samples by the norm of that bias. The paper's normaliser could not
    be verified; the one chosen here is a constant factor per turn,

        ``c = 1 / (1 + |rho - clip(rho, 1 - clip_low, 1 + clip_high)|)``,

    1 inside the clip's range and falling with the distance from it. It depends on the turn alone and on no norm over
    the batch, so a split into micro-batches does not change the gradient.

    Returns:
        as ``ppo_clip_loss``, ``ratio`` being the turn's; with the correction also the sum ``bias_weight``.

    Example::

        now, old, turn, ones = tensor([log(4.0), 0.0]), tensor([0.0, 0.0]), tensor([3, 3]), tensor([1.0, 1.0])
        inputs = LossInputs(now, old, -ones, ones, turns=turn)
        turn_ratio_loss(inputs, TurnClip(correct_bias=False), denominator=2)  # loss 2: sqrt(4 * 1)
        turn_ratio_loss(inputs, TurnClip(), denominator=2)  # loss 1.111 = 2 / (1 + 0.8)
    """
    inputs.check_shapes("turn_ratio_loss")
    log_ratio = segment_mean(token_log_ratio(inputs), inputs.active, inputs.given("turns", _INSTEAD))
    if not clip.correct_bias:
        return _clipped(log_ratio, inputs, clip, denominator)
    ratio = log_ratio.detach().exp()
    correction = 1.0 / (1.0 + (ratio - ratio.clamp(1.0 - clip.clip_low, 1.0 + clip.clip_high)).abs())
    clipped = _clipped(log_ratio, inputs.times_importance(correction), clip, denominator)
    bias_weight = correction.masked_fill(~inputs.active, 0.0).sum()
    return replace(clipped, sums={**clipped.sums, "bias_weight": bias_weight})


def replay_loss(inputs: LossInputs, clip_high: float, denominator: float) -> LossTerms:
    """Self-imitation in its off-policy form: PPO's clip around the policy that played the episode.

    SPEAR (arXiv 2509.22601): replayed episodes did better than the running median, so advantages are positive and only
    the upper clip binds: ``-A min(rho, 1 + clip_high)`` with ``rho = exp(logprobs - behavior_logprobs)``. The ratio is
    to the log-probs that were recorded when the tokens were sampled, several updates ago, never to the policy before
    this update, under which they were not sampled.

    Raises:
        ValueError: an advantage is negative: an episode to unlearn is not one to imitate.

    Example::

        inputs = LossInputs(tensor([log(0.6)]), tensor([log(0.3)]), tensor([0.5]), tensor([1.0]))
        replay_loss(inputs, clip_high=0.2, denominator=1)  # loss -0.6: the ratio 2 is worth no more than 1.2
    """
    if ((inputs.advantages < 0) & inputs.active).any():
        raise ValueError("replay_loss imitates: advantages must be at least 0 where the weight is not 0")
    # the lower bound never binds where advantages are positive
    return ppo_clip_loss(inputs, PpoClip(1.0, clip_high, None), denominator)


# --- the policy gradient ---


def reinforce_loss(inputs: LossInputs, part: PolicyGradient, denominator: float) -> LossTerms:
    """``-A log pi``: on-policy only (Williams 1992). A second step on the same tokens follows a wrong gradient.

    Returns:
        sums ``logprob``, unweighted.

    Example::

        inputs = LossInputs(tensor([-2.0]), tensor([-2.0]), tensor([0.5]), tensor([1.0]))
        reinforce_loss(inputs, PolicyGradient(), denominator=1)  # loss 1.0
    """
    inputs.check_shapes("reinforce_loss")
    logprobs = at_least_fp32(inputs.logprobs).masked_fill(~inputs.active, 0.0)
    per_token = -constant(inputs.advantages, inputs.active) * logprobs
    if inputs.importance is not None:
        per_token = per_token * constant(inputs.importance, inputs.active)
    return loss_terms(per_token, inputs.weight, denominator, {"logprob": logprobs})


def cispo_loss(inputs: LossInputs, clip: WeightClip, denominator: float) -> LossTerms:
    """CISPO: ``-sg[clip(rho, ratio_min, ratio_max)] A log pi``; the weight is clipped, no token loses its gradient.

    MiniMax 2025 (arXiv 2506.13585, eq. 4 and 5). ``ratio_min = 0`` means no lower bound, as in the paper;
    implementations differ in the upper one (SkyRL takes 5.0, verl ``1 + eps`` and a lower bound of ``1 - eps``).

    Returns:
        sums ``clip_fraction`` (the ratio was outside), ``kl_k1`` (KL(behaviour || policy), nats) and ``ratio``, the
        unclipped one; maxima ``ratio``.

    Example::

        inputs = LossInputs(tensor([log(0.6)]), tensor([log(0.1)]), tensor([1.0]), tensor([1.0]))
        cispo_loss(inputs, WeightClip(), denominator=1)  # the ratio 6 counts as 5: loss 2.554 = -5 log(0.6), slope -5
    """
    inputs.check_shapes("cispo_loss")
    log_ratio = token_log_ratio(inputs).detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(clip.ratio_min, clip.ratio_max)
    terms = reinforce_loss(inputs.times_importance(clipped), PolicyGradient(), denominator)
    ratios = ratio.masked_fill(~inputs.active, 0.0)
    sums = {
        "clip_fraction": ((clipped != ratio) & inputs.active).sum().to(ratio.dtype),
        "kl_k1": -log_ratio.sum(),
        "ratio": ratios.sum(),
    }
    return LossTerms(terms.loss, terms.tokens, sums, {"ratio": largest(ratios)})


# --- by the settings of an algorithm ---

POLICY_LOSSES: Mapping[type[LossPart], Callable[[LossInputs, Any, float], LossTerms]] = MappingProxyType(
    {
        PpoClip: ppo_clip_loss,
        SequenceClip: gspo_loss,
        TurnClip: turn_ratio_loss,
        WeightClip: cispo_loss,
        PolicyGradient: reinforce_loss,
        Imitate: lambda inputs, _, denominator: cross_entropy_loss(
            inputs.logprobs, inputs.weight, denominator=denominator
        ),
    }
)


def policy_loss(inputs: LossInputs, part: LossPart, denominator: float) -> LossTerms:
    """The loss that the settings of an algorithm name; ``ValueError`` where inputs lack what it reads."""
    return POLICY_LOSSES[type(part)](inputs, part, denominator)


def _clipped(log_ratio: Tensor, inputs: LossInputs, clip: PpoClip, denominator: float) -> LossTerms:
    """The surrogate of log-ratios that are exactly 0 where the weight is."""
    active = inputs.active
    advantages = constant(inputs.advantages, active).to(log_ratio.dtype)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.clip_low, 1.0 + clip.clip_high)
    per_token = torch.maximum(free, clipped)
    dual_clipped = torch.zeros_like(active)
    if clip.dual_clip is not None:
        ceiling = -clip.dual_clip * advantages
        dual_clipped = (advantages < 0) & (per_token > ceiling)
        per_token = torch.where(dual_clipped, ceiling, per_token)
    if inputs.importance is not None:
        per_token = per_token * constant(inputs.importance, active).to(per_token.dtype)
    ratios = ratio.detach().masked_fill(~active, 0.0)
    sums = {
        "clip_fraction": clipped > free,
        "dual_clip_fraction": dual_clipped,
        "kl_k3": k3_of(-log_ratio.detach()),
        "ratio": ratios,
    }
    return loss_terms(per_token, inputs.weight, denominator, sums, {"ratio": largest(ratios)})


# --- the engine that samples and the trainer that learns: one policy, but other kernels, and so other log-probs ---


@torch.no_grad()
def truncated_importance(old_logprobs: Tensor, engine_logprobs: Tensor, weight: Tensor, cap: float) -> Tensor:
    """How much likelier the trainer finds each sampled token than the engine did: ``min(exp(old - engine), cap)``.

    Truncated importance sampling at the token, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training": PPO's ratio stays within the trainer (new / old) and each token's loss is multiplied by
    this factor. The truncation bounds the variance.

    Args:
        old_logprobs: the trainer's, of the policy that acted, before any step.
        cap: largest factor; at least 1, 2.0 in the paper.

    Returns:
        constants in ``[0, cap]``, exactly 1 where the weight is 0.

    Example::

        truncated_importance(tensor([log(0.2), log(0.9)]), tensor([log(0.4), log(0.3)]), tensor([1.0, 1.0]), cap=2.0)
        # [0.5, 2.0]: the second would be 3
    """
    if not cap >= 1.0:
        raise ValueError(f"cap must be at least 1, got {cap}")
    return kl_k1(old_logprobs, engine_logprobs, weight != 0).exp().clamp(max=cap)


@torch.no_grad()
def engine_mismatch(logprobs: Tensor, engine_logprobs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """How far trainer and engine disagree about one unchanged policy.

    Returns:
        scalars: the sum over tokens of k3, whose mean estimates KL(engine || trainer) (see ``kl_k1``), and the largest
        ``exp(|difference|)``, 1 where no token counts. Differences are cut at 20 nats.

    Example::

        engine_mismatch(tensor([log(0.5)]), tensor([log(0.4)]), tensor([1.0]))  # 1.25 - 1 - log(1.25), and 1.25
    """
    log_ratio = kl_k1(engine_logprobs, logprobs, weight != 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    peak = log_ratio.abs().amax() if log_ratio.numel() else log_ratio.new_zeros(())
    return kl_k3(log_ratio, torch.zeros_like(log_ratio)).sum(), peak.exp()
