"""Which episodes to imitate: filtered behaviour cloning on graded episodes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from imagination.learning.advantages.groups import ROUNDING, checked_returns


@torch.no_grad()
def best_of_groups(returns: Tensor, group_ids: Tensor, valid: Tensor, *, fraction: float, min_return: float) -> Tensor:
    """The best ``fraction`` of each group, of those that earned at least ``min_return``.

    Both halves of the rule are needed: the threshold alone floods the update with easy tasks, the fraction alone clones
    the least bad failures of the hard ones. What is kept is learned by cross-entropy: no ratio, no advantage.

    Args:
        returns, group_ids, valid: as in ``group_relative``. A group of one is a group: nothing is compared but rank.
        fraction: in (0, 1]; ``ceil(fraction * n)`` of the ``n`` valid episodes of a group. Ties with the last of them
            are kept as well, so the order of episodes decides nothing.
        min_return: in units of return.

    Returns:
        ``[n]`` bool.

    Raises:
        ValueError: as ``group_relative``, or ``fraction`` is out of range.

    Example::

        one_group = tensor([0, 0, 0, 0]), tensor([True, True, True, True])
        best_of_groups(tensor([1.0, 0.5, 0.0, 0.5]), *one_group, fraction=0.5, min_return=0.1)
        # [True, True, False, True]: two of four, and a tie
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}")
    returns = checked_returns("best_of_groups", returns, group_ids, valid)
    kept = torch.zeros_like(valid)
    for group in group_ids[valid].unique():
        members = valid & (group_ids == group)
        wanted = math.ceil(fraction * int(members.sum()))
        border = returns[members].sort(descending=True).values[wanted - 1]
        kept |= members & (returns >= border - ROUNDING * border.abs())
    return kept & (returns >= min_return)
