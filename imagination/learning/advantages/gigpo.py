"""GiGPO: episodes compared within their group, and actions compared where the same observation was answered."""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.advantages.group import group_relative
from imagination.learning.advantages.turns import broadcast_over_turns, check_turn_index, turn_bounds


@torch.no_grad()
def gigpo(
    turn_rewards: Tensor,
    action_turn_index: Tensor,
    anchors: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalise_std: bool = True,
    std_eps: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Group-in-group advantages: ``A_episode + step_weight A_step`` (Feng et al. 2025, arXiv 2505.10978, eq. 3 to 8).

    ``A_episode`` is GRPO's, from the undiscounted sum of the episode's rewards: one number an episode, so a long one
    weighs no more in mean and deviation than a short one. ``A_step`` compares the discounted returns
    ``sum_k gamma^k r_{t+k}`` of all turns of a group that answered the same observation; an observation that only one
    turn of the group has answered says nothing about the step, and adds exactly zero.

    Args:
        turn_rewards: ``[batch, turns]``, as ``place_turn_rewards`` takes them.
        action_turn_index: ``[batch, time]`` integers, the turn of an agent token and -1 for all others.
        anchors: ``[batch, turns]`` integers, equal where the same was observed; read for turns with an action token.
        group_ids, valid: ``[batch]``, as in ``group_relative``.
        gamma: in [0, 1], per turn.
        step_weight: of the step's advantage, w in the paper.
        normalise_std, std_eps: of both levels, as in ``group_relative``.

    Returns:
        ``(advantages [batch, time], counts [batch])``.

    Raises:
        ValueError: shapes disagree, a number is out of range, or as ``group_relative``.

    Example::

        # two episodes from one start; both answer observation 5 first, one is paid at its only turn
        index, anchors = tensor([[0, -1, 1], [0, -1, -1]]), tensor([[5, 6], [5, -1]])
        gigpo(tensor([[0.0, 0.0], [1.0, 0.0]]), index, anchors, tensor([0, 0]), tensor([True, True]))[0]
        # [[-1.414, 0, -0.707], [1.414, 0, 0]]: the second turn has no peer, so only the episode counts there
    """
    check_turn_index("gigpo", turn_rewards, action_turn_index)
    if anchors.shape != turn_rewards.shape:
        raise ValueError(
            f"gigpo needs anchors of the shape of turn_rewards {tuple(turn_rewards.shape)}, got {tuple(anchors.shape)}"
        )
    returns = step_returns(turn_rewards, gamma)
    first, _ = turn_bounds(action_turn_index, turn_rewards.shape[1])
    episode, counts = group_relative(
        turn_rewards.sum(1), group_ids, valid, std_eps=std_eps, normalise_std=normalise_std
    )
    acted = (first >= 0) & counts[:, None]
    pairs = torch.stack([group_ids[:, None].expand_as(anchors), anchors], dim=-1).reshape(-1, 2)
    step_groups = torch.unique(pairs, dim=0, return_inverse=True)[1] if len(pairs) else pairs[:, 0]
    step, _ = group_relative(
        returns.reshape(-1), step_groups, acted.reshape(-1), std_eps=std_eps, normalise_std=normalise_std
    )
    per_turn = episode[:, None] + step_weight * step.view_as(returns)
    return broadcast_over_turns(torch.where(acted, per_turn, 0.0), action_turn_index), counts


@torch.no_grad()
def step_returns(turn_rewards: Tensor, gamma: float) -> Tensor:
    """``sum_k gamma^k r_{t+k}`` over the turns of each episode.

    Args:
        turn_rewards: ``[batch, turns]``; 0.0 for padding.
        gamma: in [0, 1], per turn.

    Returns:
        ``[batch, turns]``.

    Raises:
        ValueError: ``gamma`` is outside [0, 1].

    Example::

        step_returns(tensor([[0.0, 0.0, 1.0]]), 0.5)  # [[0.25, 0.5, 1.0]]
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    returns = turn_rewards.clone()
    for turn in reversed(range(turn_rewards.shape[1] - 1)):
        returns[:, turn] += gamma * returns[:, turn + 1]
    return returns
