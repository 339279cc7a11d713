"""Do dreams still read like the log? Distance of word distributions, with a bound that the log itself sets."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn

DRAWS = 200
_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Lower-case words and marks: the same for every tokenizer."""
    return _WORD.findall(text.lower())


class WordReference:
    """How often the log uses each word in the ``text`` of a turn, and how far parts of it are from the whole."""

    def __init__(self, log: Sequence[Trajectory], text: Callable[[Turn], str]) -> None:
        self._text = text
        self._index: dict[str, int] = {}
        self._episodes: dict[str, dict[str, list[list[NDArray[np.int64]]]]] = {}  # by agent and task: words a turn
        known: dict[str, NDArray[np.int64]] = {}
        for t in log:
            turns = []
            for turn in t.turns:
                words_of = text(turn)
                if words_of not in known:
                    ids = [self._index.setdefault(w, len(self._index)) for w in words(words_of)]
                    known[words_of] = np.array(ids, dtype=np.int64)
                turns.append(known[words_of])
            if turns:
                self._episodes.setdefault(t.agent, {}).setdefault(t.task_id, []).append(turns)
        every = [ids for tasks in self._episodes.values() for task in tasks.values() for e in task for ids in e]
        self._counts = self._histogram(every)
        self._bounds: dict[tuple[int, int, int], float | None] = {}

    def _histogram(self, arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """``[words + 1]``; the last entry counts words that the log does not know."""
        words_of_log = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
        return np.bincount(words_of_log, minlength=len(self._index) + 1).astype(np.float64)

    def distance(self, turns: Iterable[Turn]) -> float | None:
        """Jensen-Shannon divergence of these turns from the log; ``None`` where either has no words."""
        counts = Counter(word for turn in turns for word in words(self._text(turn)))
        vector = np.zeros(len(self._index) + 1)
        for word, n in counts.items():
            vector[self._index.get(word, len(self._index))] += n
        if vector.sum() == 0 or self._counts.sum() == 0:
            return None
        return jensen_shannon(vector, self._counts)

    def bound(self, groups: int, group_size: int, length: int) -> float | None:
        """The farthest that honest play is from the log, by bootstrap: the largest distance of ``DRAWS`` samples.

        A sample is what the rollouts of an update are: ``groups`` starts, at each of them ``group_size`` stretches of
        ``length`` turns from episodes of one task. All of a sample are by *one* agent of the log, drawn first, as a
        policy is one agent and not the mixture of all. In bits; ``None`` for a log without words.
        """
        key = (groups, group_size, max(length, 1))
        if key not in self._bounds:
            self._bounds[key] = self._bootstrap(*key)
        return self._bounds[key]

    def _bootstrap(self, groups: int, group_size: int, length: int) -> float | None:
        rng = random.Random(derive_seed("word drift", groups, group_size, length))
        agents, distances = sorted(self._episodes), []
        for draw in range(DRAWS if agents else 0):
            tasks = self._episodes[agents[draw % len(agents)]]  # each agent equally often, the rare ones too
            sample: list[NDArray[np.int64]] = []
            for task in rng.choices(sorted(tasks), k=groups):
                for episode in rng.choices(tasks[task], k=group_size):
                    start = rng.randrange(max(len(episode) - length, 0) + 1)
                    sample += episode[start : start + length]
            counts = self._histogram(sample)
            if counts.sum() > 0:
                distances.append(jensen_shannon(counts, self._counts))
        return max(distances, default=None)


def jensen_shannon(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Jensen-Shannon divergence of two histograms over the same words, in bits: 0 (equal) to 1 (no word in common).

    ``H((p + q) / 2) - (H(p) + H(q)) / 2`` (Lin, IEEE Transactions on Information Theory 37, 1991, 145-151, eq. 4.1).
    Counts or proportions ``[words]``; each is normalised here.

    Raises:
        ValueError: shapes disagree, or one is empty.
    """
    if p.shape != q.shape or p.sum() <= 0 or q.sum() <= 0:
        raise ValueError(f"two histograms over the same words are needed, got {p.shape} and {q.shape}, or one is empty")
    p, q = p / p.sum(), q / q.sum()
    return float(max(_entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2, 0.0))


def _entropy(p: NDArray[np.float64]) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())
