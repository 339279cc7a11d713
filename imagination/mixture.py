"""Shares of dreamed, real and expert episodes in a batch; the realised shares are counted, not assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policy.lm.batch import Row


def expert_episodes(played: int, share: float) -> int:
    """How many expert episodes to add to ``played`` ones so that experts make up ``share`` of all.

    Raises:
        ValueError: the share is not in [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"the expert share must lie in [0, 1), got {share}")
    return round(played * share / (1 - share))


def realised_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share of each source in the trained tokens: ``{"tokens_dream": 0.9, "tokens_expert": 0.1}``."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.source.value] += sum(row.action_mask)
    total = sum(counts.values()) or 1
    return {f"tokens_{source}": count / total for source, count in sorted(counts.items())}
