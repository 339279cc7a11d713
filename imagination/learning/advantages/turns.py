"""Between turns and tokens: where a turn ends, and numbers of turns on their tokens.

A turn is found by its index, never by ``reward != 0``: turns that earned nothing must not vanish.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from imagination.learning.shapes import at_least_fp32, check_integers, check_mask


@torch.no_grad()
def place_turn_rewards(turn_rewards: Tensor, action_turn_index: Tensor) -> Tensor:
    """Put each turn's reward on the last action token of that turn.

    A reward arrives together with the observation that follows the action. Left on that observation (the trailing one
    above all) it would sit on a masked token and be lost; on the last action token it cannot be.

    Returns:
        ``[batch, time]`` rewards, zero on every token that is not the last of its turn's action.

    Raises:
        ValueError: a reward is not finite, or a turn earned a reward but has no action token to put it on.

    Example::

        place_turn_rewards(tensor([[0.5, 1.0]]), tensor([[-1, 0, 0, -1, 1, 1, -1, -1]]))
        # [[0, 0, 0.5, 0, 0, 1.0, 0, 0]]: the two trailing observation tokens hold nothing
    """
    check_turn_index("place_turn_rewards", turn_rewards, action_turn_index)
    rewards = at_least_fp32(turn_rewards)
    if not rewards.isfinite().all():
        row, turn = (~rewards.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"the reward of turn {turn} in row {row} is {float(rewards[row, turn])}, not a finite number")

    _, last = turn_bounds(action_turn_index, rewards.shape[1])
    homeless = (last < 0) & (rewards != 0)
    if homeless.any():
        row, turn = homeless.nonzero()[0].tolist()
        raise ValueError(
            f"turn {turn} in row {row} earned {float(rewards[row, turn])} but has no action token to put it on"
        )
    # Distinct turns end at distinct tokens; turns without a token add their 0.0 to token 0.
    return rewards.new_zeros(action_turn_index.shape).scatter_add(1, last.clamp(min=0), rewards)


def broadcast_over_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    """Give each row's number ``[batch]`` to all of its agent tokens ``[batch, time]``, and exactly zero to the others.

    Example::

        broadcast_over_tokens(tensor([2.0]), tensor([[False, True, True]]))  # [[0.0, 2.0, 2.0]]
    """
    check_mask("broadcast_over_tokens", mask)
    if per_row.shape != mask.shape[:1]:
        raise ValueError(f"per_row must be [batch] = ({len(mask)},), got {tuple(per_row.shape)}")
    return torch.where(mask, rearrange(per_row, "batch -> batch 1"), 0.0)


@torch.no_grad()
def broadcast_over_turns(per_turn: Tensor, action_turn_index: Tensor) -> Tensor:
    """Give each turn's number ``[batch, turns]`` to all of its action tokens ``[batch, time]``, and exactly zero to the
    others.

    Example::

        broadcast_over_turns(tensor([[2.0, 3.0]]), tensor([[-1, 0, 0, -1, 1]]))  # [[0, 2, 2, 0, 3]]
    """
    check_turn_index("broadcast_over_turns", per_turn, action_turn_index)
    index = action_turn_index.long()
    if not per_turn.shape[1]:
        return per_turn.new_zeros(index.shape)
    return torch.where(index >= 0, per_turn.gather(1, index.clamp(min=0)), 0.0)


@torch.no_grad()
def turn_bounds(action_turn_index: Tensor, turns: int) -> tuple[Tensor, Tensor]:
    """The first and the last action token of each of at most ``turns`` turns.

    Returns:
        ``(first, last)``, both ``[batch, turns]`` positions; -1 for a turn that has no action token: padding, a turn
        copied from a log, an action that never came.

    Example::

        turn_bounds(tensor([[-1, 0, 0, -1, 1]]), 3)  # [[1, 4, -1]] and [[2, 4, -1]]
    """
    like = action_turn_index.new_zeros(len(action_turn_index), turns)
    check_turn_index("turn_bounds", like, action_turn_index)
    time = action_turn_index.shape[1]
    position = torch.arange(time, device=like.device).expand(len(like), time)
    # Column 0 collects the tokens of no turn, column k + 1 those of turn k.
    column = action_turn_index.long() + 1
    empty = position.new_full((len(like), turns + 1), -1)
    last = empty.scatter_reduce(1, column, position, reduce="amax")[:, 1:]
    first = torch.full_like(empty, time).scatter_reduce(1, column, position, reduce="amin")[:, 1:]
    return torch.where(last < 0, last, first), last


def check_turn_index(where: str, per_turn: Tensor, action_turn_index: Tensor) -> None:
    """Refuses what is not ``[batch, turns]`` and integers ``[batch, time]`` in [-1, turns)."""
    if per_turn.ndim != 2 or action_turn_index.ndim != 2 or len(per_turn) != len(action_turn_index):
        raise ValueError(
            f"{where} needs turn_rewards [batch, turns] and action_turn_index [batch, time], "
            f"got {tuple(per_turn.shape)} and {tuple(action_turn_index.shape)}"
        )
    check_integers(where, "action_turn_index", action_turn_index)
    turns = per_turn.shape[1]
    if action_turn_index.numel() and not -1 <= int(action_turn_index.min()) <= int(action_turn_index.max()) < turns:
        raise ValueError(f"{where}: action_turn_index must lie in [-1, {turns}) for {turns} turns")
