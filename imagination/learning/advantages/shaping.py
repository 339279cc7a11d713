"""Rewards before they become advantages: tiers, process rewards, overlong answers, KL, progress (SPA-RL),
and the implicit rewards of a process reward model (iStar)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from imagination.learning.advantages.turns import turn_bounds
from imagination.learning.shapes import at_least_fp32, check_shapes
from imagination.settings.algorithm_parts import DynamicSampling, Kl


@torch.no_grad()
def tiered_rewards(scores: Tensor, tiers: Sequence[tuple[float, float]]) -> Tensor:
    """A graded outcome as a staircase: the reward of the highest tier whose threshold the score reaches.

    Sweet Spot Learning (SSL, arXiv 2601.22491): tiers nearer to the goal pay more, so groups without a success still
    differ, and differences within a tier are not learned from. They are the user's statement of what
    progress is worth; they are no potential, and badly chosen ones move the optimum.

    Args:
        scores: any shape, for instance the share of subgoals reached by an episode.
        tiers: ``(threshold, reward)``, both rising strictly. Below the first threshold the reward is 0.

    Example::

        tiered_rewards(tensor([0.2, 0.5, 1.0]), [(0.5, 0.3), (1.0, 1.0)])  # [0.0, 0.3, 1.0]
    """
    steps = list(pairwise(tiers))
    if not tiers or any(a[0] >= b[0] or a[1] >= b[1] for a, b in steps):
        raise ValueError(f"tiers must be (threshold, reward) pairs of which both rise, got {list(tiers)}")
    scores = at_least_fp32(scores)
    if not scores.isfinite().all():
        raise ValueError("tiered_rewards got a score that is not finite; an unmeasured score is not a score of 0")
    thresholds = torch.tensor([t for t, _ in tiers], dtype=scores.dtype, device=scores.device)
    rewards = torch.tensor([0.0, *(r for _, r in tiers)], dtype=scores.dtype, device=scores.device)
    return rewards[torch.bucketize(scores, thresholds, right=True)]


@torch.no_grad()
def with_process_rewards(turn_rewards: Tensor, process: Tensor, exists: Tensor, coef: float) -> Tensor:
    """Outcome plus ``coef`` times a judgement of each turn, exactly zero where ``exists`` is false.

    All are ``[batch, turns]``; ``process`` may be anything where ``exists`` is false.

    Raises:
        ValueError: a turn that exists was not judged (NaN): unmeasured is not zero.

    Example::

        with_process_rewards(tensor([[0.0, 1.0]]), tensor([[0.5, -1.0]]), tensor([[True, True]]), 0.1)  # [[0.05, 0.9]]
    """
    check_shapes("with_process_rewards", turn_rewards=turn_rewards, process=process, exists=exists)
    if (exists & ~process.isfinite()).any():
        row, turn = (exists & ~process.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"turn {turn} in row {row} has no finite process reward; judge it or leave the row out")
    return torch.where(exists, at_least_fp32(turn_rewards) + coef * at_least_fp32(process), 0.0)


def implicit_step_rewards(
    logprobs: Tensor, old_logprobs: Tensor, action_turn_index: Tensor, turns: int, beta: float
) -> Tensor:
    """``beta log(pi_prm(a | s) / pi_old(a | s))`` of each turn, over all tokens of its action.

    iStar (Liu et al. 2025, arXiv 2509.19199, section 3): what an implicit process reward model says of a turn. The sum
    over an episode's turns is its score in ``trajectory_preference_loss``.

    Args:
        logprobs: ``[batch, time]``, nats, of the process reward model, with a gradient; may be anything off the turns.
        old_logprobs: the same of the policy that acted, constant.
        turns: columns of the result.

    Returns:
        ``[batch, turns]``; NaN for a turn that has no action token.

    Example::

        implicit_step_rewards(tensor([[0.0, -1.0, -2.0]]), tensor([[0.0, -2.0, -4.0]]), tensor([[-1, 0, 0]]), 2, 0.05)
        # [[0.15, nan]] = 0.05 * (1 + 2)
    """
    check_shapes("implicit_step_rewards", logprobs=logprobs, old_logprobs=old_logprobs, index=action_turn_index)
    exists = turn_bounds(action_turn_index, turns)[0] >= 0
    gains = (at_least_fp32(logprobs) - at_least_fp32(old_logprobs.detach())).masked_fill(action_turn_index < 0, 0.0)
    if not turns:
        return gains[:, :0]
    sums = gains.new_zeros(len(gains), turns).scatter_add(1, action_turn_index.long().clamp(min=0), gains)
    return (beta * sums).masked_fill(~exists, math.nan)


@torch.no_grad()
def overlong_penalty(lengths: Tensor, settings: DynamicSampling) -> Tensor:
    """DAPO's soft punishment of answers in the last ``overlong_buffer`` tokens before ``max_tokens``.

    ``min(-(length - (max_tokens - buffer)) / buffer * penalty, 0)``, Yu et al. 2025 (arXiv 2503.14476, eq. 13).

    Lengths ``[n]`` are of agent tokens. The result lies between ``-overlong_penalty`` and 0 and is added to the
    returns. An episode of somebody else, which no limit of ours cut, can be longer than ``max_tokens``.

    Raises:
        ValueError: ``max_tokens`` is missing.

    Example::

        overlong_penalty(tensor([60, 90, 100]), DynamicSampling(max_tokens=100, overlong_buffer=20))  # [0, -0.5, -1]
    """
    limit, buffer = settings.max_tokens, settings.overlong_buffer
    if not buffer:
        return torch.zeros_like(lengths, dtype=torch.float32)
    if limit is None:
        raise ValueError("overlong_buffer needs max_tokens, the most agent tokens an episode can have")
    return (-(lengths.float() - (limit - buffer)) / buffer).clamp(-1.0, 0.0) * settings.overlong_penalty


@torch.no_grad()
def with_kl_penalty(rewards: Tensor, kl: Tensor, mask: Tensor, settings: Kl) -> Tensor:
    """KL to a frozen reference as a reward: ``r_t - kl_coef kl_t`` on each agent token.

    InstructGPT (Ouyang et al. 2022, arXiv 2203.02155, eq. 2). As a reward, k1 is the right estimator (unbiased, and its
    sum over an episode is the episode's KL); as a loss it is the wrong one (``kl_loss``).

    ``kl`` is that of the policy that acted, in nats. Tokens outside ``mask`` keep their reward.

    Example::

        rewards, kl = tensor([[0.0, 1.0]]), tensor([[0.5, 0.25]])
        with_kl_penalty(rewards, kl, tensor([[True, True]]), Kl(kl_coef=0.1))  # [[-0.05, 0.975]]
    """
    check_shapes("with_kl_penalty", rewards=rewards, kl=kl, mask=mask)
    return at_least_fp32(rewards) - settings.kl_coef * at_least_fp32(kl).masked_fill(~mask, 0.0)


class ProgressEstimator(nn.Module):
    """What each turn contributed to the final reward, from a vector that describes the turn.

    The vectors are the caller's: hidden states of the policy at the turn's last action token, say. Trained with
    ``attribution_error``, so that the contributions of an episode add up to its final reward.

    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, turns: Tensor, exists: Tensor) -> Tensor:
        """Contributions ``[batch, turns]``, in units of the final reward, of turns ``[batch, turns, features]``.

        Exactly zero where ``exists [batch, turns]`` is false; turns may be anything there.
        """
        turns = turns.masked_fill(~exists[..., None], 0.0)
        scores: Tensor = self.layers(turns)[..., 0]
        return scores.masked_fill(~exists, 0.0)


def attribution_error(contributions: Tensor, final_rewards: Tensor, valid: Tensor, *, denominator: float) -> Tensor:
    """Squared error of the sum of an episode's contributions against its final reward: what trains the estimator.

    Wang et al. 2025, "SPA-RL" (arXiv 2505.20732).

    Args:
        contributions: ``[batch, turns]``, zero where there is no turn; final rewards are ``[batch]``.
        denominator: number of valid episodes of the global batch.

    Example::

        attribution_error(tensor([[0.25, 0.25]]), tensor([1.0]), tensor([True]), denominator=1)  # 0.25
    """
    if contributions.ndim != 2 or not final_rewards.shape == valid.shape == contributions.shape[:1]:
        raise ValueError(
            "attribution_error needs contributions [batch, turns], final_rewards [batch] and valid [batch], "
            f"got {tuple(contributions.shape)}, {tuple(final_rewards.shape)} and {tuple(valid.shape)}"
        )
    if valid.dtype != torch.bool:
        raise ValueError(f"valid must be bool, got {valid.dtype}")
    if not denominator > 0:
        raise ValueError(f"denominator is the number of valid episodes and must be positive, got {denominator}")
    predicted = at_least_fp32(contributions).masked_fill(~valid[:, None], 0.0).sum(1)
    error = predicted - at_least_fp32(final_rewards).masked_fill(~valid, 0.0)
    return error.square().sum() / denominator


@torch.no_grad()
def progress_rewards(contributions: Tensor, grounded: Tensor, exists: Tensor, grounded_weight: float = 0.5) -> Tensor:
    """Turn rewards for RL: ``contribution + grounded_weight * grounded`` (arXiv 2505.20732).

    The contribution is the estimator's own prediction. It is neither replaced by the outcome (or by the outcome less
    the other turns' predictions) nor scaled by the turn's position: what a turn is worth is what was predicted for it.

    ``grounded`` says whether the environment could execute the turn's action. The result stands in place of the
    environment's rewards, ``[batch, turns]``, exactly zero where ``exists`` is false.

    Example::

        progress_rewards(tensor([[0.2, 0.7]]), tensor([[True, False]]), tensor([[True, True]]))  # [[0.7, 0.7]]
    """
    if not contributions.shape == grounded.shape == exists.shape:
        raise ValueError(
            "progress_rewards needs contributions, grounded and exists of one shape [batch, turns], "
            f"got {tuple(contributions.shape)}, {tuple(grounded.shape)} and {tuple(exists.shape)}"
        )
    if grounded.dtype != torch.bool or exists.dtype != torch.bool:
        raise ValueError(f"grounded and exists must be bool, got {grounded.dtype} and {exists.dtype}")
    contributions = at_least_fp32(contributions)
    return torch.where(exists, contributions + grounded_weight * grounded.to(contributions.dtype), 0.0)
