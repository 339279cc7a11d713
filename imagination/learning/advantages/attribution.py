"""Stepwise progress attribution (SPA-RL): a final reward, spread over the turns that brought it about."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from imagination.learning.shapes import at_least_fp32


class ProgressEstimator(nn.Module):
    """What each turn contributed to the final reward, from a vector that describes the turn.

    The vectors are the caller's: hidden states of the policy at the turn's last action token, say. Trained with
    ``attribution_error``, so that the contributions of an episode add up to its final reward.

    Args:
        features: size of a turn's vector.
        hidden: width of the one hidden layer.
    """

    def __init__(self, features: int, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, turns: Tensor, exists: Tensor) -> Tensor:
        """
        Args:
            turns: ``[batch, turns, features]``; may be anything where ``exists`` is false.
            exists: ``[batch, turns]`` bool.

        Returns:
            contributions ``[batch, turns]``, in units of the final reward, exactly zero where ``exists`` is false.
        """
        turns = turns.masked_fill(~exists[..., None], 0.0)
        found: Tensor = self.layers(turns)[..., 0]
        return found.masked_fill(~exists, 0.0)


def attribution_error(contributions: Tensor, final_rewards: Tensor, valid: Tensor, *, denominator: float) -> Tensor:
    """Squared error of the sum of an episode's contributions against its final reward: what trains the estimator.

    Wang et al. 2025, "SPA-RL" (arXiv 2505.20732).

    Args:
        contributions: ``[batch, turns]``, zero where there is no turn.
        final_rewards: ``[batch]``, constants.
        valid: ``[batch]`` bool, false for failed episodes.
        denominator: number of valid episodes of the global batch.

    Returns:
        scalar with a gradient.

    Raises:
        ValueError: shapes disagree, ``valid`` is not bool, or ``denominator`` is not positive.

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

    Args:
        contributions: ``[batch, turns]``, as ``ProgressEstimator`` gives them.
        grounded: ``[batch, turns]`` bool, whether the environment could execute the turn's action.
        exists: ``[batch, turns]`` bool.
        grounded_weight: of an executable action, in units of reward.

    Returns:
        ``[batch, turns]`` for ``place_turn_rewards``, in place of the environment's rewards; exactly zero where
        ``exists`` is false.

    Raises:
        ValueError: shapes disagree or a mask is not bool.

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
