"""Which tasks of a log are held out: always the same ones, and near-duplicates never on both sides.

Two tasks are near-duplicates where the sets of word pairs of their starts overlap by ``LIKE`` or more (Jaccard).
Numbers and masked secrets count as equal. Pairs that more than half of the first tasks have are the world's own text,
such as a system prompt, and are not compared.

The overlap is estimated by MinHash (Broder, "On the resemblance and containment of documents", 1997): the least values
of two sets under a hash function are equal with a probability of their overlap. Locality-sensitive hashing compares
only starts that agree in a whole band of hashes, so the cost does not grow with the square of their number.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

TRAIN, HELDOUT = "train", "heldout"
LIKE = 0.7
_HASHES, _ROWS = 64, 4  # a pair of overlap 0.7 shares one of 16 bands with probability 0.988, one of 0.2 with 0.025
_FIRST = 256  # starts by which the world's own text is known
_FEWEST = 8  # tasks below which nothing is taken for the world's own text
_CROWD = 16  # starts in a band of which all pairs are looked at
_PRIME = np.uint64((1 << 31) - 1)
_EMPTY = np.full(_HASHES, 0xFFFFFFFF, np.uint32)  # of a start without word pairs of its own
_MASK = re.compile(r"<([a-z-]+)#[0-9a-f]{8}>")

Sketch = NDArray[np.uint32]


def heldout_tasks(
    tasks: Collection[str], share: float, groups: Sequence[frozenset[str]] = (), before: Mapping[str, str] | None = None
) -> frozenset[str]:
    """About ``share`` of the tasks, always the same ones: those with the least hashes.

    At least one of two or more, and never all; none where the share is 0. Tasks of a group stay together, so the share
    is met about. Earlier splits stand: a new task goes where its group is, and into training where its group is on both
    sides already. A group so large that the others could not make up the share is split task by task.

    Args:
        groups: near-duplicates (``SimilarTasks.groups``), earlier tasks among them.
        before: the split of earlier tasks.
    """
    before = before or {}
    new = frozenset(tasks)
    with_group: set[str] = set()
    ungrouped = set(new)
    free: list[frozenset[str]] = []
    for group in groups:
        members, sides = group & new, {before[task] for task in group if task in before}
        ungrouped -= members
        if sides == {HELDOUT} and share > 0:
            with_group |= members
        elif not sides and members:
            free.append(frozenset(members))
    free += [frozenset((task,)) for task in ungrouped]
    count = sum(map(len, free))
    wanted = min(max(1, round(share * count)), count - 1) if share > 0 and count > 1 else 0
    units: list[frozenset[str]] = []
    for group in free:
        units += [frozenset((task,)) for task in group] if len(group) > max(wanted, count - wanted) else [group]
    taken: set[str] = set()
    for unit in sorted(units, key=_rank):
        if len(taken) + len(unit) <= wanted:
            taken |= unit
    if wanted and not taken:  # every group is larger than the share
        taken |= min(units, key=lambda unit: (len(unit), _rank(unit)))
    return frozenset(with_group | taken)


def leaks(held_out: Collection[str], groups: Sequence[frozenset[str]]) -> list[str]:
    """The held-out tasks that have a near-duplicate among the others."""
    held_out = frozenset(held_out)
    return sorted(task for group in groups if len(group - held_out) for task in group & held_out)


def _rank(unit: Collection[str]) -> bytes:
    return hashlib.sha256(f"heldout/{min(unit)}".encode("utf-8", "replace")).digest()


def normalised(text: str) -> str:
    """A text without case, digits, spaces and the codes of masks: what differs only in these is nearly the same."""
    text = _MASK.sub(r"<\1>", text.lower())
    return re.sub(r"\d+", "0", re.sub(r"\s+", " ", text)).strip()


class SimilarTasks:
    """Tasks by how they begin: ``add`` them one by one, ask for ``groups`` at any time.

    A few hundred bytes are kept of each different start, whatever its length.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()  # digests of task and start
        self._rows: dict[bytes, int] = {}  # digest of a normalised start to its place below
        self._tasks: list[set[str]] = []  # that begin so
        self._sketches: list[Sketch] = []
        self._first: list[Sequence[int]] | None = []  # word pairs of the first starts, until they are enough
        self._common = np.empty(0, np.uint64)  # word pairs that are the world's own
        draw = np.random.default_rng(0)
        self._a = draw.integers(1, int(_PRIME), (_HASHES, 1), np.uint64)
        self._b = draw.integers(0, int(_PRIME), (_HASHES, 1), np.uint64)

    def is_new(self, task: str, start: str) -> bool:
        key = _digest(f"{task}\x00{start}")
        new = key not in self._seen
        self._seen.add(key)
        return new

    def add(self, task: str, start: str) -> None:
        """Notes how a task begins; the same start again is ignored."""
        text = normalised(start)
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
        groups: dict[int, set[str]] = defaultdict(set)
        for row, tasks in enumerate(self._tasks):
            groups[joined.of(row)] |= tasks
        return [frozenset(tasks) for tasks in groups.values()]

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
    distinct = set(pairwise(words)) if len(words) > 1 else {(text, "")}
    return [int.from_bytes(_digest(f"{a} {b}")[:4], "little") >> 1 for a, b in distinct]


def _common(starts: Sequence[Sequence[int]], tasks: Sequence[set[str]]) -> NDArray[np.uint64]:
    """The word pairs of more than half of the starts, where they are of enough tasks."""
    if len(set().union(*tasks)) < _FEWEST or not starts:
        return np.empty(0, np.uint64)
    counts = Counter(pair for start in starts for pair in set(start))
    return np.array([pair for pair, count in counts.items() if 2 * count > len(starts)], np.uint64)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).digest()
