"""What is asked of an engine in this process, whose turn it is, and what has been done."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from policy.lm.engine import Sampling
from policy.lm.engines.inprocess.drafts import Draft


class Scheduled(Protocol):
    """Anything that knows how many requests wait for it."""

    @property
    def load(self) -> int: ...


class DeviceScheduler:
    """Lets that engine step next for which most requests wait, where several share one device.

    In a dream policy and world model alternate; without this each would run half-empty batches. An engine with a
    request always steps or waits for one that has more, so nothing stands still, provided that every request that is
    counted is going to be stepped: one that was cancelled or lost must not be part of a load.
    """

    def __init__(self) -> None:
        self._engines: WeakSet[Scheduled] = WeakSet()

    def join(self, engine: Scheduled) -> None:
        self._engines.add(engine)

    def admits(self, engine: Scheduled) -> bool:
        return all(engine.load >= other.load for other in self._engines)


async def wait_until_idle(engine: Scheduled) -> None:
    """Returns when every coroutine that can still run has reached its own request."""
    seen = -1
    while engine.load != seen:
        seen = engine.load
        for _ in range(3):
            await asyncio.sleep(0)


@dataclass(slots=True)
class Request:
    """One completion, or one text to score, that waits or runs.

    Attributes:
        ids: the prompt, or the whole text to score.
        uniforms: one in [0, 1) per token to sample, drawn from the request's own seed.
        draft: the guess that stands behind the tokens so far.
        score_from: log-probs of ``ids`` from here on are asked for, and nothing is sampled; ``None`` samples.
    """

    ids: np.ndarray
    sampling: Sampling
    uniforms: np.ndarray
    session: Hashable | None
    future: asyncio.Future[Any]
    draft: Draft | None = None
    score_from: int | None = None

    @property
    def known(self) -> int:
        """How many leading ids need no hidden state of their own, so that they may come from a cache."""
        return (len(self.ids) if self.score_from is None else self.score_from) - 1
