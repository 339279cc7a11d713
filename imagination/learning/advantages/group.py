"""Comparisons within groups of episodes that share a start: GRPO, RLOO, GiGPO, iStar, and what to keep or to imitate.

``counts`` is false where the advantage is no statement about the episode and its tokens belong in no loss and no
denominator: the episode failed, or it is the only valid one of its group.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from imagination.learning.advantages.turns import broadcast_over_turns, check_turn_index, turn_bounds
from imagination.learning.shapes import at_least_fp32, check_integers, check_shapes
from imagination.settings.algorithm_parts import BestOfGroups, GiGpo, GroupRelative, ImplicitSteps

# Returns are sums of rewards in fp32: ten times 0.1 is 1.00000012, and 0.4 + 0.3 + 0.2 + 0.1 is 1. Numbers that differ
# by less than this share of their size are one number: their difference is rounding, whatever it is divided by.
ROUNDING = 1e-5
_GRPO, _GIGPO = GroupRelative(), GiGpo()


def differ(numbers: Collection[float]) -> bool:
    """Whether any two of them differ by more than rounding."""
    return bool(numbers) and max(numbers) - min(numbers) > ROUNDING * max(map(abs, numbers))


@dataclass(frozen=True)
class Groups:
    """Sums within groups of valid rows, given back to every row: all methods map ``[n]`` to ``[n]``."""

    index: Tensor  # [n], dense: 0 .. number of groups - 1
    valid: Tensor  # [n]

    @classmethod
    def of(cls, group_ids: Tensor, valid: Tensor) -> Groups:
        return cls(torch.unique(group_ids, return_inverse=True)[1], valid)

    def size(self) -> Tensor:
        return self.sum(torch.ones_like(self.index))

    def sum(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(len(x))
        return zeros.scatter_add(0, self.index, torch.where(self.valid, x, zeros))[self.index]

    def above_smallest(self, x: Tensor) -> Tensor:
        """``x`` minus the smallest valid ``x`` of the group; zero within ``ROUNDING`` of it and where invalid."""
        zeros = x.new_zeros(len(x))
        filled = x.masked_fill(~self.valid, float("inf"))
        smallest = zeros.fill_(float("inf")).scatter_reduce(0, self.index, filled, reduce="amin")[self.index]
        size = x.abs().masked_fill(~self.valid, 0.0)
        largest = x.new_zeros(len(x)).scatter_reduce(0, self.index, size, reduce="amax")[self.index]
        above = torch.where(self.valid, x - smallest, 0.0)
        return above.masked_fill(above <= ROUNDING * largest, 0.0)


def checked_returns(where: str, returns: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """``returns`` in fp32 or better."""
    if returns.ndim != 1 or not returns.shape == group_ids.shape == valid.shape:
        raise ValueError(
            f"{where} needs returns, group_ids and valid of one shape [n], "
            f"got {tuple(returns.shape)}, {tuple(group_ids.shape)} and {tuple(valid.shape)}"
        )
    if valid.dtype != torch.bool:
        raise ValueError(f"{where}: valid must be bool, got {valid.dtype}")
    check_integers(where, "group_ids", group_ids)
    returns = at_least_fp32(returns)
    broken = valid & ~returns.isfinite()
    if broken.any():
        row = int(broken.nonzero()[0])
        raise ValueError(f"row {row} is valid but its return is {float(returns[row])}")
    return returns


@torch.no_grad()
def group_relative(
    returns: Tensor, group_ids: Tensor, valid: Tensor, settings: GroupRelative = _GRPO
) -> tuple[Tensor, Tensor]:
    """GRPO: how an episode did against the episodes that share its start.

    Shao et al. 2024 (arXiv 2402.03300, section 4.1.2): ``(R - mean) / (std + std_eps)`` within the group, with the
    unbiased standard deviation. Episodes that are not ``valid`` (failed rollouts) enter no mean and no deviation; the
    rest of their group is normalised as if they had never been started. Without ``normalise_std`` the advantage stays
    in units of reward.

    Returns:
        ``(advantages, counts)``, both ``[n]``. Episodes of a group with equal returns do count, with advantage exactly
        zero.

    Example::

        group_relative(tensor([1.0, 0.0, nan, 5.0]), tensor([7, 7, 7, 3]), tensor([True, True, False, True]))
        # advantages [0.7070, -0.7070, 0, 0], counts [True, True, False, False]
    """
    returns = checked_returns("group_relative", returns, group_ids, valid)
    groups = Groups.of(group_ids, valid)
    deviation, counts = _deviation(returns, groups)
    if not settings.normalise_std:
        return deviation, counts
    std = (groups.sum(deviation.square()) / (groups.size() - 1).clamp(min=1)).sqrt()
    return deviation / (std + settings.std_eps), counts


@torch.no_grad()
def leave_one_out(returns: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """RLOO: the return minus the mean of the *other* episodes of the group, ``n / (n - 1) (R - mean)``.

    Ahmadian et al. 2024 (arXiv 2402.14740, section 3.2). The baseline does not depend on the episode itself, so the
    policy gradient stays unbiased, and no deviation is divided by.

    Returns:
        ``(advantages, counts)``, both ``[n]``, in units of reward.

    Example::

        leave_one_out(tensor([3.0, 0.0, 0.0]), tensor([1, 1, 1]), tensor([True, True, True]))[0]  # [3.0, -1.5, -1.5]
    """
    returns = checked_returns("leave_one_out", returns, group_ids, valid)
    groups = Groups.of(group_ids, valid)
    deviation, counts = _deviation(returns, groups)
    size = groups.size().to(returns.dtype)
    return deviation * size / (size - 1).clamp(min=1), counts


@torch.no_grad()
def informative(returns: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """DAPO's dynamic sampling: which episodes belong to a group whose returns differ.

    Yu et al. 2025 (arXiv 2503.14476, section 3.2): a group of equal returns has no gradient, so it is resampled, and
    the denominators count only what is left.

    Returns:
        ``[n]`` bool, false for failed episodes and for groups of one.

    Example::

        informative(tensor([1.0, 0.0, 1.0, 1.0]), tensor([1, 1, 2, 2]), tensor([True] * 4))
        # [True, True, False, False]
    """
    returns = checked_returns("informative", returns, group_ids, valid)
    groups = Groups.of(group_ids, valid)
    differs = groups.sum(groups.above_smallest(returns).ne(0).to(returns.dtype)) > 0
    return valid & differs


@torch.no_grad()
def best_of_groups(returns: Tensor, group_ids: Tensor, valid: Tensor, settings: BestOfGroups) -> Tensor:
    """The best ``keep_fraction`` of each group, of those that earned at least ``keep_min_return``.

    Both halves of the rule are needed: the threshold alone floods the update with easy tasks, the fraction alone clones
    the least bad failures of the hard ones. What is kept is learned by cross-entropy: no ratio, no advantage.
    ``ceil(keep_fraction * n)`` of the ``n`` valid episodes of a group; ties with the last of them are kept as well, so
    the order of episodes decides nothing. A group of one is a group.

    Returns:
        ``[n]`` bool.

    Example::

        one_group = tensor([0, 0, 0, 0]), tensor([True, True, True, True])
        best_of_groups(tensor([1.0, 0.5, 0.0, 0.5]), *one_group, BestOfGroups(0.5, 0.1))
        # [True, True, False, True]: two of four, and a tie
    """
    returns = checked_returns("best_of_groups", returns, group_ids, valid)
    kept = torch.zeros_like(valid)
    for group in group_ids[valid].unique():
        members = valid & (group_ids == group)
        wanted = max(1, math.ceil(settings.keep_fraction * int(members.sum()) - ROUNDING))
        border = returns[members].sort(descending=True).values[wanted - 1]
        kept |= members & (returns >= border - ROUNDING * border.abs())
    return kept & (returns >= settings.keep_min_return)


@torch.no_grad()
def gigpo(
    turn_rewards: Tensor,
    action_turn_index: Tensor,
    anchors: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    settings: GiGpo = _GIGPO,
) -> tuple[Tensor, Tensor]:
    """Group-in-group advantages: ``A_episode + step_weight A_step`` (Feng et al. 2025, arXiv 2505.10978, eq. 3 to 8).

    ``A_episode`` is GRPO's, from the undiscounted sum of the episode's rewards: one number an episode, so a long one
    weighs no more in mean and deviation than a short one. ``A_step`` compares the discounted returns
    ``sum_k gamma^k r_{t+k}`` of all turns of a group that answered the same observation; an observation that only one
    turn of the group has answered says nothing about the step, and adds exactly zero.

    Args:
        anchors: ``[batch, turns]`` integers, equal where the same was observed; read for turns with an action token.

    Returns:
        ``(advantages [batch, time], counts [batch])``.

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
    scaling = GroupRelative(settings.normalise_std, settings.std_eps)  # of both levels
    returns = step_returns(turn_rewards, settings.gamma)
    first, _ = turn_bounds(action_turn_index, turn_rewards.shape[1])
    episode, counts = group_relative(turn_rewards.sum(1), group_ids, valid, scaling)
    acted = (first >= 0) & counts[:, None]
    pairs = torch.stack([group_ids[:, None].expand_as(anchors), anchors], dim=-1).reshape(-1, 2)
    step_groups = torch.unique(pairs, dim=0, return_inverse=True)[1] if len(pairs) else pairs[:, 0]
    step, _ = group_relative(returns.reshape(-1), step_groups, acted.reshape(-1), scaling)
    per_turn = episode[:, None] + settings.step_weight * step.view_as(returns)
    return broadcast_over_turns(torch.where(acted, per_turn, 0.0), action_turn_index), counts


@torch.no_grad()
def shared_before_branches(advantages: Tensor, action_turn_index: Tensor, parents: Tensor) -> Tensor:
    """Give tokens that several episodes begin with the mean of the advantages of these episodes.

    ARPO's hard advantage estimation (Dong et al. 2025, arXiv 2507.19849, section on advantage attribution). Its soft
    form trains the same tokens once in each episode, at one ratio, which comes to the same sum; our rows hold them
    once, in the episode that sampled them, so the mean stands there and they count as one.

    Args:
        advantages: ``[batch, time]``, one number an episode, as estimators of whole episodes give it.
        action_turn_index: ``[batch, time]``; an episode that branched off begins with the turn of its first token.
        parents: ``[batch]`` integers, the row that an episode branched off from; -1 for none.

    Returns:
        ``[batch, time]``; as it was on every token that no other episode shares.

    Example::

        # the second episode branched off before turn 1 of the first
        index = tensor([[0, -1, 1], [-1, -1, 1]])
        shared_before_branches(tensor([[1.0, 0.0, 1.0], [0.0, 0.0, -0.5]]), index, tensor([-1, 0]))
        # [[0.25, 0, 1.0], [0, 0, -0.5]]
    """
    check_integers("shared_before_branches", "parents", parents)
    position = torch.arange(advantages.shape[1], device=advantages.device)
    last = torch.where(action_turn_index >= 0, position, 0).amax(1)
    whole = advantages.gather(1, last[:, None])[:, 0]  # of each episode
    total, count = advantages.clone(), torch.ones_like(advantages)
    for row in (parents >= 0).nonzero()[:, 0].tolist():
        index, parent = action_turn_index[row], int(parents[row])
        shared = (action_turn_index[parent] >= 0) & (action_turn_index[parent] < index[index >= 0].min())
        total[parent] += torch.where(shared, whole[row], 0.0)
        count[parent] += shared
    return total / count


@torch.no_grad()
def istar(
    turn_rewards: Tensor,
    action_turn_index: Tensor,
    step_rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    settings: ImplicitSteps,
) -> tuple[Tensor, Tensor]:
    """iStar's advantages: ``A_episode + step_weight A_step`` (Liu et al. 2025, arXiv 2509.19199, section 3).

    ``A_episode`` is GRPO's, of the sum of the episode's rewards; ``A_step = (r - mean) / (std + std_eps)`` over all
    turns of the group, each turn once, with the unbiased deviation. The paper has no ``std_eps``.

    Args:
        step_rewards: ``[batch, turns]`` of ``implicit_step_rewards``. NaN says that a turn has none: it is in no mean
            and has the episode's advantage alone.

    Returns:
        ``(advantages [batch, time], counts [batch])``.

    Example::

        # two episodes of one turn; the model thinks better of the turn of the one that was paid
        index, one_group = tensor([[-1, 0], [-1, 0]]), (tensor([0, 0]), tensor([True, True]))
        istar(tensor([[1.0], [0.0]]), index, tensor([[0.3], [0.1]]), *one_group, ImplicitSteps())[0]
        # [[0, 1.413], [0, -1.413]] = 0.7070 + 0.7066 and its negative
    """
    check_turn_index("istar", turn_rewards, action_turn_index)
    check_shapes("istar", turn_rewards=turn_rewards, step_rewards=step_rewards)
    episode, counts = group_relative(turn_rewards.sum(1), group_ids, valid, settings)
    acted = (turn_bounds(action_turn_index, turn_rewards.shape[1])[0] >= 0) & counts[:, None]
    groups = group_ids[:, None].expand_as(step_rewards).reshape(-1)
    step, _ = group_relative(step_rewards.reshape(-1), groups, (acted & ~step_rewards.isnan()).reshape(-1), settings)
    per_turn = episode[:, None] + settings.step_weight * step.view_as(step_rewards)
    return broadcast_over_turns(torch.where(acted, per_turn, 0.0), action_turn_index), counts


@torch.no_grad()
def preferences(returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of episodes of one group of which one earned more, by more than rounding.

    iStar's pairs are a success and a failure; with graded returns, here, any two that differ.

    Args:
        returns: ``[n]``, of episodes that did not fail.

    Returns:
        ``(better, worse)``, indices, both ``[pairs]``.

    Example::

        preferences(tensor([1.0, 0.0, 0.5, 1.0]), tensor([0, 0, 0, 1]))  # [0, 0, 2] and [1, 2, 1]
    """
    returns = checked_returns("preferences", returns, group_ids, torch.ones_like(returns, dtype=torch.bool))
    size = torch.maximum(returns[:, None].abs(), returns.abs())
    more = returns[:, None] - returns > ROUNDING * size
    better, worse = (more & (group_ids[:, None] == group_ids)).nonzero(as_tuple=True)
    return better, worse


@torch.no_grad()
def step_returns(turn_rewards: Tensor, gamma: float) -> Tensor:
    """``sum_k gamma^k r_{t+k}`` over the turns of each episode, ``[batch, turns]``.

    Example::

        step_returns(tensor([[0.0, 0.0, 1.0]]), 0.5)  # [[0.25, 0.5, 1.0]]
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    returns = turn_rewards.clone()
    for turn in reversed(range(turn_rewards.shape[1] - 1)):
        returns[:, turn] += gamma * returns[:, turn + 1]
    return returns


def _deviation(returns: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """``R - mean`` of the group, and which episodes count."""
    size = groups.size()
    counts = groups.valid & (size >= 2)
    # Measured from the group's smallest return, equal returns are zeros, and stay zeros without rounding.
    above = groups.above_smallest(returns)
    return torch.where(counts, above - groups.sum(above) / size.clamp(min=1), 0.0), counts
