"""Nonsense that repeats itself, on which a model that starts at random learns to copy before it reads the log.

Of a world that it has never seen, a language model can only speak by copying: rooms, things and numbers stand in what
it has just read. A small model trained on the log alone first learns its words by heart, and finds copying after
millions of tokens; on texts of random tokens in which phrases come back there is nothing else to learn, and it takes
a few hundred thousand (as with the formal languages of Hu et al. 2025, arXiv 2502.19249).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from policy.lm.batch import Row, TokenBatch
from real_envs.trajectory import Source

_LENGTHS = (32, 96)  # of a row, in tokens
_PHRASE = (2, 12)
_PHRASES = (3, 8)  # different ones in a row


def copying_rows(vocabulary: Sequence[int], tokens: int, rng: random.Random) -> list[Row]:
    """Rows of random phrases that come back, with about ``tokens`` tokens in all.

    Only what can be copied is trained: a phrase that the row has shown before, from its second token on.
    """
    rows: list[Row] = []
    made = 0
    while made < tokens:
        length = rng.randint(*_LENGTHS)
        phrases = [rng.choices(vocabulary, k=rng.randint(*_PHRASE)) for _ in range(rng.randint(*_PHRASES))]
        ids: list[int] = []
        weights: list[float] = []
        shown: set[int] = set()
        while len(ids) < length or not any(weights):
            k = rng.randrange(len(phrases))
            ids += phrases[k]
            weights += [0.0] + [float(k in shown)] * (len(phrases[k]) - 1)
            shown.add(k)
        length = max(length, weights.index(1.0) + 1)
        made += length
        rows.append(Row(ids[:length], [False] * length, Source.EXPERT, ce_weight=weights[:length]))
    return rows


def copying_answers(vocabulary: Sequence[int], tokens: int, rng: random.Random, *, stop: int, most: int) -> list[Row]:
    """The same for models that fill in: random phrases, and an answer of phrases that they were, ended by ``stop``.

    Args:
        most: tokens of an answer at most, its end included.
    """
    rows: list[Row] = []
    made = 0
    while made < tokens:
        phrases = [rng.choices(vocabulary, k=rng.randint(*_PHRASE)) for _ in range(rng.randint(*_PHRASES))]
        text = [token for phrase in phrases for token in phrase]
        answer: list[int] = []
        wanted = rng.randint(1, most - 1)
        while len(answer) < wanted:
            answer += rng.choice(phrases)
        answer = [*answer[:wanted], stop]
        length = len(text) + len(answer)
        made += length
        weights = [0.0] * len(text) + [1.0] * len(answer)
        rows.append(Row([*text, *answer], [False] * length, Source.EXPERT, ce_weight=weights))
    return rows


def one_after_the_other(
    first: Callable[[int], TokenBatch], steps: int, then: Callable[[int], TokenBatch]
) -> Callable[[int], TokenBatch]:
    """The batches of ``first`` for so many steps, and those of ``then`` from its own beginning after them."""
    return lambda step: first(step) if step < steps else then(step - steps)
