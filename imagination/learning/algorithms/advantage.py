"""The advantage part of an algorithm: settings that, called with episodes, judge them."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from imagination.learning.advantages import broadcast_over_tokens, whiten
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


def whitened(gains: Tensor, mask: Tensor, wanted: bool) -> Tensor:
    """Whitened over the mask if that is wanted; zero outside it in any case."""
    return whiten(gains, mask) if wanted else torch.where(mask, gains, 0.0)


def refuse_advantage_mask(name: str, episodes: Episodes) -> None:
    """
    Raises:
        ValueError: there is one.
    """
    if episodes.advantage_mask is not None:
        raise ValueError(f"{name} judges turns, which have no advantage_mask: leave it out, or choose ppo or grpo")
