"""Sessions: dreamed episodes for clients elsewhere, bounded in number and age. No protocol is known here.

All sessions live on one event loop, so that the engine makes one batch of what they ask at the same time.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from imagination.serving.answers import Answer, Refusal, Refused, answer_of
from imagination.serving.world import DreamWorld, opening
from real_envs.env import EnvFailure, Task

# Sixty-three bits: too many to guess, and still an integer in every language, as AgentGym's handles are.
_ID_BITS = 63
_SEEDS = 2**63
_DRAWN_SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What clients may use up.

    Attributes:
        sessions: open at a time.
        idle_seconds: after which a session that nothing is asked of is closed.
        action_chars: of an action.
    """

    sessions: int = 64
    idle_seconds: float = 600.0
    action_chars: int = 2000


@dataclass
class SessionCounts:
    """What has happened since the server began."""

    opened: int = 0
    expired: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    untrusted: int = 0
    episodes: Counter[str] = field(default_factory=Counter)  # by stop reason, failures included
    refused: Counter[str] = field(default_factory=Counter)  # by kind


class Session:
    """One dreamed episode at a time; ``Sessions`` makes it."""

    def __init__(
        self, id: str, world: DreamWorld, limits: SessionLimits, counts: SessionCounts, clock: Callable[[], float]
    ) -> None:
        self.id = id
        self.used = clock()
        self.busy = False
        self._world, self._limits, self._counts, self._clock = world, limits, counts, clock
        self._env = world.make_env()
        self._closed = False
        self._running = False
        self._task: Task | None = None
        self._seed = self._turn = 0
        self.last: Answer | None = None

    async def reset(self, task: object = None, seed: object = None) -> Answer:
        """Begins an episode, also where another one is under way.

        Args:
            task: id of a task; ``None`` lets the seed choose.
            seed: 0 to 2**63 - 1; ``None`` draws one, which the answer names.

        Raises:
            Refused: there is no such task, a value is malformed, or the session is busy or closed.
        """
        self._check_free()
        if seed is None:
            seed = secrets.randbelow(_DRAWN_SEEDS)
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _SEEDS:
            raise Refused(Refusal.INVALID, f"seed wants an integer from 0 to {_SEEDS - 1}")
        if task is not None and not isinstance(task, str):
            raise Refused(Refusal.INVALID, "task wants the id of a task, a text")
        try:
            chosen = self._world.task(task, seed)
        except KeyError:
            raise Refused(Refusal.UNKNOWN_TASK, f"there is no task {str(task)[:80]!r}") from None
        async with self._working():
            observation = await self._env.reset(chosen, seed)
        self._task, self._seed, self._turn, self._running = chosen, seed, 0, True
        self.last = Answer(opening(observation), None, False, False, chosen.id, seed, 0)
        return self.last

    async def step(self, action: object) -> Answer:
        """
        Raises:
            Refused: no episode is running, the action is no text or too long, or the dream broke, which ends it.
        """
        self._check_free()
        if not isinstance(action, str):
            raise Refused(Refusal.INVALID, "an action is a text")
        if len(action) > self._limits.action_chars:
            raise Refused(Refusal.INVALID, f"an action has at most {self._limits.action_chars} characters")
        if self._task is None or not self._running:
            raise Refused(Refusal.NOT_RUNNING, "no episode is running: reset first")
        begun = time.perf_counter()
        self._running = False  # unless it goes well: a dream that broke, or whose step was cancelled, is over
        async with self._working():
            try:
                # half a surrogate pair is no text that a tokenizer can read
                result = await self._env.step(action.encode("utf-8", "replace").decode())
            except EnvFailure as failure:
                self._counts.episodes[failure.reason] += 1
                raise Refused(Refusal.FAILED, f"{failure.reason}: {failure}") from failure
        self._turn += 1
        answer = answer_of(result, self._task.id, self._seed, self._turn, self._world.max_turns)
        self._running = not answer.done
        self._counts.steps += 1
        self._counts.step_seconds += time.perf_counter() - begun
        self._counts.untrusted += not answer.trusted
        if answer.stop is not None:
            self._counts.episodes[answer.stop] += 1
        self.last = answer
        return answer

    async def close(self) -> None:
        """Frees what the engine keeps for it; a step that is under way does so when it ends."""
        self._closed, self._running = True, False
        if not self.busy:
            await self._env.close()

    @asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy, self.used = False, self._clock()
            if self._closed:
                await self._env.close()

    def _check_free(self) -> None:
        if self._closed:
            raise Refused(Refusal.UNKNOWN_SESSION, "the session is closed")
        if self.busy:
            raise Refused(Refusal.BUSY, "the session's last request is still under way")


class Sessions:
    """All that are open. Whoever has a session's id may use it, and nobody else can.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, world: DreamWorld, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.world, self.limits, self.counts = world, limits, SessionCounts()
        self._clock = clock
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, id: object) -> bool:
        return id in self._open

    async def open(self) -> Session:
        """
        Raises:
            Refused: as many as may be are open, and none has been idle for too long.
        """
        if len(self._open) >= self.limits.sessions:
            await self.expire()
        if len(self._open) >= self.limits.sessions:
            raise Refused(Refusal.FULL, f"all {self.limits.sessions} sessions are taken")
        session = Session(str(secrets.randbits(_ID_BITS)), self.world, self.limits, self.counts, self._clock)
        self._open[session.id] = session
        self.counts.opened += 1
        return session

    def get(self, id: str) -> Session:
        """The session, which has thereby been used.

        Raises:
            Refused: there is none of this id.
        """
        session = self._open.get(id)
        if session is None:
            raise Refused(Refusal.UNKNOWN_SESSION, "there is no such session: it was closed, or idle for too long")
        session.used = self._clock()
        return session

    async def close(self, id: str) -> None:
        """
        Raises:
            Refused: there is none of this id.
        """
        session = self.get(id)
        del self._open[id]
        await session.close()

    async def expire(self) -> None:
        """Closes those that were idle for too long; a step that is under way is not idle."""
        oldest = self._clock() - self.limits.idle_seconds
        for session in [s for s in self._open.values() if s.used < oldest and not s.busy]:
            await self.close(session.id)
            self.counts.expired += 1

    async def close_all(self) -> None:
        for id in list(self._open):
            await self.close(id)
