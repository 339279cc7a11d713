"""How long dreams may be at each update: short ones first, where a world model goes wrong late."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def check_horizon(horizon: Sequence[Sequence[int]], max_turns: int) -> str | None:
    """What is wrong with a schedule, in words for the user; ``None`` if nothing is."""
    if any(len(stage) != 2 for stage in horizon):
        return "dream.horizon is a list of [update, max_turns], such as [[0,4],[8,12]]"
    updates = [stage[0] for stage in horizon]
    if updates and (updates[0] != 0 or any(a >= b for a, b in pairwise(updates))):
        return f"the updates of dream.horizon must rise, from 0 on, got {updates}"
    if any(not 1 <= stage[1] <= max_turns for stage in horizon):
        return f"the turns of dream.horizon must lie between 1 and dream.max_turns={max_turns}"
    return None


def turns_at(update: int, horizon: Sequence[Sequence[int]], shape: str, max_turns: int) -> int:
    """The longest dream of an update.

    Args:
        update: from 0.
        horizon: points ``(update, turns)`` with rising updates, the first at 0; none at all means ``max_turns``.
        shape: ``"steps"`` keeps the turns of a point until the next one (ScalingInter-RL, arXiv 2509.08755);
            ``"linear"`` goes straight from point to point, rounded to whole turns. Both stay at the last.

    Example::

        turns_at(6, [(0, 4), (8, 12)], "steps", 12)  # 4
        turns_at(6, [(0, 4), (8, 12)], "linear", 12)  # 10
    """
    if not horizon:
        return max_turns
    for (start, turns), (end, later) in pairwise(horizon):
        if update < end:
            rise = (later - turns) * (update - start) / (end - start) if shape == "linear" else 0.0
            return turns + round(rise)
    return horizon[-1][1]
