"""Guesses of what comes next, looked up in logged sequences and in the text so far.

Speculative decoding with a point-mass draft (Leviathan et al. 2023, arXiv 2211.17192; lookup: Saxena 2023, "prompt
lookup decoding"): a guess is fed in one step, and what would have been sampled anyway is kept. It changes how fast a
text is written, and not the text; in bf16 up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A long match names one place of one world: what was observed there after this action. Short ones pick up the thread
# after a word that differs.
LENGTHS = (48, 24, 12, 6, 3)
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_POWERS = np.array([pow(int(_PRIME), max(LENGTHS) - 1 - j, 1 << 64) for j in range(max(LENGTHS))], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess."""

    ids: np.ndarray  # the guessed tokens
    match: int  # how many tokens before it are the same where it was found; an entry of ``LENGTHS``


@dataclass(slots=True)
class _AcceptedLength:
    """A running mean of how many guessed tokens were right, for matches of one length."""

    accepted: float = 16.0

    def length(self) -> int:
        # twice the mean: a wrong token costs about as much as a token, a step saved costs several
        return max(2, min(96, int(2 * self.accepted + 1)))

    def observe(self, accepted: int) -> None:
        self.accepted += 0.05 * (accepted - self.accepted)


class Drafts:
    """Finds where the last tokens of a text occurred before and proposes what followed there.

    Args:
        sequences: logged token ids, in the form that the model reads; the last occurrence of a match wins.
    """

    def __init__(self, sequences: Sequence[Sequence[int]] = ()) -> None:
        gap = [-1]  # no match and no guess runs from one sequence into the next
        parts = [np.asarray([*ids, *gap], dtype=np.int64) for ids in sequences]
        self._corpus = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        self._tables = {n: _table(self._corpus, n) for n in LENGTHS}
        self.reset()

    def reset(self) -> None:
        """Forgets what it learned about the lengths of guesses."""
        self._records = {n: _AcceptedLength() for n in LENGTHS}

    def propose(self, ids: np.ndarray, stop: int, limit: int) -> Draft | None:
        """What may follow ``ids``, at most ``limit`` tokens and not beyond ``stop``; ``None`` without an idea."""
        if limit < 1:
            return None
        own, hashes = _matches(ids), _suffix_hashes(ids)
        for n in LENGTHS:
            if len(ids) <= n:
                continue
            place, source = own.get(n), ids
            if place is None:
                place, source = self._lookup(hashes[n - 1], n), self._corpus
            if place is None:
                continue
            guess = source[place : place + min(limit, self._records[n].length())]
            ends = np.flatnonzero((guess == stop) | (guess < 0))
            if len(ends):
                guess = guess[: ends[0] + (guess[ends[0]] >= 0)]
            if len(guess):
                return Draft(guess, n)
        return None

    def observe(self, draft: Draft, accepted: int) -> None:
        """Learns from what became of a guess how long the next one should be."""
        self._records[draft.match].observe(accepted)

    def _lookup(self, key: np.uint64, n: int) -> int | None:
        hashes, follows = self._tables[n]
        at = int(hashes.searchsorted(key))
        # equal hashes of different tokens give a wrong guess, which costs time and nothing else
        return int(follows[at]) if at < len(hashes) and hashes[at] == key else None


def _hashes(ids: np.ndarray, n: int) -> np.ndarray:
    """A polynomial hash (modulo 2^64) of every window of ``n`` ids."""
    values = (ids + 2).astype(np.uint64)
    windows = len(ids) - n + 1
    out = np.zeros(windows, dtype=np.uint64)
    for j in range(n):
        out = out * _PRIME + values[j : j + windows]
    return out


def _table(corpus: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct hashes of all windows, and where the text goes on after the last occurrence of each."""
    if len(corpus) <= n:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    follows = np.flatnonzero(corpus[n:] >= 0) + n  # not at the end of a sequence, where nothing follows
    unique, first_in_reverse = np.unique(_hashes(corpus[:-1], n)[follows - n][::-1], return_index=True)
    return unique, follows[len(follows) - 1 - first_in_reverse]


def _suffix_hashes(ids: np.ndarray) -> np.ndarray:
    """``_hashes`` of the last ``n`` ids, at index ``n - 1``."""
    last = (ids[: -len(_POWERS) - 1 : -1] + 2).astype(np.uint64)
    hashes: np.ndarray = (last * _POWERS[::-1][: len(last)]).cumsum(dtype=np.uint64)
    return hashes


def _matches(ids: np.ndarray) -> dict[int, int]:
    """By ``n``: where the text goes on after the latest earlier occurrence of its last ``n`` tokens."""
    shortest, longest = min(LENGTHS), max(LENGTHS)
    if len(ids) <= shortest:
        return {}
    earlier = np.flatnonzero(ids[shortest - 1 : -1] == ids[-1]) + shortest - 1  # where an occurrence ends
    for back in range(2, shortest + 1):
        earlier = earlier[ids[earlier - back + 1] == ids[-back]]
    if not len(earlier):
        return {}
    steps = np.arange(min(longest, len(ids) - 1))
    at = earlier[:, None] - steps
    same = (ids[at] == ids[-1 - steps]) & (at >= 0)
    agreed = np.where(same.all(1), len(steps), same.argmin(1))
    return {n: int(earlier[agreed >= n][-1]) + 1 for n in LENGTHS if (agreed >= n).any()}
