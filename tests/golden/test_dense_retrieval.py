"""Dense retrieval against numpy's full SVD, and the fusion of rankings against a plain loop. If these fail, searches
list other articles than they say."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from real_envs.retrieval import LatentSemantics, WordNumbers, fused

TEXTS = [
    "the red fox runs",
    "the fox and the dog",
    "a dog sleeps all day",
    "ships sail the sea",
    "the sea is deep and red",
    "",
    "a ship at sea",
]


def index_of(texts: list[str], rank: int) -> tuple[LatentSemantics, WordNumbers]:
    numbers = WordNumbers()
    documents = [numbers.of(text.split()) for text in texts]
    return LatentSemantics(documents, numbers, rank), numbers


def by_full_svd(texts: list[str], rank: int, query: list[str]) -> list[float]:
    """Cosines in the latent space, with a dense matrix and the whole decomposition."""
    vocabulary = sorted({word for text in texts for word in text.split()})
    idf = [math.log((1 + len(texts)) / (1 + sum(w in t.split() for t in texts))) + 1 for w in vocabulary]
    matrix = np.array([[text.split().count(w) * idf[k] for k, w in enumerate(vocabulary)] for text in texts])
    matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
    vectors = np.linalg.svd(matrix)[2][:rank].T
    places, asked = matrix @ vectors, np.array([idf[k] * (w in query) for k, w in enumerate(vocabulary)]) @ vectors
    lengths = np.linalg.norm(places, axis=1) * np.linalg.norm(asked)
    return [float(p @ asked / n) if n > 1e-9 else 0.0 for p, n in zip(places, lengths, strict=True)]


@pytest.mark.parametrize("rank", [1, 2, 3, 50])
@pytest.mark.parametrize("query", [["fox"], ["red", "sea"], ["ship"], ["dog", "unknown"]])
def test_documents_are_ranked_as_by_the_whole_decomposition(rank: int, query: list[str]) -> None:
    index, _ = index_of(TEXTS, rank)
    scores = [round(score, 6) for score in by_full_svd(TEXTS, rank, query)]
    expected = sorted((k for k, score in enumerate(scores) if score > 0), key=lambda k: (-scores[k], k))
    assert index.best(query, 10) == expected
    assert index.best(query, 2) == expected[:2]


def test_a_larger_corpus_is_ranked_alike_where_most_vectors_are_left_out() -> None:
    rng = random.Random(0)
    words = [f"w{k}" for k in range(120)]
    texts = [" ".join(rng.choices(words[t : t + 40], k=12)) for t in (rng.randrange(80) for _ in range(150))]
    index, _ = index_of(texts, 8)
    for query in (["w3", "w5"], ["w60"], ["w100", "w90", "w80"]):
        scores = by_full_svd(texts, 8, query)
        best = index.best(query, 10)
        assert len(best) == 10
        assert min(scores[k] for k in best) > sorted(scores)[-10] - 1e-3


def test_equal_documents_stay_in_order_and_unknown_words_find_nothing() -> None:
    index, _ = index_of(["b c", "a b", "a b", "c d", "a b"], 3)
    assert index.best(["a"], 3) == [1, 2, 4]
    assert index.best(["zebra"], 3) == index.best([], 3) == []
    assert index_of(["", ""], 4)[0].best(["a"], 1) == []


def test_rankings_are_fused_as_by_a_plain_loop() -> None:
    rng = random.Random(1)
    for _ in range(50):
        rankings = [rng.sample(range(12), rng.randint(0, 12)) for _ in range(rng.randint(1, 3))]
        totals = {
            document: sum(Fraction(1, 60 + ranking.index(document) + 1) for ranking in rankings if document in ranking)
            for document in range(12)
        }
        expected = sorted((d for d in totals if totals[d]), key=lambda d: (-round(float(totals[d]), 12), d))
        assert fused(rankings, 5) == expected[:5]
    assert fused([[4, 2], [2, 4]], 2) == [2, 4]
