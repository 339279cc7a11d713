"""Which tasks begin nearly alike: what was learned in one of them must not be asked of in the other.

Starts are compared as sets of word pairs, with numbers and masked secrets all alike. Two tasks are near-duplicates
where the sets overlap by ``LIKE`` or more (Jaccard), so one name in a dozen words makes no other task. Pairs that more
than half of the first tasks say are the world's own text, such as a system prompt, and are not compared.

The overlap is estimated by MinHash (Broder, "On the resemblance and containment of documents", 1997): the least values
of two sets under a hash function are equal with a probability of their overlap. Only starts that agree in a whole band
of hashes are looked at (locality-sensitive hashing), so the cost does not grow with the square of their number.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

LIKE = 0.7
_HASHES, _ROWS = 64, 4  # a pair of overlap 0.7 shares one of 16 bands with probability 0.988, one of 0.2 with 0.025
_FIRST = 256  # starts by which the world's own text is known
_FEWEST = 8  # tasks below which nothing is taken for the world's own text
_CROWD = 16  # starts in a band of which all pairs are looked at
_PRIME = np.uint64((1 << 31) - 1)
_EMPTY = np.full(_HASHES, 0xFFFFFFFF, np.uint32)  # of a start that says nothing of its own
_MASK = re.compile(r"<([a-z-]+)#[0-9a-f]{8}>")

Sketch = NDArray[np.uint32]


def rough(text: str) -> str:
    """A text without case, digits, spaces and the codes of masks: what differs only in these is nearly the same."""
    text = _MASK.sub(r"<\1>", text.lower())
    return re.sub(r"\d+", "0", re.sub(r"\s+", " ", text)).strip()


class SimilarTasks:
    """Tasks by how they begin: ``add`` them one by one, ask for ``groups`` at any time.

    A few hundred bytes are kept of each different start, whatever its length.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()  # digests of task and start
        self._rows: dict[bytes, int] = {}  # digest of a rough start to its place below
        self._tasks: list[set[str]] = []  # that begin so
        self._sketches: list[Sketch] = []
        self._first: list[Sequence[int]] | None = []  # word pairs of the first starts, until they are enough
        self._common = np.empty(0, np.uint64)  # word pairs that are the world's own
        draw = np.random.default_rng(0)
        self._a = draw.integers(1, int(_PRIME), (_HASHES, 1), np.uint64)
        self._b = draw.integers(0, int(_PRIME), (_HASHES, 1), np.uint64)

    def is_new(self, task: str, start: str) -> bool:
        """Whether this task has not begun like this before."""
        key = _digest(f"{task}\x00{start}")
        new = key not in self._seen
        self._seen.add(key)
        return new

    def add(self, task: str, start: str) -> None:
        """Notes how a task begins; again and again costs nothing but memory for nothing new."""
        text = rough(start)
        row = self._rows.setdefault(_digest(text), len(self._tasks))
        if row < len(self._tasks):
            self._tasks[row].add(task)
            return
        self._tasks.append({task})
        pairs = _pairs(text)
        if self._first is None:
            self._sketches.append(self._sketch(pairs, self._common))
            return
        self._first.append(pairs)
        if len(self._first) == _FIRST:
            self._common = _common(self._first, self._tasks)
            self._sketches = [self._sketch(pairs, self._common) for pairs in self._first]
            self._first = None

    def groups(self) -> list[frozenset[str]]:
        """The tasks, those that begin nearly alike together; also those that only a third one connects."""
        sketches = self._sketches
        if self._first is not None:
            common = _common(self._first, self._tasks)
            sketches = [self._sketch(pairs, common) for pairs in self._first]
        joined = _Joined(len(self._tasks))
        by_task: dict[str, int] = {}
        for row, tasks in enumerate(self._tasks):
            for task in tasks:
                joined.join(row, by_task.setdefault(task, row))
        if sketches:
            _join_alike(np.stack(sketches), joined)
        found: dict[int, set[str]] = defaultdict(set)
        for row, tasks in enumerate(self._tasks):
            found[joined.of(row)] |= tasks
        return [frozenset(tasks) for tasks in found.values()]

    def _sketch(self, pairs: Sequence[int], common: NDArray[np.uint64]) -> Sketch:
        values = np.array(pairs, np.uint64)
        if len(common):
            values = values[~np.isin(values, common)]
        if not len(values):
            return _EMPTY
        hashed: Sketch = ((self._a * values + self._b) % _PRIME).min(axis=1).astype(np.uint32)
        return hashed


class _Joined:
    """Union-find over places 0 to ``count`` - 1."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def of(self, place: int) -> int:
        while self._above[place] != place:
            self._above[place] = place = self._above[self._above[place]]
        return place

    def join(self, a: int, b: int) -> None:
        self._above[self.of(a)] = self.of(b)


def _join_alike(sketches: NDArray[np.uint32], joined: _Joined) -> None:
    """Joins rows of ``[starts, hashes]`` that agree in a band, and in ``LIKE`` of all their hashes."""
    for band in range(0, _HASHES, _ROWS):
        keys = np.ascontiguousarray(sketches[:, band : band + _ROWS]).view(f"V{4 * _ROWS}").ravel()
        order = np.argsort(keys, kind="stable")
        ends = np.flatnonzero(np.append(keys[order[1:]] != keys[order[:-1]], True)) + 1
        for begin, end in pairwise([0, *ends.tolist()]):
            if end - begin < 2:
                continue
            crowd = order[begin:end].tolist()
            # of a large crowd each with the first and with the one before it: most of it is alike, or nothing is
            few = len(crowd) <= _CROWD
            for a, b in combinations(crowd, 2) if few else (*pairwise(crowd), *((crowd[0], k) for k in crowd)):
                if joined.of(a) != joined.of(b) and (sketches[a] == sketches[b]).mean() >= LIKE:
                    joined.join(a, b)


def _pairs(text: str) -> list[int]:
    """A number of 31 bits for each different pair of words; of a text of one word for that word."""
    words = text.split(" ")
    said = set(pairwise(words)) if len(words) > 1 else {(text, "")}
    return [int.from_bytes(_digest(f"{a} {b}")[:4], "little") >> 1 for a, b in said]


def _common(starts: Sequence[Sequence[int]], tasks: Sequence[set[str]]) -> NDArray[np.uint64]:
    """What more than half of the starts say, where they are of enough tasks."""
    if len(set().union(*tasks)) < _FEWEST or not starts:
        return np.empty(0, np.uint64)
    counts = Counter(pair for start in starts for pair in set(start))
    return np.array([pair for pair, count in counts.items() if 2 * count > len(starts)], np.uint64)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).digest()
