"""From when to when something ran, and for how long two things did at once."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of one clock.

    Example: ``Span(0.0, 3.0).both(Span(1.0, 5.0))`` is 2.0.
    """

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def both(self, other: Span) -> float:
        """For how long both ran."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


async def timed(work: Awaitable[T]) -> tuple[T, Span]:
    """What the work came to, and when it was done."""
    begin = time.perf_counter()
    result = await work
    return result, Span(begin, time.perf_counter())
