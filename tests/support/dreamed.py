"""Dreamed episodes by hand."""

from __future__ import annotations

from collections.abc import Sequence

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
