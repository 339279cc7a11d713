"""Shares of dreamed, real, expert and replayed episodes in an update, and the lengths of its dreams."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from imagination.rollout.noise import NOISE
from imagination.settings import DreamSettings, TrainSettings

Share = float | Sequence[Sequence[float]]


def added_episodes(played: int, share: float, others: float = 0.0) -> int:
    """How many episodes to add to ``played`` ones so that they make up ``share`` of all.

    Example: ``added_episodes(70, 0.1, others=0.2)`` is 10 of 100, beside 20 others.

    Raises:
        ValueError: a share is negative, or nothing is left for what was played.
    """
    if min(share, others) < 0 or not share + others < 1:
        raise ValueError(f"shares of added episodes must lie in [0, 1), all of them together, got {share} and {others}")
    return round(played * share / (1 - share - others))


def share_at(update: int, share: Share, base: float = 1.0) -> float:
    """A share that may change: a number, or points ``[update, share]`` with straight lines between them.

    A ``base`` b other than 1 bends them: at x of the way from p to q the share is
    ``p + (b**x - 1) / (b - 1) * (q - p)``, as noise grows in ZeroSearch (Sun et al. 2025, arXiv 2505.04588, b = 4).

    Example: ``share_at(6, [[0, 0.5], [12, 0.0]])`` is 0.25, and 1/3 with base 4.
    """
    if isinstance(share, (int, float)):
        return float(share)
    if update <= share[0][0]:
        return float(share[0][1])
    for (start, before), (end, after) in pairwise(share):
        if update <= end:
            if base != 1:
                return before + (base ** ((update - start) / (end - start)) - 1) / (base - 1) * (after - before)
            return before + (after - before) * (update - start) / (end - start)
    return float(share[-1][1])


def max_value(share: Share) -> float:
    """The largest that a share ever is."""
    return float(share) if isinstance(share, (int, float)) else max(float(point[1]) for point in share)


def check_share(name: str, share: Share) -> str | None:
    """What is wrong with a share, in words for the user; ``None`` if nothing is."""
    if not isinstance(share, (int, float)):
        if not share or any(len(point) != 2 for point in share):
            return f"{name} is a number or a list of [update, share], such as [[0,0.5],[12,0]]"
        if any(a[0] >= b[0] for a, b in pairwise(share)):
            return f"the updates of {name} must rise, got {[point[0] for point in share]}"
    values = [share] if isinstance(share, (int, float)) else [point[1] for point in share]
    if any(not 0 <= value < 1 for value in values):
        return f"{name} must lie in [0, 1), got {share}"
    return None


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
    update: int, horizon: Sequence[Sequence[int]], shape: str, max_turns: int, every: int = 1, growth: float = 2.0
) -> int:
    """The longest episode of an update.

    Args:
        update: from 0.
        horizon: points ``(update, turns)`` with rising updates, the first at 0; none at all means ``max_turns``.
        shape: ``"steps"`` keeps the turns of a point until the next one (ScalingInter-RL, arXiv 2509.08755);
            ``"linear"`` goes straight from point to point, rounded to whole turns. Both stay at the last.
            ``"multiply"`` and ``"add"`` know one point and grow from it (TTI, arXiv 2506.07976):
            ``min(turns * growth ** k, max_turns)`` or ``min(turns + growth * k, max_turns)``, rounded down, at stage
            ``k = update // every``.

    Example: ``turns_at(6, [(0, 4)], "multiply", 30, every=3)`` is 16 = 4 * 2 * 2.
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


def real_groups(update: int, settings: TrainSettings) -> int:
    """How many of an update's groups are played in the real games; one at least stays in the dream.

    Example::

        real_groups(0, TrainSettings(groups=6, real_share=0.5))  # 3
    """
    return min(round(share_at(update, settings.real_share) * settings.groups), settings.groups - 1)


def noise_spec(dream: DreamSettings, update: int) -> dict[str, str]:
    """What tells a dream of an update how noisy it is (``Task.spec``); nothing where it is not."""
    share = share_at(update, dream.noise, dream.noise_base)
    return {NOISE: str(share)} if share else {}


def longest_turns(dream: DreamSettings, update: int) -> int:
    """Of an update's episodes, dreamed or real: the control plays what the dreams play."""
    return turns_at(
        update, dream.horizon, dream.horizon_shape, dream.max_turns, dream.horizon_every, dream.horizon_growth
    )
