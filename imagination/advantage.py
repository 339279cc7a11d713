"""How much better than expected each agent token was: pure functions of tensors.

Two families. With a critic: ``place_turn_rewards`` puts what a turn earned on the turn's last action token and
``masked_gae`` runs the recursion over agent tokens only. Without one: ``group_relative`` compares episodes that share a
start, and ``broadcast_over_tokens`` gives an episode's number to each of its agent tokens.

Rows are episodes here, so compute advantages before rows are packed. Everything returned is a constant: no gradient
flows into values or rewards. A new estimator (Dr.GRPO, RLOO, ...) is one more function from per-episode returns to
``(advantages, counts)``; the group sums it needs are in ``_Groups``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor


@torch.no_grad()
def place_turn_rewards(turn_rewards: Tensor, action_turn_index: Tensor) -> Tensor:
    """Put each turn's reward on the last action token of that turn.

    A reward arrives together with the observation that follows the action. Left on that observation (the trailing one
    above all) it would sit on a masked token and be lost; on the last action token it cannot be. Turns are found by
    their index, never by ``reward != 0``, so turns that earned nothing do not vanish.

    Args:
        turn_rewards: ``[batch, turns]``; 0.0 for padding and for turns copied from a log, whose reward the policy did
            not earn. An unmeasured reward (``None`` in a ``Turn``) is the caller's decision, so NaN is refused.
        action_turn_index: ``[batch, time]`` integers, the turn of an agent token and -1 for all others, as in
            ``Trace.turns``.

    Returns:
        ``[batch, time]`` rewards, zero on every token that is not the last of its turn's action.

    Raises:
        ValueError: shapes disagree, an index is out of range, a reward is not finite, or a turn earned a reward but has
            no action token to put it on.

    Example::

        place_turn_rewards(tensor([[0.5, 1.0]]), tensor([[-1, 0, 0, -1, 1, 1, -1, -1]]))
        # [[0, 0, 0.5, 0, 0, 1.0, 0, 0]]: the two trailing observation tokens hold nothing
    """
    if turn_rewards.ndim != 2 or action_turn_index.ndim != 2 or len(turn_rewards) != len(action_turn_index):
        raise ValueError(
            "place_turn_rewards needs turn_rewards [batch, turns] and action_turn_index [batch, time], "
            f"got {tuple(turn_rewards.shape)} and {tuple(action_turn_index.shape)}"
        )
    if action_turn_index.is_floating_point() or action_turn_index.dtype == torch.bool:
        raise ValueError(f"action_turn_index must hold integers, got {action_turn_index.dtype}")
    rewards = _at_least_fp32(turn_rewards)
    turns, time = rewards.shape[1], action_turn_index.shape[1]
    if action_turn_index.numel() and not -1 <= int(action_turn_index.min()) <= int(action_turn_index.max()) < turns:
        raise ValueError(f"action_turn_index must lie in [-1, {turns}) for turn_rewards with {turns} turns")
    if not rewards.isfinite().all():
        row, turn = (~rewards.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"the reward of turn {turn} in row {row} is {float(rewards[row, turn])}, not a finite number")

    # Column 0 collects the tokens of no turn, column k + 1 those of turn k; -1 says that a turn has no token.
    position = torch.arange(time, device=rewards.device).expand(len(rewards), time)
    last = position.new_full((len(rewards), turns + 1), -1)
    last = last.scatter_reduce(1, action_turn_index.long() + 1, position, reduce="amax")[:, 1:]  # [batch, turns]
    homeless = (last < 0) & (rewards != 0)
    if homeless.any():
        row, turn = homeless.nonzero()[0].tolist()
        raise ValueError(
            f"turn {turn} in row {row} earned {float(rewards[row, turn])} but has no action token to put it on"
        )
    # Distinct turns end at distinct tokens; turns without a token add their 0.0 to token 0.
    return rewards.new_zeros(len(rewards), time).scatter_add(1, last.clamp(min=0), rewards)


@torch.no_grad()
def masked_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the agent tokens of multi-turn episodes.

    Schulman et al. 2016 (arXiv 1506.02438, eq. 16), on the sequence from which all other tokens are taken out: ``t``
    descending, ``delta = r_t + gamma V_next - V_t`` and ``A_t = delta + gamma lam A_next``, where *next* is the next
    agent token however many observation tokens lie between. Discounts therefore count agent tokens.

    Args:
        rewards: ``[batch, time]``, as ``place_turn_rewards`` returns it.
        values: ``[batch, time]``, the critic before each token; read at agent tokens only.
        mask: ``[batch, time]`` bool, true on agent tokens. A row without any is a row that is left out: all of it is
            ignored and it gets zeros.
        gamma, lam: in [0, 1].
        bootstrap_value: ``[batch]``, the critic's value of the state in which the row stops. Give it for truncated rows
            and 0.0 for terminated ones, after which nothing follows. ``None``: all rows terminated.

    Returns:
        ``(advantages, returns)``, both ``[batch, time]``, exactly zero outside ``mask``; ``returns`` are the targets of
        the critic, ``advantages + values``.

    Raises:
        ValueError: shapes disagree, ``mask`` is not bool, ``gamma`` or ``lam`` is outside [0, 1], or a row has a reward
            on a token that is not the agent's, where it would be lost.

    Example::

        mask, values = [[1, 1, 0, 0, 1, 1]], [[0.1, 0.2, 9.0, 9.0, 0.3, 0.4]]; rewards = [[0, 0, 0, 0, 0, 1.0]]
        masked_gae(..., gamma=1.0, lam=0.95)
        # returns [[0.899675, 0.9365, 0, 0, 0.97, 1.0]]: the 9.0 of the observations are never seen
    """
    _check_mask("masked_gae", mask)
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            "masked_gae needs rewards, values and mask of one shape [batch, time], "
            f"got {tuple(rewards.shape)}, {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gamma and lam must lie in [0, 1], got {gamma} and {lam}")
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

    values = _at_least_fp32(values).masked_fill(~mask, 0.0)
    rewards = rewards.to(values.dtype).masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    advantage_next = values.new_zeros(batch)
    value_next = values.new_zeros(batch) if bootstrap_value is None else bootstrap_value.to(values)
    for t in reversed(range(mask.shape[1])):
        agent = mask[:, t]
        delta = rewards[:, t] + gamma * value_next - values[:, t]
        advantage = delta + gamma * lam * advantage_next
        advantages[:, t] = torch.where(agent, advantage, 0.0)
        # An observation carries what follows it back to the action before it, untouched.
        advantage_next = torch.where(agent, advantage, advantage_next)
        value_next = torch.where(agent, values[:, t], value_next)
    return advantages, advantages + values


@torch.no_grad()
def group_relative(
    returns: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    *,
    std_eps: float = 1e-4,
    normalise_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """GRPO: how an episode did against the episodes that share its start.

    Shao et al. 2024 (arXiv 2402.03300, section 4.1.2): ``(R - mean) / (std + std_eps)`` within the group, with the
    unbiased standard deviation. Episodes that are not ``valid`` (failed rollouts) enter no mean and no deviation; the
    rest of their group is normalised as if they had never been started.

    Args:
        returns: ``[n]``, one number per episode; read where ``valid``.
        group_ids: ``[n]`` integers, equal within a group; neither sorted nor dense, groups may differ in size.
        valid: ``[n]`` bool.
        std_eps: in units of reward; keeps nearly equal groups finite.
        normalise_std: divide by the deviation; without it the advantage stays in units of reward.

    Returns:
        ``(advantages, counts)``, both ``[n]``. ``counts`` is false where the advantage is no statement about the
        episode and its tokens belong in no loss and no denominator: it is invalid, or the only valid one of its group.
        Episodes of a group with equal returns do count, with advantage exactly zero.

    Raises:
        ValueError: shapes disagree, ``valid`` is not bool, ``group_ids`` are not integers, ``std_eps`` is not positive,
            or a valid return is not finite.

    Example::

        group_relative(tensor([1.0, 0.0, nan, 5.0]), tensor([7, 7, 7, 3]), tensor([True, True, False, True]))
        # advantages [0.7070, -0.7070, 0, 0], counts [True, True, False, False]
    """
    if returns.ndim != 1 or not returns.shape == group_ids.shape == valid.shape:
        raise ValueError(
            "group_relative needs returns, group_ids and valid of one shape [n], "
            f"got {tuple(returns.shape)}, {tuple(group_ids.shape)} and {tuple(valid.shape)}"
        )
    if valid.dtype != torch.bool:
        raise ValueError(f"valid must be bool, got {valid.dtype}")
    if group_ids.is_floating_point():
        raise ValueError(f"group_ids must hold integers, got {group_ids.dtype}")
    if std_eps <= 0:
        raise ValueError(f"std_eps must be positive, got {std_eps}")
    returns = _at_least_fp32(returns)
    broken = valid & ~returns.isfinite()
    if broken.any():
        row = int(broken.nonzero()[0])
        raise ValueError(f"row {row} is valid but its return is {float(returns[row])}")

    groups = _Groups.of(group_ids, valid)
    size = groups.size()
    counts = valid & (size >= 2)
    # Measured from the group's smallest return, equal returns are zeros, and stay zeros without rounding.
    above = groups.above_smallest(returns)
    deviation = torch.where(counts, above - groups.sum(above) / size.clamp(min=1), 0.0)
    if not normalise_std:
        return deviation, counts
    std = (groups.sum(deviation.square()) / (size - 1).clamp(min=1)).sqrt()
    return deviation / (std + std_eps), counts


def broadcast_over_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    """Give each row's number to all of its agent tokens, and exactly zero to the others.

    Args:
        per_row: ``[batch]``.
        mask: ``[batch, time]`` bool.

    Returns:
        ``[batch, time]``.

    Raises:
        ValueError: shapes disagree or ``mask`` is not bool.

    Example::

        broadcast_over_tokens(tensor([2.0]), tensor([[False, True, True]]))  # [[0.0, 2.0, 2.0]]
    """
    _check_mask("broadcast_over_tokens", mask)
    if per_row.shape != mask.shape[:1]:
        raise ValueError(f"per_row must be [batch] = ({len(mask)},), got {tuple(per_row.shape)}")
    return torch.where(mask, rearrange(per_row, "batch -> batch 1"), 0.0)


@dataclass(frozen=True)
class _Groups:
    """Sums within groups of valid rows, given back to every row: all methods map ``[n]`` to ``[n]``."""

    index: Tensor  # [n], dense: 0 .. number of groups - 1
    valid: Tensor  # [n]

    @classmethod
    def of(cls, group_ids: Tensor, valid: Tensor) -> _Groups:
        return cls(torch.unique(group_ids, return_inverse=True)[1], valid)

    def size(self) -> Tensor:
        return self.sum(torch.ones_like(self.index))

    def sum(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(len(x))
        return zeros.scatter_add(0, self.index, torch.where(self.valid, x, zeros))[self.index]

    def above_smallest(self, x: Tensor) -> Tensor:
        """``x`` minus the smallest valid ``x`` of the group; zero where invalid."""
        x = x.masked_fill(~self.valid, float("inf"))
        smallest = x.new_full((len(x),), float("inf")).scatter_reduce(0, self.index, x, reduce="amin")[self.index]
        return torch.where(self.valid, x - smallest, 0.0)


def _check_mask(where: str, mask: Tensor) -> None:
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(f"{where} needs a bool mask [batch, time], got {mask.dtype} {tuple(mask.shape)}")


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
