"""If these fail, a packed token stands for another one, or its gradient reaches rows that do not contain it.

The reference is a plain set of prefixes: a token is what stands at the end of a prefix, and there is one for each.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.lm.batch import by_length
from policy.lm.pack import by_prefix, pack, shared_prefix

quick = settings(max_examples=50)
# two ids only, so that rows repeat, extend and leave each other at every place; empty rows among them
some_rows = st.lists(st.lists(st.integers(0, 1), max_size=7), min_size=1, max_size=9)
not_nothing = some_rows.filter(any)


def prefixes(rows):
    return {tuple(row[: t + 1]) for row in rows for t in range(len(row))}


@quick
@given(not_nothing)
def test_every_distinct_prefix_is_one_token(rows):
    packing = pack(rows)
    assert len(packing.ids) == len(prefixes(rows))
    seen = {}
    for r, row in enumerate(rows):
        for t in range(len(row)):
            token = int(packing.index[r, t])
            assert (int(packing.ids[token]), int(packing.positions[token])) == (row[t], t)
            assert seen.setdefault(token, tuple(row[: t + 1])) == tuple(row[: t + 1])
    assert set(seen) == set(range(len(packing.ids)))


@quick
@given(not_nothing)
def test_a_token_has_one_parent_and_an_owner_that_contains_it(rows):
    """The past of a token is the same in each row that contains it, so any of them can stand for all."""
    packing = pack(rows)
    parent = {}
    for r, row in enumerate(rows):
        for t in range(1, len(row)):
            token, before = int(packing.index[r, t]), int(packing.index[r, t - 1])
            assert parent.setdefault(token, before) == before
    for token, (owner, position) in enumerate(zip(packing.owners.tolist(), packing.positions.tolist(), strict=True)):
        assert int(packing.index[owner, position]) == token


@quick
@given(not_nothing, st.none() | st.integers(1, 8))
def test_the_query_of_a_token_meets_the_keys_of_its_past(rows, block):
    """Whole rows or block by block: where a token's result is taken from, its own query stands in the row of its owner,
    and the keys of that row up to its position are its past, in order."""
    packing = pack(rows, block=block)
    layout = packing.layout
    assert len(layout.queries) == sum(n * (stop - start) for n, start, stop in layout.parts)
    assert len(layout.keys) == sum(n * stop for n, _, stop in layout.parts)
    where = {}  # place among the queries -> (position, keys of its row)
    at_query = at_key = 0
    for n, start, stop in layout.parts:
        for _ in range(n):
            keys = layout.keys[at_key : at_key + stop].tolist()
            where |= {at_query + i: (start + i, keys) for i in range(stop - start)}
            at_query, at_key = at_query + stop - start, at_key + stop
    assert torch.equal(layout.queries[layout.results], torch.arange(len(packing.ids)))
    for token, place in enumerate(layout.results.tolist()):
        position, keys = where[place]
        assert position == int(packing.positions[token])
        assert keys[: position + 1] == packing.index[packing.owners[token]][: position + 1].tolist()


@quick
@given(not_nothing, st.integers(1, 8))
def test_the_runs_of_a_chunk_are_the_past_of_its_tokens(rows, longest):
    """Every token is in one chunk, whose runs are what stands in its row up to there, in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("policy.lm.pack._CHUNK", longest)
        packing = pack(rows)
    found = []
    for begin, end in packing.chunks.tolist():
        runs = packing.runs[begin:end].tolist()
        assert runs[-1][1] <= longest
        assert all(first + count != following for (first, count), (following, _) in pairwise(runs[:-1])), "in few runs"
        past = [first + i for first, count in runs for i in range(count)]
        last = past[-1]
        assert past == packing.index[packing.owners[last], : len(past)].tolist()
        found += past[-runs[-1][1] :]
    assert sorted(found) == list(range(len(packing.ids)))


def test_little_attention_is_in_vain():
    """Rows of very different lengths attend apart; a row that owns nothing (in a block) does not attend (there)."""
    start = list(range(40))
    rows = [[*start, *range(100, 140)], [*start, *range(200, 240)], start[:7], start[:8], [9] * 8, [9] * 7 + [8]]
    assert [tuple(part) for part in pack(rows).layout.parts] == [(2, 0, 80), (2, 0, 8)]
    assert [tuple(part) for part in pack(rows, block=32).layout.parts] == [(3, 0, 32), (2, 32, 64), (2, 64, 80)]


@quick
@given(not_nothing, st.integers(0, 3))
def test_the_index_is_as_wide_as_asked_for(rows, more):
    width = max(map(len, rows)) + more
    assert pack(rows, width).index.shape == (len(rows), width)


@quick
@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_shared_prefix(a, b):
    n = shared_prefix(a, tuple(b))  # rows come as lists and as tuples
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@quick
@given(some_rows, st.integers(1, 20))
def test_micro_batches_keep_their_bounds_and_lose_no_row(rows, limit):
    for batches in (by_prefix(rows, limit), by_length([len(row) for row in rows], limit)):
        assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in by_prefix(rows, limit):
        inside = [rows[i] for i in batch]
        if len(batch) > 1:
            assert len(prefixes(inside)) <= limit
            assert sum(map(len, inside)) <= 2 * limit
    for batch in by_length([len(row) for row in rows], limit):
        assert len(batch) == 1 or len(batch) * max(len(rows[i]) for i in batch) <= limit
