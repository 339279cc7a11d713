"""SPEAR's self-imitation (arXiv 2509.22601): the policy's own recent successes are kept, saved and replayed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from lightning.pytorch.callbacks import Callback

from imagination.learning.experience import total_reward
from imagination.settings import SelfImitationSettings
from policy.lm.batch import Row
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source

# What a row is in a checkpoint: plain lists of the tokens, who made them, with which log-probs, and what each counts.
_SAVED = ("ids", "action_mask", "behavior_logprobs", "replay_weight", "temperature")

Episode = TypeVar("Episode")


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
        self._kept: deque[tuple[Episode, float, int]] = deque(maxlen=capacity)  # its return; the step that played it
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
                self._kept.append((episode, total, step))
        self._forget(step)

    def draw(self, count: int, step: int, rng: random.Random) -> list[tuple[Episode, float]]:
        """At most ``count`` different episodes, none older than ``max_age``, with their advantages over the median.

        All advantages are positive; what has fallen to the median is not drawn.
        """
        self._forget(step)
        better = [(episode, total) for episode, total, _ in self._kept if total > self._baseline()]
        chosen = rng.sample(better, min(count, len(better)))
        return [(episode, total - self._baseline()) for episode, total in chosen]

    def state(self) -> tuple[list[tuple[Episode, float, int]], list[float]]:
        """Everything that the buffer holds, oldest first, as plain lists: for a checkpoint."""
        return list(self._kept), list(self._returns)

    def restore(self, kept: Sequence[tuple[Episode, float, int]], returns: Sequence[float]) -> None:
        """Takes over what ``state`` gave, in place of what is here."""
        self._kept = deque(kept, maxlen=self._kept.maxlen)
        self._returns = deque(returns, maxlen=self._returns.maxlen)

    def _baseline(self) -> float:
        return float("inf") if self.baseline is None else self.baseline

    def _forget(self, step: int) -> None:
        # Steps never go back, so the oldest are at the front.
        while self._kept and step - self._kept[0][2] > self.max_age:
            self._kept.popleft()


def replay_row(row: Row) -> Row:
    """A played row as it is learned from again: nothing of it enters the algorithm's own loss, mean or count.

    It keeps the log-probs that were recorded when it was sampled, and a weight for each token that it had then.
    """
    kept = {"behavior_logprobs": row.behavior_logprobs, "temperature": row.temperature}
    return Row(row.ids, row.action_mask, Source.REPLAY, **kept, replay_weight=row.rl_weight)


class Replays(Callback):
    """The buffer of SPEAR between the updates; see ``SelfImitationBuffer`` for what is kept.

    Args:
        seed: of the run; which episodes are drawn depends on it, on the update and on the buffer alone.
    """

    def __init__(self, settings: SelfImitationSettings, seed: int) -> None:
        self._seed = seed
        self._buffer: SelfImitationBuffer[Row] = SelfImitationBuffer(settings.capacity, settings.max_age)

    def draw(self, update: int, count: int) -> list[Row]:
        """At most ``count`` rows of earlier updates, each with its advantage over the median on all of its tokens.

        Call it before ``add``: what this update played is learned from once already.
        """
        rng = random.Random(derive_seed("replay", self._seed, update))
        return [
            replace(row, advantages=torch.where(row.replay_weight != 0, advantage, 0.0))
            for row, advantage in self._buffer.draw(count, update, rng)
        ]

    def add(self, update: int, rows: Sequence[Row]) -> dict[str, float]:
        """Takes in the played rows of an update, none of an outage; returns what is to be logged."""
        self._buffer.add([replay_row(row) for row in rows], [total_reward(row) for row in rows], update)
        baseline = self._buffer.baseline
        return {"replays_kept": len(self._buffer)} | ({} if baseline is None else {"replay_baseline": baseline})

    def state_dict(self) -> dict[str, Any]:
        kept, returns = self._buffer.state()
        rows = [({name: getattr(row, name).tolist() for name in _SAVED}, total, step) for row, total, step in kept]
        return {"kept": rows, "returns": returns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = [(Row(source=Source.REPLAY, **saved), total, step) for saved, total, step in state_dict["kept"]]
        self._buffer.restore(kept, state_dict["returns"])
