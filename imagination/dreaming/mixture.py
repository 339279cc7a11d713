"""Shares of dreamed, real, expert and replayed episodes in a batch; the realised shares are counted, not assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from policy.lm.batch import Row

Share = float | Sequence[Sequence[float]]


def added_episodes(played: int, share: float, others: float = 0.0) -> int:
    """How many episodes to add to ``played`` ones so that they make up ``share`` of all.

    Args:
        others: share of what else is added.

    Raises:
        ValueError: a share is negative, or nothing is left for what was played.

    Example::

        added_episodes(72, 0.1)  # 8 of 80
        added_episodes(70, 0.1, others=0.2)  # 10 of 100, beside 20 others
    """
    if min(share, others) < 0 or not share + others < 1:
        raise ValueError(f"shares of added episodes must lie in [0, 1), all of them together, got {share} and {others}")
    return round(played * share / (1 - share - others))


def share_at(update: int, share: Share) -> float:
    """A share that may change: a number, or points ``[update, share]`` with straight lines between them.

    Before the first point and after the last the share is that of the point.

    Example::

        share_at(6, [[0, 0.5], [12, 0.0]])  # 0.25
    """
    if isinstance(share, (int, float)):
        return float(share)
    if update <= share[0][0]:
        return float(share[0][1])
    for (start, before), (end, after) in pairwise(share):
        if update <= end:
            return before + (after - before) * (update - start) / (end - start)
    return float(share[-1][1])


def most(share: Share) -> float:
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


def realised_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share of each source in the trained tokens: ``{"tokens_dream": 0.9, "tokens_expert": 0.1}``."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.source.value] += sum(row.action_mask)
    total = sum(counts.values()) or 1
    return {f"tokens_{source}": count / total for source, count in sorted(counts.items())}
