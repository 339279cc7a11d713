"""Dreamed episodes, by hand and of a world model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from imagination.rollout.dream_env import DreamEnv, Start
from real_envs.env import StepResult, Task
from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory, Turn


def dream(
    rewards: Sequence[float | None],
    info: Sequence[dict[str, float | str | bool]] = (),
    prefix: int = 0,
    said: Sequence[str] = (),
    stop: StopReason = StopReason.TERMINATED,
    group: str = "g",
    unanswered: bool = False,
) -> Trajectory:
    """One agent token a turn, after one of the world."""
    turns = tuple(
        Turn(f"a{k}", said[k] if said else f"o{k}", reward, False, info[k] if info else {})
        for k, reward in enumerate(rewards)
    )
    own = len(turns) - prefix + unanswered
    trace = Trace(
        ids=tuple(range(5, 5 + 2 * own)),
        owners=(Owner.ENV, Owner.AGENT) * own,
        logprobs=(None, -0.5) * own,
        turns=tuple(x for k in range(own) for x in (-1, prefix + k)),
    )
    return Trajectory("e", "t", group, Source.DREAM, "policy", 0, "S", turns, stop, prefix_turns=prefix, trace=trace)


def steps(model: Any, actions: Sequence[str], start: str) -> list[StepResult]:
    """What the actions come to in a dream of the world model."""
    env = DreamEnv(model, {"s": Start("t", start)})

    async def run() -> list[StepResult]:
        await env.reset(Task("t", {"start": "s"}), 0)
        return [await env.step(action) for action in actions]

    return asyncio.run(run())
