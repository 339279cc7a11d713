"""If these fail, a resumed run would train on other data than the uninterrupted one, or on some of it twice."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.data.batches import SupervisedBatches, copying_answers, copying_rows, fit_batches, one_after_the_other
from imagination.settings import FitSettings
from policy.lm.batch import Row
from real_envs.trajectory import Source
from tests.support.plain import TOKENIZER

WORDS = range(5, 90)


def rows(n: int) -> list[Row]:
    """Row k holds the id k + 1 in each of its 2 to 9 places, so that it can be told apart in a batch."""
    return [Row([k + 1] * (2 + k % 8), [True] * (2 + k % 8), Source.REAL) for k in range(n)]


def batch_ids(batches: SupervisedBatches, step: int) -> list[int]:
    return [int(row[0]) for row in batches(step).ids]


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    straight = SupervisedBatches(rows(40), batch_tokens=30, seed=3, pad=0)
    expected = [straight(step).ids for step in range(30)]
    resumed = SupervisedBatches(rows(40), batch_tokens=30, seed=3, pad=0)
    for step in (29, 7, 0, 18):
        assert resumed(step).ids.tolist() == expected[step].tolist()
    other = SupervisedBatches(rows(40), batch_tokens=30, seed=4, pad=0)
    assert [other(s).ids.tolist() for s in range(5)] != [e.tolist() for e in expected[:5]]


def test_an_epoch_holds_every_row_once_and_the_next_one_in_another_order() -> None:
    batches = SupervisedBatches(rows(40), batch_tokens=30, seed=0, pad=0)
    seen: Counter[int] = Counter()
    step = 0
    while sum(seen.values()) < 40:
        batch = batches(step)
        assert batch.ids.numel() <= 30, "more padded tokens than the budget"
        seen.update(batch_ids(batches, step))
        step += 1
    assert seen == Counter(range(1, 41))
    first = [batch_ids(batches, s) for s in range(step)]
    second = [batch_ids(batches, s) for s in range(step, 2 * step)]
    assert first != second


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        SupervisedBatches([], 10, 0, 0)


# --- copying ---


def rows_of(tokens: int, seed: int) -> list[Row]:
    return copying_rows(WORDS, tokens, random.Random(seed))


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 900))
def test_only_what_the_row_has_shown_before_is_trained(seed: int, tokens: int) -> None:
    """A trained token follows the same token as before somewhere earlier in the row: it can be copied."""
    rows = rows_of(tokens, seed)
    assert sum(len(row.ids) for row in rows) >= tokens > sum(len(row.ids) for row in rows[:-1])
    for row in rows:
        ids = row.ids.tolist()
        assert set(ids) <= set(WORDS)
        assert row.ce_weight.any()
        assert not row.action_mask.any()
        pairs = list(pairwise(ids))
        for k, weight in enumerate(row.ce_weight.tolist()):
            assert weight in (0.0, 1.0)
            if weight:
                assert (ids[k - 1], ids[k]) in pairs[: k - 1]


def test_rows_are_those_of_the_seed() -> None:
    first, again, other = ([row.ids.tolist() for row in rows_of(300, seed)] for seed in (1, 1, 2))
    assert first == again != other


def test_one_stream_follows_the_other_from_its_beginning() -> None:
    """A resumed run asks for the same steps again."""
    both = one_after_the_other(lambda k: ("nonsense", k), 3, lambda k: ("log", k))  # type: ignore[arg-type, return-value]
    asked = [("nonsense", 0), ("nonsense", 2), ("log", 0), ("log", 2), ("nonsense", 2)]
    assert [both(k) for k in (0, 2, 3, 5, 2)] == asked


def test_a_row_whose_phrases_are_late_to_return_grows_until_one_does() -> None:
    """Thousands of them: a short row with long phrases shows none twice within its length."""
    assert all(row.ce_weight.any() for row in rows_of(300_000, 0))


def test_copying_comes_first_then_the_first_rows_then_the_others() -> None:
    """Rows of one token each; of copying rows only the count of steps is known."""
    first, then = (Row([token] * 8, [False] * 8, Source.REAL, ce_weight=[1.0] * 8) for token in (7, 9))
    for copying_steps in (0, 2):
        fit = FitSettings(steps=2, batch_tokens=8, copying_steps=copying_steps, copying_share=0.0)
        batches, trained = fit_batches([then] * 3, TOKENIZER, fit, 0, first=[first] * 3, first_steps=3)
        assert trained.steps == copying_steps + 5
        made = [batches(step) for step in range(trained.steps)]
        read = [set(torch.unique(batch.ids[batch.ce_weight > 0]).tolist()) for batch in made]
        if not copying_steps:
            assert read == [{7}, {7}, {7}, {9}, {9}]
        assert all(tokens != {7} and tokens != {9} for tokens in read[:copying_steps])


def test_copying_answers_are_phrases_of_their_text_and_end() -> None:
    for row in copying_answers(WORDS, 500, random.Random(0), stop=3, max_tokens=9):
        ids, start = row.ids.tolist(), row.ce_weight.tolist().index(1.0)
        assert ids[-1] == 3
        assert len(ids) - start <= 9
        assert set(ids[start:-1]) <= set(ids[:start]) <= set(WORDS)
