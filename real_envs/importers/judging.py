"""What is decided about imported episodes: whether they were solved."""

from __future__ import annotations

from dataclasses import replace

from real_envs.trajectory import Trajectory


def judged(episode: Trajectory, solved_at: float | None = None) -> Trajectory:
    """The episode with a success where the threshold gives it one, and a reward where only its success is known.

    A stated success stays. An episode without one that has rewards is solved where they add up to ``solved_at``. One
    that states success and has no reward earned it at its end: the threshold, 1 without one, where it was solved, else
    0, and nothing before, so that a world model can learn what a success is. Where 0 is enough to solve, as with costs,
    nothing could tell the two apart, and they stay without rewards.
    """
    rewarded = any(turn.reward is not None for turn in episode.turns)
    if episode.stop.is_failure or not episode.turns:
        return episode
    if episode.success is None and solved_at is not None and rewarded:
        return replace(episode, success=episode.earned(solved_at))
    worth = 1.0 if solved_at is None else solved_at
    if episode.success is not None and not rewarded and worth > 0:
        *before, last = episode.turns
        paid = [replace(turn, reward=0.0) for turn in before]
        return replace(episode, turns=(*paid, replace(last, reward=worth if episode.success else 0.0)))
    return episode
