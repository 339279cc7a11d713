"""Shares of dreamed, real, expert and replayed episodes in a batch; the realised shares are counted, not assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policy.lm.batch import Row


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


def realised_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share of each source in the trained tokens: ``{"tokens_dream": 0.9, "tokens_expert": 0.1}``."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.source.value] += sum(row.action_mask)
    total = sum(counts.values()) or 1
    return {f"tokens_{source}": count / total for source, count in sorted(counts.items())}
