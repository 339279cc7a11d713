"""Rows as the batches of a supervised training. The batch of a step is a function of rows, seed and step alone.

A stopped run therefore goes on with the batches that the uninterrupted one would have seen.
"""

from __future__ import annotations

import bisect
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from imagination.settings import FitSettings, UserError
from policy.lm.batch import Row, RowBatch, by_length, collate
from policy.lm.tokenizer import plain_tokens
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source

Batches = Callable[[int], RowBatch]  # by the number of the step
Settings = TypeVar("Settings", bound=FitSettings)
CopyingRows = Callable[[Sequence[int], int, random.Random], list[Row]]

_WINDOW = 512  # rows that are sorted by length together, so that epochs differ
_BATCHES = 16  # batches' worth of rows that are at least, so that little of a large batch is padding
_LENGTHS = (32, 96)  # tokens of a copying row
_PHRASE = (2, 12)  # tokens of a phrase
_PHRASES = (3, 8)  # different phrases of a row


def truncate(row: Row, limit: int) -> Row:
    """The first ``limit`` tokens of a supervised row."""
    if len(row) <= limit:
        return row
    return Row(row.ids[:limit], row.action_mask[:limit], row.source, ce_weight=row.ce_weight[:limit])


def fitting(rows: Sequence[Row], limit: int, key: str) -> list[Row]:
    """The rows, truncated to the context; those with nothing left to learn are dropped. Raises ``UserError``: nothing
    is left at all; it names ``key``, the setting that is the limit.
    """
    kept = [truncate(row, limit) for row in rows]
    kept = [row for row in kept if row.ce_weight.any()]
    long = sum(len(row) > limit for row in rows)
    if long:
        print(f"note: {long} of {len(rows)} rows are longer than {key}={limit} tokens and were cut", file=sys.stderr)
    if not kept:
        raise UserError(f"no episode has anything to learn within {key}={limit} tokens; raise it")
    return kept


def epoch_batches(rows: Sequence[Row], batch_tokens: int, rng: random.Random) -> list[list[Row]]:
    """All rows once, in batches of similar length with about ``batch_tokens`` tokens, in random order."""
    shuffled = list(rows)
    rng.shuffle(shuffled)
    batches: list[list[Row]] = []
    size = max(_WINDOW, _BATCHES * len(rows) * batch_tokens // max(1, sum(map(len, rows))))
    for start in range(0, len(shuffled), size):
        window = shuffled[start : start + size]
        batches.extend([window[i] for i in b] for b in by_length([len(row) for row in window], batch_tokens))
    rng.shuffle(batches)
    return batches


class SupervisedBatches:
    """Batches of rows of similar length with about ``batch_tokens`` tokens, in an order drawn anew each epoch."""

    def __init__(self, rows: Sequence[Row], batch_tokens: int, seed: int, pad: int) -> None:
        if not rows:
            raise ValueError("there is nothing to train on: no episode of the log was selected")
        self._rows, self._batch_tokens, self._seed, self._pad = rows, batch_tokens, seed, pad
        self._epochs: list[list[list[Row]]] = []
        self._first_step = [0]

    def __call__(self, step: int) -> RowBatch:
        epoch = self._epoch(step)
        return collate(self._epochs[epoch][step - self._first_step[epoch]], self._pad)

    def epochs(self, steps: int) -> float:
        """How often so many steps read each row, on average."""
        epoch = self._epoch(steps)
        return epoch + (steps - self._first_step[epoch]) / len(self._epochs[epoch])

    def _epoch(self, step: int) -> int:
        """The epoch of a step, which is drawn if it was not yet."""
        while self._first_step[-1] <= step:
            rng = random.Random(derive_seed("batches", self._seed, len(self._epochs)))
            self._epochs.append(epoch_batches(self._rows, self._batch_tokens, rng))
            self._first_step.append(self._first_step[-1] + len(self._epochs[-1]))
        return bisect.bisect_right(self._first_step, step) - 1


def fit_batches(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    seed: int,
    *,
    first: Sequence[Row] = (),
    first_steps: int = 0,
    copying: CopyingRows | None = None,
) -> tuple[Batches, Settings]:
    """The batches of a fit: copying alone for ``copying_steps``, then ``first_steps`` on the rows ``first``, then
    ``rows``; copying rows, which ``copying`` makes, are also mixed into the latter two.

    ``steps`` of the settings that are returned counts all steps.
    """
    repeats: list[Row] = []
    copying = copying or copying_rows
    if settings.copying_steps:
        tokens = max(1, int(settings.copying_share * sum(map(len, rows))))
        repeats = copying(plain_tokens(tokenizer), tokens, random.Random(derive_seed("copying", seed)))
    pad = pad_of(tokenizer)
    batches: Batches = SupervisedBatches([*rows, *repeats], settings.batch_tokens, seed, pad)
    if first_steps:
        before = SupervisedBatches([*first, *repeats], settings.batch_tokens, derive_seed("first", seed), pad)
        batches = one_after_the_other(before, first_steps, batches)
    if settings.copying_steps:
        rng = random.Random(derive_seed("copying", seed, 1))
        batches = copying_first(batches, tokenizer, settings, seed, rng, copying)
    return batches, replace(settings, steps=settings.copying_steps + first_steps + settings.steps)


def one_after_the_other(first: Batches, steps: int, then: Batches) -> Batches:
    """The batches of ``first`` for so many steps, and those of ``then`` from its own beginning after them."""
    return lambda step: first(step) if step < steps else then(step - steps)


def pad_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills up a batch."""
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) else 0


# --- copying practice: random tokens that repeat ---
#
# A language model can speak of an unknown world only by copying: rooms, things and numbers stand in what it has just
# read. A small model trained on the log alone memorises its words first, and finds copying after millions of tokens. On
# random tokens whose phrases repeat it takes a few hundred thousand (as with the formal languages of Hu et al. 2025,
# arXiv 2502.19249).


def copying_first(
    batches: Batches,
    tokenizer: PreTrainedTokenizerBase,
    settings: FitSettings,
    seed: int,
    rng: random.Random,
    copying: CopyingRows | None = None,
) -> Batches:
    """``settings.copying_steps`` batches of copying rows, which ``copying`` makes by ``rng``, then ``batches``."""
    if not settings.copying_steps:
        return batches
    tokens = settings.copying_steps * settings.batch_tokens
    rows = (copying or copying_rows)(plain_tokens(tokenizer), tokens, rng)
    alone = SupervisedBatches(rows, settings.batch_tokens, seed, pad_of(tokenizer))
    return one_after_the_other(alone, settings.copying_steps, batches)


def copying_rows(vocabulary: Sequence[int], tokens: int, rng: random.Random) -> list[Row]:
    """Rows of random phrases that repeat, with about ``tokens`` tokens in all.

    Only what can be copied is trained: a phrase that the row has shown before, from its second token on.
    """
    rows: list[Row] = []
    made = 0
    while made < tokens:
        length = rng.randint(*_LENGTHS)
        phrases = _random_phrases(vocabulary, rng)
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


def copying_answers(
    vocabulary: Sequence[int], tokens: int, rng: random.Random, *, stop: int, max_tokens: int
) -> list[Row]:
    """The same for diffusion: random phrases, and at most ``max_tokens`` of an answer made of them, up to ``stop``."""
    rows: list[Row] = []
    made = 0
    while made < tokens:
        phrases = _random_phrases(vocabulary, rng)
        text = [token for phrase in phrases for token in phrase]
        answer: list[int] = []
        length = rng.randint(1, max_tokens - 1)
        while len(answer) < length:
            answer += rng.choice(phrases)
        answer = [*answer[:length], stop]
        total = len(text) + len(answer)
        made += total
        weights = [0.0] * len(text) + [1.0] * len(answer)
        rows.append(Row([*text, *answer], [False] * total, Source.EXPERT, ce_weight=weights))
    return rows


def _random_phrases(vocabulary: Sequence[int], rng: random.Random) -> list[list[int]]:
    return [rng.choices(vocabulary, k=rng.randint(*_PHRASE)) for _ in range(rng.randint(*_PHRASES))]
