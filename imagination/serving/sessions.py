"""Sessions: dreamed episodes for clients of any protocol, bounded in number and age.

All sessions live on one event loop, so that the engine batches their concurrent steps.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from imagination.rollout.dream_env import JUDGEMENTS, Start
from imagination.settings.dreams import ServeSettings
from real_envs.calls import Tool
from real_envs.env import Env, EnvFailure, StepResult, Task
from real_envs.seeding import derive_seed
from real_envs.trajectory import Observation, StopReason
from worldmodel.formats.retrieval import TransitionIndex

# Sixty-three bits: too many to guess, and still an integer in every language, as AgentGym's handles are.
_ID_BITS = 63
_SEEDS = 2**63
_DRAWN_SEEDS = 2**31


@dataclass(frozen=True)
class DreamWorld:
    """The dreams of a run's world model. Raises ``ValueError``: there is no start state."""

    name: str  # of the run
    version: str  # of the world model's weights
    make_env: Callable[[], Env]  # an environment for one session, such as a ``DreamEnv`` over ``starts``
    starts: Mapping[str, Start]  # start states by name; a task may have several, which a seed chooses among
    max_turns: int  # of an episode, its logged beginning aside; the dream is then truncated
    # the logged transitions, which the play page shows; ``None`` where the log has none with a reward
    index: TransitionIndex | None = None
    tools: Sequence[Tool] = ()  # of a world whose actions are calls of them
    _by_task: dict[str, list[str]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, start in sorted(self.starts.items()):
            self._by_task.setdefault(start.task_id, []).append(name)
        if not self._by_task:
            raise ValueError("there is no state to dream from")

    @property
    def tasks(self) -> list[str]:
        """Ids of the tasks, sorted by their start states' names; their places are AgentGym's ``data_idx``."""
        return list(self._by_task)

    def task(self, task_id: str | None, seed: int) -> Task:
        """Where the episode of this task and seed begins; without a task, the seed's remainder is the task's place.
        Raises ``KeyError``: there is no such task.
        """
        chosen = self.tasks[seed % len(self.tasks)] if task_id is None else task_id
        names = self._by_task[chosen]
        return Task(chosen, {"start": names[derive_seed("served start", seed) % len(names)]})


def opening(observation: Observation) -> str:
    """What a client reads first: the log's first observation and, in the middle of an episode, what has happened."""
    turns = "".join(f"\n> {turn.action}\n{turn.observation}" for turn in observation.history)
    return observation.text + turns


class Refusal(StrEnum):
    """Why a request was not served."""

    FULL = "full"  # all sessions are taken
    UNKNOWN_SESSION = "unknown_session"  # never there, closed, or idle for too long
    UNKNOWN_TASK = "unknown_task"
    INVALID = "invalid"  # a value that no request may have
    NOT_RUNNING = "not_running"  # a step before a reset, or after the episode's end
    BUSY = "busy"  # the session's last request is still under way
    FAILED = "failed"  # the dream broke: no observation, whatever the protocol
    INTERNAL = "internal"  # a mistake of ours


class Refused(Exception):
    """A request that was not served. The message is for the client."""

    def __init__(self, kind: Refusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class SessionStep:
    """What a reset or a step brought."""

    text: str  # what the policy sees
    # of this step; ``None`` where there is none, which is not 0.0: after a reset, and where the world model's context
    # is full
    reward: float | None
    terminated: bool  # the dreamed world ended (no bootstrap)
    truncated: bool  # the dream was cut (bootstrap): ``stop`` says by what
    task: str  # its id
    seed: int  # decides the start state and every dreamed turn
    turn: int  # how many actions the episode has had
    stop: StopReason | None = None  # why it is over; ``None`` while it goes on
    # the guard's verdict on this step; ``None`` after a reset. What is not trusted pays nothing
    trusted: bool | None = None
    by_rule: bool = False  # a rule of the log answered, not the world model
    # the world model's own confidence, in (0, 1], and what else it says of the step (``JUDGEMENTS``)
    judgements: Mapping[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """The one end that most protocols know."""
        return self.terminated or self.truncated

    def facts(self) -> dict[str, object]:
        """All but text, reward and ``done``: no policy need read it."""
        return {
            "task": self.task,
            "seed": self.seed,
            "turn": self.turn,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "stop": None if self.stop is None else self.stop.value,
            "trusted": self.trusted,
            **({"by_rule": True} if self.by_rule else {}),
            **self.judgements,
        }


def answer_of(result: StepResult, task: str, seed: int, turn: int, max_turns: int) -> SessionStep:
    """The answer to a step, without ``info["reasoning"]``, which may hold facts that are hidden from policies."""
    limit = turn >= max_turns and not (result.terminated or result.truncated)
    stop = StopReason.TERMINATED if result.terminated else result.stop
    judgements = {name: value for name in JUDGEMENTS if isinstance(value := result.info.get(name), float)}
    return SessionStep(
        text=result.observation.text,
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated or limit,
        task=task,
        seed=seed,
        turn=turn,
        stop=StopReason.TURN_LIMIT if limit else stop,
        trusted=result.stop is not StopReason.UNSURE and not result.info.get("doubted", False),
        by_rule="rule" in result.info,
        judgements=judgements,
    )


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


class DreamSession:
    """One dreamed episode at a time; ``Sessions`` makes it."""

    def __init__(
        self, id: str, world: DreamWorld, settings: ServeSettings, counts: SessionCounts, clock: Callable[[], float]
    ) -> None:
        self.id = id
        self.used = clock()
        self.busy = False
        self._world, self._settings, self._counts, self._clock = world, settings, counts, clock
        self._env = world.make_env()
        self._closed = False
        self._running = False
        self._task: Task | None = None
        self._seed = self._turn = 0
        self.last: SessionStep | None = None
        self.on_close: Callable[[], Awaitable[None]] | None = None  # of a protocol that keeps something beside it

    async def reset(self, task: object = None, seed: object = None) -> SessionStep:
        """Begins an episode, also where another one is under way.

        Args:
            task: its id; ``None`` lets the seed choose.
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
            try:
                observation = await self._env.reset(chosen, seed)
            except EnvFailure as failure:
                raise Refused(Refusal.FAILED, f"{failure.reason}: {failure}") from failure
        self._task, self._seed, self._turn, self._running = chosen, seed, 0, True
        self.last = SessionStep(opening(observation), None, False, False, chosen.id, seed, 0)
        return self.last

    async def step(self, action: object) -> SessionStep:
        """Raises ``Refused``: no episode is running, the action is no text or too long, or the dream broke, which ends
        it.
        """
        self._check_free()
        if not isinstance(action, str):
            raise Refused(Refusal.INVALID, "an action is a text")
        if len(action) > self._settings.action_chars:
            raise Refused(Refusal.INVALID, f"an action has at most {self._settings.action_chars} characters")
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
        if self.on_close is not None:
            await self.on_close()

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
    """All that are open. Whoever has a session's id may use it, and nobody else can."""

    def __init__(self, world: DreamWorld, settings: ServeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.world, self.settings, self.counts = world, settings, SessionCounts()
        self._clock = clock
        self._open: dict[str, DreamSession] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, id: object) -> bool:
        return id in self._open

    async def open(self) -> DreamSession:
        """Raises ``Refused``: as many as may be are open, and none has been idle for too long."""
        if len(self._open) >= self.settings.sessions:
            await self.expire()
        if len(self._open) >= self.settings.sessions:
            raise Refused(Refusal.FULL, f"all {self.settings.sessions} sessions are taken")
        session = DreamSession(str(secrets.randbits(_ID_BITS)), self.world, self.settings, self.counts, self._clock)
        self._open[session.id] = session
        self.counts.opened += 1
        return session

    def get(self, id: str) -> DreamSession:
        """The session, which has thereby been used. Raises ``Refused``: there is none of this id."""
        session = self._open.get(id)
        if session is None:
            raise Refused(Refusal.UNKNOWN_SESSION, "there is no such session: it was closed, or idle for too long")
        session.used = self._clock()
        return session

    async def close(self, id: str) -> None:
        """Raises ``Refused``: there is none of this id."""
        session = self.get(id)
        del self._open[id]
        await session.close()

    async def expire(self) -> None:
        """Closes those that were idle for too long; a step that is under way is not idle."""
        oldest = self._clock() - self.settings.idle_seconds
        for session in list(self._open.values()):  # another may be used, or closed, while one is closed
            if session.id in self._open and session.used < oldest and not session.busy:
                await self.close(session.id)
                self.counts.expired += 1

    async def close_all(self) -> None:
        for id in list(self._open):
            await self.close(id)
