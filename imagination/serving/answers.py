"""What a session answers, and the typed ways in which it refuses to; every protocol writes these in its own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from imagination.rollout.dream_env import JUDGEMENTS
from real_envs.env import StepResult
from real_envs.trajectory import StopReason


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
class Answer:
    """What a reset or a step brought.

    Attributes:
        text: what the policy sees.
        reward: of this step; ``None`` where there is none, which is not 0.0: after a reset, and where the world model's
            context is full.
        terminated: the dreamed world ended (no bootstrap).
        truncated: the dream was cut (bootstrap): ``stop`` says by what.
        task: its id.
        seed: decides the start state and every dreamed turn.
        turn: how many actions the episode has had.
        stop: why it is over; ``None`` while it goes on.
        trusted: the guard's verdict on this step; ``None`` after a reset. What is not trusted pays nothing.
        by_rule: a rule of the log answered, not the world model.
        judgements: the world model's own confidence, in (0, 1], and what else it says of the step (``JUDGEMENTS``).
    """

    text: str
    reward: float | None
    terminated: bool
    truncated: bool
    task: str
    seed: int
    turn: int
    stop: StopReason | None = None
    trusted: bool | None = None
    by_rule: bool = False
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


def answer_of(result: StepResult, task: str, seed: int, turn: int, max_turns: int) -> Answer:
    """The answer to a step; the last one that an episode may have is truncated.

    What the world model thought (``info["reasoning"]``) is not part of it: it may hold facts that are hidden from
    policies.
    """
    limit = turn >= max_turns and not (result.terminated or result.truncated)
    stop = StopReason.TERMINATED if result.terminated else result.stop
    judgements = {name: value for name in JUDGEMENTS if isinstance(value := result.info.get(name), float)}
    return Answer(
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
