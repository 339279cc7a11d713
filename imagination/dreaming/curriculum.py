"""How long episodes may be at each update: short ones first, where a world model goes wrong late."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

GROWING = ("add", "multiply")


def check_horizon(
    horizon: Sequence[Sequence[int]], max_turns: int, shape: str = "steps", every: int = 1, growth: float = 2.0
) -> str | None:
    """What is wrong with a schedule, in words for the user; ``None`` if nothing is."""
    if any(len(stage) != 2 for stage in horizon):
        return "dream.horizon is a list of [update, max_turns], such as [[0,4],[8,12]]"
    updates = [stage[0] for stage in horizon]
    if updates and (updates[0] != 0 or any(a >= b for a, b in pairwise(updates))):
        return f"the updates of dream.horizon must rise, from 0 on, got {updates}"
    if any(not 1 <= stage[1] <= max_turns for stage in horizon):
        return f"the turns of dream.horizon must lie between 1 and dream.max_turns={max_turns}"
    if shape in GROWING:
        if len(horizon) != 1:
            return (
                f"dream.horizon_shape={shape} grows from one point: set dream.horizon to it, such as [[0,4]], or set "
                "dream.horizon_shape=steps"
            )
        if every < 1:
            return f"dream.horizon_every must be 1 or more, got {every}"
        if growth <= (1 if shape == "multiply" else 0):
            least = "a factor above 1" if shape == "multiply" else "a number of turns above 0"
            return f"dream.horizon_growth must be {least} with dream.horizon_shape={shape}, got {growth}"
    return None


def turns_at(
    update: int,
    horizon: Sequence[Sequence[int]],
    shape: str,
    max_turns: int,
    every: int = 1,
    growth: float = 2.0,
) -> int:
    """The longest episode of an update.

    Args:
        update: from 0.
        horizon: points ``(update, turns)`` with rising updates, the first at 0; none at all means ``max_turns``.
        shape: ``"steps"`` keeps the turns of a point until the next one (ScalingInter-RL, arXiv 2509.08755);
            ``"linear"`` goes straight from point to point, rounded to whole turns. Both stay at the last.
            ``"multiply"`` and ``"add"`` know one point and grow from it until ``max_turns`` (TTI, arXiv 2506.07976):
            ``min(turns * growth ** k, max_turns)`` or ``min(turns + growth * k, max_turns)``, rounded down, at stage
            ``k = update // every``. TTI prefers to multiply; from 10 to 30 by a factor of 2 it goes 10, 20, 30.
        every: updates of a stage (multiply, add).
        growth: from stage to stage, a factor (multiply) or turns (add).

    Example::

        turns_at(6, [(0, 4), (8, 12)], "steps", 12)  # 4
        turns_at(6, [(0, 4), (8, 12)], "linear", 12)  # 10
        turns_at(6, [(0, 4)], "multiply", 30, every=3)  # 16 = 4 * 2 * 2
    """
    if not horizon:
        return max_turns
    if shape in GROWING:
        turns = float(horizon[0][1])
        for _ in range(update // every):  # no power, which would overflow in a long run
            turns = turns * growth if shape == "multiply" else turns + growth
            if turns >= max_turns:
                return max_turns
        return int(turns)
    for (start, turns_before), (end, later) in pairwise(horizon):
        if update < end:
            rise = (later - turns_before) * (update - start) / (end - start) if shape == "linear" else 0.0
            return turns_before + round(rise)
    return horizon[-1][1]
