"""The protocols of environments, real or dreamed, and of the agents that play in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from real_envs.trajectory import Observation, StopReason, Trace, Turn


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to solve, such as one TextWorld game."""

    id: str  # unique, stable across runs; the key by which data is split
    # what the environment needs to load it, such as ``{"path": "games/tw-7.z8"}``
    spec: Mapping[str, str] = field(default_factory=dict)
    # what only the environment and its judge may know, such as a gold answer or a plan. Whatever must not reach a
    # policy is declared here or in ``Observation.privileged``: neither is ever rendered into tokens.
    privileged: Mapping[str, object] = field(default_factory=dict, repr=False)
    # facts of its initial state, a line each. The world model may read them (``worldmodel.facts``), no policy ever
    # does.
    world_facts: tuple[str, ...] = field(default=(), repr=False)
    # turns of an earlier dream from the same start that this one goes on from: its own, though nobody samples them anew
    dreamed: tuple[Turn, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action did.

    ``terminated`` is the world's end (no bootstrap); ``truncated`` is a limit of ours (bootstrap). Never merged.
    ``stop`` may name the kind of truncation; ``info`` goes into ``Turn.info``. Scalars of numpy and torch become plain.
    """

    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: Mapping[str, float | str | bool] = field(default_factory=dict)
    stop: StopReason | None = None

    def __post_init__(self) -> None:
        for name in ("reward", "terminated", "truncated"):
            value: Any = getattr(self, name)
            if getattr(value, "shape", None) == ():
                object.__setattr__(self, name, value.item())


class EnvFailure(Exception):
    """The environment broke (not: the agent lost). Carries a ``StopReason`` whose ``is_failure`` is true.

    The rollout turns it into a typed, counted episode that enters no loss unless an action provoked it; nobody turns it
    into an observation.
    """

    def __init__(self, reason: StopReason, detail: str) -> None:
        if not reason.is_failure:
            raise ValueError(f"{reason} is no failure")
        super().__init__(detail)
        self.reason = reason


class Env(Protocol):
    """One episode at a time. Real and dreamed environments look the same to the rollout.

    ``reset`` may be called again at any time, also after a failure. ``step`` needs a reset first and must not be called
    after ``terminated`` or ``truncated``. Both raise ``EnvFailure`` and nothing else for faults of the environment; an
    action the world does not understand is an ordinary step, answered by an ordinary observation.
    """

    async def reset(self, task: Task, seed: int) -> Observation: ...

    async def step(self, action: str) -> StepResult: ...

    async def close(self) -> None: ...


class TaskSet(Protocol):
    """The tasks of a benchmark by split, and environments to play them in."""

    def tasks(self, split: str) -> Sequence[Task]: ...

    def make_env(self) -> Env: ...

    async def close(self) -> None: ...


class Actor(Protocol):
    """An agent in one episode."""

    async def act(self) -> str: ...

    def observe(self, observation: Observation) -> None: ...

    def trace(self) -> Trace | None:
        """The tokens that a language model has read and written so far; ``None`` for a script."""
        ...

    def close(self) -> None: ...


class Agent(Protocol):
    """Anything that can play, a language model or a script. ``name`` tells agents apart in logs."""

    @property
    def name(self) -> str: ...

    def start(self, observation: Observation, seed: int) -> Actor:
        """An actor for the episode that begins with this observation of ``Env.reset``."""
        ...
