"""How much of the real world this process has used: requests, seconds and failures of all its worker pools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class PoolStats:
    """Since the pool was made. ``steps`` and ``resets`` count requests, also those that failed: real interaction used.

    Attributes:
        seconds: inside these requests, the start of a process included and the wait for a free worker not; those of
            workers side by side add up.
        crashes, timeouts, garbage: workers lost, each a failed episode unless the worker died between episodes.
            ``garbage`` are answers that do not keep the protocol of ``real_envs.env``.
    """

    steps: int = 0
    resets: int = 0
    seconds: float = 0.0
    crashes: int = 0
    timeouts: int = 0
    garbage: int = 0

    def __add__(self, other: PoolStats) -> PoolStats:
        return PoolStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: PoolStats) -> PoolStats:
        return PoolStats(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


_TOTAL: ContextVar[PoolStats] = ContextVar("real_interaction", default=PoolStats())  # noqa: B039  one for all


def counted_here() -> PoolStats:
    """What pools count for, beside their own numbers: the process, or ``count_apart`` where that is around."""
    return _TOTAL.get()


def real_steps_taken() -> int:
    """Steps that all pools of this process have taken so far: how a run proves that it took none."""
    return _TOTAL.get().steps


def real_interaction() -> PoolStats:
    """What all pools of this process have done so far; the difference of two is what was done between them.

    Within ``count_apart`` it is what was done there.
    """
    return replace(_TOTAL.get())


@contextmanager
def count_apart() -> Iterator[PoolStats]:
    """What is done within counts for the object that it gives, and not for ``real_interaction`` elsewhere.

    A context of its own (``contextvars``): what goes on at the same time in another thread counts as ever.
    """
    token = _TOTAL.set(mine := PoolStats())
    try:
        yield mine
    finally:
        _TOTAL.reset(token)
