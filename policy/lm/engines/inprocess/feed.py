"""What goes into one step of generation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Feed:
    """The new tokens of one step. Row ``r`` feeds ``counts[r]`` tokens at positions ``starts[r] ...`` of its slot.

    Attributes:
        slots, starts, counts: ``[row]``, slots ascending.
        tokens: ``[n]`` ids, row after row.
        wanted: ascending indices into ``tokens``: whose logits are asked for.
        canvas: every token also sees those of its own row that stand behind it.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    wanted: np.ndarray
    canvas: bool = False

    def slot_of_token(self) -> np.ndarray:
        return np.repeat(self.slots, self.counts)

    def positions(self) -> np.ndarray:
        first = np.cumsum(self.counts) - self.counts
        return np.arange(len(self.tokens)) + np.repeat(self.starts - first, self.counts)


__all__ = ["Feed"]
