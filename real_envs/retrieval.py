"""Ranking short texts by a query: BM25 by words, latent semantic analysis by what occurs together, and their fusion.

BM25 is Lucene's variant by ``bm25s`` (Robertson and Zaragoza 2009, section 3); the rest needs nothing but the corpus.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

_WORDS = re.compile(r"\w+")
_Floats = NDArray[np.float64]
_SPARE = 16  # further columns, which make the last of those that are kept exact enough
_ROUNDS = 8
_NOTHING = 1e-9  # a length up to this is rounding, in whatever direction it points
_DIGITS = 6  # of a score: sums differ in their last bits from machine to machine, and ranks must not


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


class LatentSemantics:
    """An index of documents by the cosine of their places among the first right singular vectors of the TF-IDF matrix
    (latent semantic analysis, Deerwester et al. 1990).

    A word that is ``tf`` times in a document weighs ``tf * (ln((1 + n) / (1 + df)) + 1)``, and rows have length 1. The
    vectors are found by subspace iteration from a random start (Halko et al. 2011, arXiv 0909.4061, algorithm 4.4).

    Args:
        documents: the words of each, as numbers; at least one document.
        numbers: of the words.
        rank: singular vectors, at most.
    """

    def __init__(self, documents: Sequence[list[int]], numbers: WordNumbers, rank: int) -> None:
        # as in Bm25, a word that no query has keeps the matrix from being empty
        self._numbers, counts = numbers, [Counter(document or numbers.of(["\0"])) for document in documents]
        held = np.zeros(len(numbers))
        for count in counts:
            held[list(count)] += 1
        self._weights = np.log((1 + len(documents)) / (1 + held)) + 1
        by_document, by_word = list[tuple[list[int], _Floats]](), defaultdict[int, dict[int, float]](dict)
        for place, count in enumerate(counts):
            words = list(count)
            row = self._weights[words] * np.array([count[word] for word in words])
            row /= np.linalg.norm(row) or 1.0
            by_document.append((words, row))
            for word, value in zip(words, row.tolist(), strict=True):
                by_word[word][place] = value
        columns = [(list(by_word[k]), np.array(list(by_word[k].values()))) for k in range(len(held))]
        self._vectors = _right_vectors(by_document, columns, rank)  # [words, rank]
        places = _product(by_document, self._vectors)
        lengths = np.linalg.norm(places, axis=1, keepdims=True)
        self._places = places / np.where(lengths > _NOTHING, lengths, np.inf)  # [documents, rank]

    def best(self, words: Sequence[str], k: int) -> list[int]:
        """At most ``k`` documents of a positive cosine, the most similar one first; equal ones in order."""
        known = [n for n in (self._numbers.get(word, -1) for word in words) if 0 <= n < len(self._weights)]
        query = self._weights[known] @ self._vectors[known]
        length = np.linalg.norm(query)
        scores = np.round(self._places @ (query / (length if length > _NOTHING else np.inf)), _DIGITS)
        return [int(at) for at in np.argsort(-scores, kind="stable")[:k] if scores[at] > 0]


def _product(rows: Sequence[tuple[list[int], _Floats]], dense: _Floats) -> _Floats:
    """``[rows, columns of dense]``: a sparse matrix, whose rows are places and values, times a dense one."""
    return np.stack([values @ dense[places] for places, values in rows])


def _right_vectors(
    rows: Sequence[tuple[list[int], _Floats]], columns: Sequence[tuple[list[int], _Floats]], rank: int
) -> _Floats:
    """``[columns, rank]``: the first right singular vectors of a sparse matrix that is given by rows and by columns."""
    size = min(rank + _SPARE, len(rows), len(columns))
    # the older generator, whose numbers no version of numpy may change
    start = np.random.RandomState(0).standard_normal((len(columns), size))
    basis = np.linalg.qr(_product(rows, start))[0]
    for _ in range(_ROUNDS):
        basis = np.linalg.qr(_product(columns, basis))[0]
        basis = np.linalg.qr(_product(rows, basis))[0]
    _, values, vectors = np.linalg.svd(_product(columns, basis).T, full_matrices=False)
    return vectors[:rank][values[:rank] > _NOTHING * values[0]].T


def fused(rankings: Sequence[Sequence[int]], k: int) -> list[int]:
    """The ``k`` best of several rankings by reciprocal rank fusion (Cormack et al. 2009): a document earns
    ``1 / (60 + rank)`` in each that lists it, ranks from 1; of equal ones the lower number first.

    >>> fused([[7, 3], [3, 9]], 2)
    [3, 7]
    """
    scores: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, document in enumerate(ranking, start=1):
            scores[document] += 1 / (60 + rank)
    return sorted(scores, key=lambda document: (-scores[document], document))[:k]
