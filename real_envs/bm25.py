"""BM25 over short texts (Robertson and Zaragoza 2009, section 3; Lucene's variant, by ``bm25s``)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

_WORDS = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


class WordNumbers(defaultdict[str, int]):
    """A number for each word, in the order in which they come: a list of these is a tenth of a list of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def of(self, words: Sequence[str]) -> list[int]:
        return list(map(self.__getitem__, words))


class Bm25:
    """An index of documents.

    Args:
        documents: the words of each, as numbers; at least one document.
        numbers: of the words.
    """

    def __init__(self, documents: Sequence[list[int]], numbers: WordNumbers) -> None:
        import bm25s  # nothing else needs it

        self._size = len(documents)
        self._bm25 = bm25s.BM25()
        # the word that no query has keeps an index of no words from being empty
        words = [document or numbers.of(["\0"]) for document in documents]
        self._bm25.index((words, dict(numbers)), show_progress=False)
        self._usual: dict[int, NDArray[np.float32]] = {}  # scores of all documents for words that most of them have

    def best(self, words: list[str], k: int, hidden: Collection[int] = ()) -> list[int]:
        """At most ``k`` documents that have any of the words, the most similar one first; equal ones in order."""
        if not words:
            return []
        scores = self._scores(words).astype(np.float64)
        scores[list(hidden)] = -np.inf
        least = np.partition(scores, -k)[-k] if k < len(scores) else -np.inf  # of those that are shown
        among = np.flatnonzero(scores >= least)
        best = among[np.argsort(-scores[among], kind="stable")[:k]]
        return [int(at) for at in best if scores[at] > 0]

    def _scores(self, words: list[str]) -> NDArray[np.float32]:
        """``get_scores`` of bm25s, to the bit: the same sums in the same order, without its slow scattered ones."""
        data, indices, indptr = (self._bm25.scores[name] for name in ("data", "indices", "indptr"))
        scores = np.zeros(self._size, np.float32)
        for word in self._bm25.get_tokens_ids(words):
            at = slice(indptr[word], indptr[word + 1])
            if 2 * (at.stop - at.start) <= len(scores):
                scores[indices[at]] += data[at]  # no document is there twice
                continue
            if word not in self._usual:
                self._usual[word] = np.zeros(len(scores), np.float32)
                self._usual[word][indices[at]] = data[at]
            scores += self._usual[word]
        return scores
