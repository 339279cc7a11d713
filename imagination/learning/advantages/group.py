"""Advantages without a critic: an episode against the episodes that share its start.

``counts`` is false where the advantage is no statement about the episode and its tokens belong in no loss and no
denominator: the episode failed, or it is the only valid one of its group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.advantages.groups import Groups, checked_returns


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
    if std_eps <= 0:
        raise ValueError(f"std_eps must be positive, got {std_eps}")
    returns = checked_returns("group_relative", returns, group_ids, valid)
    groups = Groups.of(group_ids, valid)
    deviation, counts = _deviation(returns, groups)
    if not normalise_std:
        return deviation, counts
    std = (groups.sum(deviation.square()) / (groups.size() - 1).clamp(min=1)).sqrt()
    return deviation / (std + std_eps), counts


@torch.no_grad()
def leave_one_out(returns: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """RLOO: the return minus the mean of the *other* episodes of the group, ``n / (n - 1) (R - mean)``.

    Ahmadian et al. 2024 (arXiv 2402.14740, section 3.2). The baseline does not depend on the episode itself, so the
    policy gradient stays unbiased, and no deviation is divided by.

    Args:
        returns, group_ids, valid: as in ``group_relative``.

    Returns:
        ``(advantages, counts)``, both ``[n]``, in units of reward, as in ``group_relative``.

    Raises:
        ValueError: as ``group_relative``.

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

    Args:
        returns, group_ids, valid: as in ``group_relative``.

    Returns:
        ``[n]`` bool, false for failed episodes and for groups of one.

    Raises:
        ValueError: as ``group_relative``.

    Example::

        informative(tensor([1.0, 0.0, 1.0, 1.0]), tensor([1, 1, 2, 2]), tensor([True] * 4))
        # [True, True, False, False]
    """
    returns = checked_returns("informative", returns, group_ids, valid)
    groups = Groups.of(group_ids, valid)
    differs = groups.sum(groups.above_smallest(returns).ne(0).to(returns.dtype)) > 0
    return valid & differs


def _deviation(returns: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """``R - mean`` of the group, and which episodes count."""
    size = groups.size()
    counts = groups.valid & (size >= 2)
    # Measured from the group's smallest return, equal returns are zeros, and stay zeros without rounding.
    above = groups.above_smallest(returns)
    return torch.where(counts, above - groups.sum(above) / size.clamp(min=1), 0.0), counts
