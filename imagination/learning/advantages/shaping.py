"""Rewards before they become advantages: tiers, process rewards, potentials, overlong answers, KL."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from imagination.learning.shapes import at_least_fp32, check_positive, check_shapes


@torch.no_grad()
def tiered_rewards(scores: Tensor, tiers: Sequence[tuple[float, float]]) -> Tensor:
    """A graded outcome as a staircase: the reward of the highest tier whose threshold the score reaches.

    Sweet Spot Learning (SSL, arXiv 2601.22491): tiers nearer to the goal pay more, so groups without a success still
    differ, and differences within a tier are not learned from. They are the user's statement of what
    progress is worth; they are no potential, and badly chosen ones move the optimum.

    Args:
        scores: any shape, for instance the share of subgoals reached by an episode.
        tiers: ``(threshold, reward)``, both rising strictly. Below the first threshold the reward is 0.

    Returns:
        of the shape of ``scores``.

    Raises:
        ValueError: no tiers, they do not rise, or a score is not finite.

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
    """Outcome plus ``coef`` times a judgement of each turn.

    Args:
        turn_rewards: ``[batch, turns]``, what the environment paid.
        process: ``[batch, turns]``, the judgement; may be anything where ``exists`` is false.
        exists: ``[batch, turns]`` bool.
        coef: in units of reward per unit of judgement.

    Returns:
        ``[batch, turns]``, exactly zero where ``exists`` is false.

    Raises:
        ValueError: shapes disagree, or a turn that exists was not judged (NaN): unmeasured is not zero.

    Example::

        with_process_rewards(tensor([[0.0, 1.0]]), tensor([[0.5, -1.0]]), tensor([[True, True]]), 0.1)  # [[0.05, 0.9]]
    """
    check_shapes("with_process_rewards", turn_rewards=turn_rewards, process=process, exists=exists)
    if (exists & ~process.isfinite()).any():
        row, turn = (exists & ~process.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"turn {turn} in row {row} has no finite process reward; judge it or leave the row out")
    return torch.where(exists, at_least_fp32(turn_rewards) + coef * at_least_fp32(process), 0.0)


@torch.no_grad()
def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """DAPO's soft punishment of answers in the last ``buffer`` tokens before the limit.

    ``min(-(length - (max_length - buffer)) / buffer * penalty, 0)``, Yu et al. 2025 (arXiv 2503.14476, eq. 13).

    Args:
        lengths: ``[n]``, agent tokens of an episode.
        max_length: the limit at which generation is cut.
        buffer: where the punishment begins, before the limit; in tokens.
        penalty: at the limit, in units of reward.

    Returns:
        ``[n]``, between ``-penalty`` and 0, to be added to the returns.

    Raises:
        ValueError: the buffer is empty or larger than the limit, or a length is above the limit.

    Example::

        overlong_penalty(tensor([60, 90, 100]), max_length=100, buffer=20)  # [0, -0.5, -1]
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must lie in (0, max_length = {max_length}], got {buffer}")
    check_positive("overlong_penalty", penalty=penalty)
    if lengths.numel() and int(lengths.max()) > max_length:
        raise ValueError(f"an episode has {int(lengths.max())} tokens, above max_length = {max_length}")
    return (-(lengths.float() - (max_length - buffer)) / buffer * penalty).clamp(max=0.0)


@torch.no_grad()
def with_kl_penalty(rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """KL to a frozen reference as a reward: ``r_t - coef kl_t`` on each agent token.

    InstructGPT (Ouyang et al. 2022, arXiv 2203.02155, eq. 2). As a reward, k1 is the right estimator (unbiased, and its
    sum over an episode is the episode's KL); as a loss it is the wrong one (``kl_loss``).

    Args:
        rewards: ``[batch, time]``, as ``place_turn_rewards`` returns it.
        kl: ``[batch, time]``, ``kl_k1`` and its kin of the policy that acted against the reference.
        mask: ``[batch, time]`` bool, agent tokens.
        coef: in units of reward per nat.

    Returns:
        ``[batch, time]``; tokens outside ``mask`` keep their reward.

    Raises:
        ValueError: shapes disagree or ``coef`` is negative.

    Example::

        with_kl_penalty(tensor([[0.0, 1.0]]), tensor([[0.5, 0.25]]), tensor([[True, True]]), 0.1)  # [[-0.05, 0.975]]
    """
    check_shapes("with_kl_penalty", rewards=rewards, kl=kl, mask=mask)
    if not coef >= 0.0:
        raise ValueError(f"coef must be at least 0, got {coef}")
    return at_least_fp32(rewards) - coef * at_least_fp32(kl).masked_fill(~mask, 0.0)
