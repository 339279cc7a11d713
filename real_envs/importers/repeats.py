"""How often the turns of a log repeat each other, counted from four numbers a turn.

A text stands for its hash of eight bytes (Python's own, keyed anew in each process): two of a million texts are taken
for one another with a probability of 3e-8. So 36 bytes are kept of a turn, whatever it says, and a log may be larger
than memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Repeated:
    """Pairs of state and action that occur more than once: how many, their turns, and those with the usual answer."""

    pairs: int
    turns: int
    usual: int


class Turns:
    """``add`` them one by one; each belongs to an owner, a number that you choose."""

    def __init__(self) -> None:
        self._owners = array("i")
        self._actions, self._answers, self._pairs, self._turns = (array("q") for _ in range(4))

    def add(self, owner: int, state: str, action: str, answer: str) -> None:
        self._owners.append(owner)
        self._actions.append(hash(action))
        self._answers.append(hash(answer))
        self._pairs.append(hash((state, action)))
        self._turns.append(hash((state, action, answer)))

    @property
    def actions(self) -> int:
        """How many different ones."""
        return len(np.unique(_numbers(self._actions)))

    @property
    def answers(self) -> int:
        """How many different ones."""
        return len(np.unique(_numbers(self._answers)))

    def of(self, owners: Collection[int]) -> Flags:
        """Which turns belong to them: ``[turns]``."""
        return np.isin(np.asarray(self._owners), list(owners))

    def doubles(self, among: Flags) -> int:
        """Turns among these that say what an earlier one of them says, after the same state."""
        found = _numbers(self._turns)[among]
        return len(found) - len(np.unique(found))

    def shared(self, among: Flags, with_those: Flags) -> int:
        """Turns among these that are among those, too, after the same state."""
        turns = _numbers(self._turns)
        return int(np.isin(turns[among], turns[with_those]).sum())

    def repeated(self) -> Repeated:
        """Whether the same state and action get the same answer."""
        pairs, answers = _numbers(self._pairs), _numbers(self._answers)
        if not len(pairs):
            return Repeated(0, 0, 0)
        order = np.lexsort((answers, pairs))
        pairs, answers = pairs[order], answers[order]
        new_pair = np.append(True, pairs[1:] != pairs[:-1])
        new_answer = new_pair | np.append(True, answers[1:] != answers[:-1])
        alike = np.diff(np.append(np.flatnonzero(new_answer), len(pairs)))  # turns of each pair and answer
        first = np.flatnonzero(new_pair[new_answer])  # of these, the first one of each pair
        turns, usual = np.add.reduceat(alike, first), np.maximum.reduceat(alike, first)
        more = turns > 1
        return Repeated(int(more.sum()), int(turns[more].sum()), int(usual[more].sum()))


def _numbers(values: array[int]) -> NDArray[np.int64]:
    return np.asarray(values)
