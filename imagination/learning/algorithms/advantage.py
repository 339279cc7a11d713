"""The advantage part of an algorithm: settings that, called with episodes, judge them."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from imagination.learning.advantages import broadcast_over_tokens, whiten_by
from imagination.learning.algorithms.episodes import Episodes, Judged, Rewards


class AdvantagePart(Protocol):
    """Frozen settings with facts about what they read.

    Attributes:
        needs_critic, needs_groups: values, and several episodes of one start.
        judges_turns: turns are judged, for which no mask is read.
        adds_up: only the sum of an episode's rewards is read, so how they are spread over its turns changes nothing.
    """

    needs_critic: ClassVar[bool]
    needs_groups: ClassVar[bool]
    judges_turns: ClassVar[bool]
    adds_up: ClassVar[bool]

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged: ...


def per_row_advantages(episodes: Episodes, per_row: Tensor, counts: Tensor) -> Judged:
    """One number an episode; the others are neither judged nor trained."""
    chosen = counts[:, None]
    return Judged(broadcast_over_tokens(per_row, episodes.judged_tokens & chosen), episodes.acted & chosen)


def whitened(
    gains: Tensor, mask: Tensor, wanted: bool, sources: Tensor | None, targets: Tensor | None = None
) -> Tensor:
    """Whitened over the mask of each source if that is wanted; zero outside it in any case.

    Args:
        sources: as in ``Episodes``.
        targets: returns that ``gains`` are what is left of after values were taken off, where that is so.
    """
    if not wanted:
        return torch.where(mask, gains, 0.0)
    size = None if targets is None else float(torch.where(mask, targets, 0.0).abs().amax()) if mask.any() else 0.0
    return whiten_by(gains, mask, sources, size)


def refuse_advantage_mask(name: str, episodes: Episodes) -> None:
    """
    Raises:
        ValueError: there is one.
    """
    if episodes.advantage_mask is not None:
        raise ValueError(f"{name} judges turns, which have no advantage_mask: leave it out, or choose ppo or grpo")
