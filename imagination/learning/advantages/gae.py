"""Advantages with a critic: GAE over agent tokens, over turns, and over both."""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.advantages.turns import (
    broadcast_over_turns,
    check_turn_index,
    place_turn_rewards,
    turn_bounds,
)
from imagination.learning.shapes import at_least_fp32, check_mask
from imagination.settings.algorithm_parts import BilevelGae, TokenGae, TurnGae


@torch.no_grad()
def masked_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gae: TokenGae, bootstrap_value: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the agent tokens of multi-turn episodes.

    Schulman et al. 2016 (arXiv 1506.02438, eq. 16), on the sequence from which all other tokens are taken out: ``t``
    descending, ``delta = r_t + gamma V_next - V_t`` and ``A_t = delta + gamma lam A_next``, where *next* is the next
    agent token however many observation tokens lie between. Discounts therefore count agent tokens.

    Args:
        mask: a row without any agent token is left out: all of it is ignored and it gets zeros.

    Returns:
        ``(advantages, returns)``, both ``[batch, time]``, exactly zero outside ``mask``; ``returns`` are the targets of
        the critic, ``advantages + values``.

    Raises:
        ValueError: a row has a reward on a token that is not the agent's, where it would be lost.

    Example::

        mask, values = [[1, 1, 0, 0, 1, 1]], [[0.1, 0.2, 9.0, 9.0, 0.3, 0.4]]; rewards = [[0, 0, 0, 0, 0, 1.0]]
        masked_gae(..., TokenGae(gamma=1.0, lam=0.95))
        # returns [[0.899675, 0.9365, 0, 0, 0.97, 1.0]]: the 9.0 of the observations are never seen
    """
    check_mask("masked_gae", mask)
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            "masked_gae needs rewards, values and mask of one shape [batch, time], "
            f"got {tuple(rewards.shape)}, {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    batch = len(mask)
    if bootstrap_value is not None and bootstrap_value.shape != (batch,):
        raise ValueError(f"bootstrap_value must be [batch] = ({batch},), got {tuple(bootstrap_value.shape)}")
    lost = (rewards != 0) & ~mask & mask.any(dim=1, keepdim=True)  # NaN != 0 is true
    if lost.any():
        row, token = lost.nonzero()[0].tolist()
        raise ValueError(
            f"row {row} has the reward {float(rewards[row, token])} on token {token}, which is not the agent's; "
            "it would be lost, so put it on an action token with place_turn_rewards"
        )

    values = at_least_fp32(values).masked_fill(~mask, 0.0)
    rewards = rewards.to(values.dtype).masked_fill(~mask, 0.0)
    follows = values.new_zeros(batch) if bootstrap_value is None else bootstrap_value.to(values)
    advantages = _backwards(rewards, values, mask, gae, follows)
    return advantages, advantages + values


@torch.no_grad()
def turn_gae(
    turn_rewards: Tensor,
    values: Tensor,
    action_turn_index: Tensor,
    gae: TurnGae,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """GAE over turns: one value a turn, one advantage a turn, given to all of its tokens.

    VAGEN (arXiv 2510.16907) and RAGEN (arXiv 2504.20073): the recursion of ``masked_gae`` with turns in the place of
    tokens, so discounts count turns. The value of a turn is the critic's before the turn's first action token, when the
    policy has read the observation and said nothing. A turn without an action token is not there.

    Returns:
        ``(advantages, returns, learned)``, all ``[batch, time]``. ``returns`` are the critic's targets and ``learned``,
        bool, the first action tokens, the only ones that have one: the critic is trained there and nowhere else.

    Example::

        values, turn = tensor([[0.5, 9.0, 9.0, 0.6]]), tensor([[0, 0, -1, 1]])
        turn_gae(tensor([[0.0, 1.0]]), values, turn, TurnGae(gamma=1.0, lam=0.5))
        # advantages [[0.3, 0.3, 0, 0.4]]: 0.6 - 0.5 + 0.5 * 0.4; returns [[0.8, 0, 0, 1.0]]
    """
    first, _, gains, targets = _over_turns(turn_rewards, values, action_turn_index, gae, bootstrap_value)
    exists = first >= 0
    place = first.clamp(min=0)
    returns = targets.new_zeros(values.shape).scatter_add(1, place, targets)
    learned = place.new_zeros(values.shape).scatter_add(1, place, exists.long()) > 0
    return broadcast_over_turns(gains, action_turn_index), returns, learned


@torch.no_grad()
def bilevel_gae(
    turn_rewards: Tensor,
    values: Tensor,
    action_turn_index: Tensor,
    gae: BilevelGae,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE over turns, then GAE over the tokens of each turn, whose terminal reward is the turn's return.

    RAGEN and VAGEN (arXiv 2510.16907): ``turn_gae`` judges the turn as a whole; inside the turn the last token earns
    the turn's return (its advantage plus its value) and nothing follows. The ends of turns come from the index.

    Returns:
        ``(advantages, returns)``, both ``[batch, time]``, exactly zero on tokens that are not the agent's.

    Example::

        values, turn = tensor([[0.5, 0.7, 9.0, 0.6]]), tensor([[0, 0, -1, 1]])
        bilevel_gae(tensor([[0.0, 1.0]]), values, turn, BilevelGae(turn_gamma=1.0, turn_lam=0.5, token_lam=0.5))
        # the first turn's return is 0.8, as in turn_gae: advantages [[0.25, 0.1, 0, 0.4]]
    """
    of_turns, of_tokens = TurnGae(gae.turn_gamma, gae.turn_lam), TokenGae(gae.token_gamma, gae.token_lam)
    _, last, _, targets = _over_turns(turn_rewards, values, action_turn_index, of_turns, bootstrap_value)
    mask = action_turn_index >= 0
    place = last.clamp(min=0)
    ends = place.new_zeros(mask.shape).scatter_add(1, place, (last >= 0).long()) > 0
    terminal = targets.new_zeros(mask.shape).scatter_add(1, place, targets)
    values = at_least_fp32(values).masked_fill(~mask, 0.0)
    nothing = values.new_zeros(len(mask))
    advantages = _backwards(terminal.to(values), values, mask, of_tokens, nothing, ends)
    return advantages, torch.where(mask, advantages + values, 0.0)


def _over_turns(
    turn_rewards: Tensor,
    values: Tensor,
    action_turn_index: Tensor,
    gae: TurnGae,
    bootstrap_value: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First and last token, advantage and return of each turn, all ``[batch, turns]``."""
    check_turn_index("turn_gae", turn_rewards, action_turn_index)
    if values.shape != action_turn_index.shape:
        raise ValueError(
            "turn_gae needs values and action_turn_index of one shape [batch, time], "
            f"got {tuple(values.shape)} and {tuple(action_turn_index.shape)}"
        )
    place_turn_rewards(turn_rewards, action_turn_index)  # refuses a reward that has no action
    first, last = turn_bounds(action_turn_index, turn_rewards.shape[1])
    exists = first >= 0
    at_start = values.gather(1, first.clamp(min=0))
    gains, targets = masked_gae(turn_rewards, at_start, exists, gae, bootstrap_value)
    return first, last, gains, targets


def _backwards(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gae: TokenGae,
    follows: Tensor,
    ends: Tensor | None = None,
) -> Tensor:
    """The recursion over masked tokens. ``follows [batch]``: the value after the last; nothing follows ``ends``."""
    advantages = torch.zeros_like(values)
    advantage_next, value_next = torch.zeros_like(follows), follows
    for t in reversed(range(mask.shape[1])):
        agent = mask[:, t]
        if ends is not None:
            advantage_next = advantage_next.masked_fill(ends[:, t], 0.0)
            value_next = value_next.masked_fill(ends[:, t], 0.0)
        delta = rewards[:, t] + gae.gamma * value_next - values[:, t]
        advantage = delta + gae.gamma * gae.lam * advantage_next
        advantages[:, t] = torch.where(agent, advantage, 0.0)
        # An observation carries what follows it back to the action before it, untouched.
        advantage_next = torch.where(agent, advantage, advantage_next)
        value_next = torch.where(agent, values[:, t], value_next)
    return advantages
