"""SPEAR's self-imitation: the policy's own recent successes, learned from once more."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

Episode = TypeVar("Episode")


@dataclass(frozen=True, slots=True)
class Kept(Generic[Episode]):
    """An episode of the buffer, its return, and the policy step that played it."""

    episode: Episode
    total: float
    step: int


class SelfImitationBuffer(Generic[Episode]):
    """Episodes that did better than the running median, while they are fresh (SPEAR, arXiv 2509.22601).

    The median of recent returns stands for what the policy does by now; an episode's advantage is re-estimated against
    it whenever the episode is drawn, so yesterday's success is no success any more once everything succeeds.

    Args:
        capacity: episodes kept, and returns that the median is of; the oldest go first.
        max_age: policy steps after which an episode is too far off-policy.
    """

    def __init__(self, capacity: int = 2048, max_age: int = 5) -> None:
        if capacity < 1 or max_age < 0:
            raise ValueError(f"capacity must be at least 1 and max_age at least 0, got {capacity} and {max_age}")
        self.max_age = max_age
        self._kept: deque[Kept[Episode]] = deque(maxlen=capacity)
        self._returns: deque[float] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def baseline(self) -> float | None:
        """Median of the recent returns; ``None`` before there are any."""
        return median(self._returns) if self._returns else None

    def add(self, episodes: Sequence[Episode], returns: Sequence[float], step: int) -> None:
        """Take what was played at ``step``; all returns enter the median, only episodes above it are kept.

        Failed episodes are the caller's to leave out.
        """
        self._returns.extend(returns)
        for episode, total in zip(episodes, returns, strict=True):
            if total > self._baseline():
                self._kept.append(Kept(episode, total, step))
        self._forget(step)

    def draw(self, count: int, step: int, rng: random.Random) -> list[tuple[Episode, float]]:
        """At most ``count`` different episodes, none older than ``max_age``, with their advantages over the median.

        All advantages are positive; what has fallen to the median is not drawn.
        """
        self._forget(step)
        better = [kept for kept in self._kept if kept.total > self._baseline()]
        chosen = rng.sample(better, min(count, len(better)))
        return [(kept.episode, kept.total - self._baseline()) for kept in chosen]

    def state(self) -> tuple[list[tuple[Episode, float, int]], list[float]]:
        """Everything that the buffer holds, oldest first, as plain lists: for a checkpoint."""
        return [(kept.episode, kept.total, kept.step) for kept in self._kept], list(self._returns)

    def restore(self, kept: Sequence[tuple[Episode, float, int]], returns: Sequence[float]) -> None:
        """Takes over what ``state`` gave, in place of what is here."""
        self._kept = deque((Kept(*one) for one in kept), maxlen=self._kept.maxlen)
        self._returns = deque(returns, maxlen=self._returns.maxlen)

    def _baseline(self) -> float:
        return float("inf") if self.baseline is None else self.baseline

    def _forget(self, step: int) -> None:
        # Steps never go back, so the oldest are at the front.
        while self._kept and step - self._kept[0].step > self.max_age:
            self._kept.popleft()
