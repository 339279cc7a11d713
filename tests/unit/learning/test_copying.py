"""If these fail, models that start at random learn nonsense by heart, or the log only after what they cannot copy."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.copying import copying_rows, one_after_the_other
from policy.lm.batch import Row

WORDS = range(5, 90)


def rows_of(tokens: int, seed: int) -> list[Row]:
    return copying_rows(WORDS, tokens, random.Random(seed))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 900))
def test_only_what_the_row_has_shown_before_is_trained(seed: int, tokens: int) -> None:
    """A trained token follows the same token as before somewhere earlier in the row: it can be copied."""
    rows = rows_of(tokens, seed)
    assert sum(len(row.ids) for row in rows) >= tokens > sum(len(row.ids) for row in rows[:-1])
    for row in rows:
        assert set(row.ids) <= set(WORDS)
        assert any(row.ce_weight)
        assert not any(row.action_mask)
        pairs = list(zip(row.ids, row.ids[1:], strict=False))
        for k, weight in enumerate(row.ce_weight):
            assert weight in (0.0, 1.0)
            if weight:
                assert (row.ids[k - 1], row.ids[k]) in pairs[: k - 1]


def test_rows_are_those_of_the_seed() -> None:
    assert rows_of(300, 1) == rows_of(300, 1) != rows_of(300, 2)


def test_one_stream_follows_the_other_from_its_beginning() -> None:
    """A resumed run asks for the same steps again."""
    both = one_after_the_other(lambda k: ("nonsense", k), 3, lambda k: ("log", k))  # type: ignore[arg-type, return-value]
    assert [both(k) for k in (0, 2, 3, 5, 2)] == [
        ("nonsense", 0),
        ("nonsense", 2),
        ("log", 0),
        ("log", 2),
        ("nonsense", 2),
    ]


def test_a_row_whose_phrases_are_late_to_return_grows_until_one_does() -> None:
    """Thousands of them: a short row with long phrases shows none twice within its length."""
    assert all(any(row.ce_weight) for row in rows_of(300_000, 0))
