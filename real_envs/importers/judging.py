"""What is decided about imported episodes: whether they were solved, and which tasks are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

from real_envs.trajectory import RETURN_ROUNDING, Trajectory


def judged(episode: Trajectory, solved_at: float | None = None) -> Trajectory:
    """The episode with a success where the threshold gives it one, and a reward where only its success is known.

    A stated success stays. An episode without one that has rewards is solved where they add up to ``solved_at``. One
    that states success and has no reward earned it at its end: 1 where it was solved, else 0, and nothing before, so
    that a world model can learn what a success is.
    """
    rewarded = any(turn.reward is not None for turn in episode.turns)
    if episode.stop.is_failure or not episode.turns:
        return episode
    if episode.success is None and solved_at is not None and rewarded:
        return replace(episode, success=episode.total_reward >= solved_at - RETURN_ROUNDING)
    if episode.success is not None and not rewarded:
        *before, last = episode.turns
        paid = [replace(turn, reward=0.0) for turn in before]
        return replace(episode, turns=(*paid, replace(last, reward=float(episode.success))))
    return episode


def heldout_tasks(tasks: Collection[str], share: float) -> frozenset[str]:
    """About ``share`` of the tasks, always the same ones: those with the least hashes.

    At least one of two or more, and never all; none where the share is 0.
    """
    ranked = sorted(tasks, key=lambda task: hashlib.sha256(f"heldout/{task}".encode("utf-8", "replace")).digest())
    count = min(max(1, round(share * len(ranked))), len(ranked) - 1) if share > 0 and len(ranked) > 1 else 0
    return frozenset(ranked[:count])
