"""Advantages from returns to go: REINFORCE, REINFORCE++ and its variant with a group baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.advantages.gae import masked_gae
from imagination.learning.advantages.group import ROUNDING, group_relative
from imagination.learning.advantages.turns import broadcast_over_tokens
from imagination.learning.shapes import at_least_fp32, check_mask, check_shapes
from imagination.settings.algorithm_parts import GroupRelative, ReturnsToGo, TokenGae


@torch.no_grad()
def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of what is still to be earned, carried across the tokens that are not the agent's.

    A trainer that resets the sum where the mask is 0 loses, at each observation, all that the later turns earn.

    Returns:
        ``[batch, time]``, exactly zero outside ``mask``.

    Example::

        returns_to_go(tensor([[0.0, 0.0, 1.0]]), tensor([[True, False, True]]), gamma=0.5)  # [[0.5, 0, 1.0]]
    """
    # GAE without a critic and with lambda = 1 is the return to go.
    return masked_gae(rewards, torch.zeros_like(at_least_fp32(rewards)), mask, TokenGae(gamma, lam=1.0))[0]


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, size: float | None = None) -> Tensor:
    """``(x - mean) / (std + 1e-8)`` over the masked entries of the whole batch, unbiased deviation.

    Entries whose deviation is within ``ROUNDING`` of their size are equal, and become 0: divided by their deviation,
    rounding would look like a difference.

    Args:
        x: all episodes of the update, not a micro-batch; of any shape, which ``mask`` has, too.
        size: of the numbers whose differences ``x`` are, such as returns less values; by default of ``x`` itself.

    Returns:
        of ``x``'s dtype (fp32 at least), exactly zero outside ``mask``.

    Example::

        whiten(tensor([1.0, 3.0, nan]), tensor([True, True, False]))  # [-0.7071, 0.7071, 0]
    """
    check_shapes("whiten", x=x, mask=mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"whiten needs a bool mask, got {mask.dtype}")
    chosen = x[mask].double()
    if not len(chosen):
        return torch.zeros_like(at_least_fp32(x))
    centred = torch.where(mask, x.double() - chosen.mean(), 0.0)
    std = chosen.std(correction=min(1, len(chosen) - 1))
    if std <= ROUNDING * (float(chosen.abs().max()) if size is None else size):
        return torch.zeros_like(at_least_fp32(x))
    return (centred / (std + 1e-8)).to(at_least_fp32(x).dtype)


@torch.no_grad()
def whiten_by(x: Tensor, mask: Tensor, sources: Tensor | None, size: float | None = None) -> Tensor:
    """``whiten``, of the rows of each source by themselves.

    Over all rows together, what dreams pay more than the real world would be an advantage of every dreamed action.

    Args:
        sources: ``[batch]`` integers, equal for rows of one world; ``None``: all are of one.

    Example::

        whiten_by(tensor([[1.0], [3.0], [10.0], [12.0]]), ones, tensor([0, 0, 1, 1]))  # -0.71, 0.71, -0.71, 0.71
    """
    if sources is None:
        return whiten(x, mask, size)
    whitened = torch.zeros_like(at_least_fp32(x))
    for source in sources.unique():
        whitened += whiten(x, mask & (sources == source)[:, None], size)
    return whitened


@torch.no_grad()
def reinforce(
    rewards: Tensor, mask: Tensor, valid: Tensor, settings: ReturnsToGo, sources: Tensor | None = None
) -> Tensor:
    """REINFORCE: returns to go; REINFORCE++: whitened over all agent tokens of the batch (Hu 2025, arXiv 2501.03262).

    Args:
        rewards: may contain a KL penalty.
        valid: failed episodes get zeros, and enter neither mean nor deviation.
        sources: as in ``whiten_by``.

    Returns:
        ``[batch, time]``.

    Example::

        ones = tensor([[True], [True]])
        reinforce(tensor([[1.0], [0.0]]), ones, ones[:, 0], ReturnsToGo(whiten=True))  # [[0.7071], [-0.7071]]
    """
    mask = _of_valid("reinforce", mask, valid)
    gains = returns_to_go(rewards, mask, settings.gamma)
    return whiten_by(gains, mask, sources) if settings.whiten else gains


@torch.no_grad()
def reinforce_pp_baseline(
    returns: Tensor, group_ids: Tensor, valid: Tensor, mask: Tensor, sources: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with baseline: the group's mean is subtracted first, then all agent tokens are whitened together.

    The deviation is that of the batch, not of the group, so nearly equal groups are not blown up (arXiv 2501.03262).

    Returns:
        ``(advantages [n, time], counts [n])``.

    Example::

        ones = tensor([[True], [True]])
        reinforce_pp_baseline(tensor([3.0, 1.0]), tensor([0, 0]), tensor([True, True]), ones)[0]
        # [[0.7071], [-0.7071]]
    """
    deviation, counts = group_relative(returns, group_ids, valid, GroupRelative(normalise_std=False))
    mask = _of_valid("reinforce_pp_baseline", mask, counts)
    return whiten_by(broadcast_over_tokens(deviation, mask), mask, sources), counts


def _of_valid(where: str, mask: Tensor, valid: Tensor) -> Tensor:
    check_mask(where, mask)
    if valid.dtype != torch.bool or valid.shape != mask.shape[:1]:
        raise ValueError(f"{where} needs valid to be bool [{len(mask)}], got {valid.dtype} {tuple(valid.shape)}")
    return mask & valid[:, None]
