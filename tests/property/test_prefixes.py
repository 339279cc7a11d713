"""If these fail, a packed token stands for another one, or its gradient reaches rows that do not contain it.

The reference is a plain set of prefixes: a token is what stands at the end of a prefix, and there is one for each.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.lm.batch import by_length
from policy.lm.pack import by_prefix, pack, shared_prefix

quick = settings(deadline=None, max_examples=100)
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
@given(not_nothing)
def test_attention_sees_each_owner_row_once_and_whole(rows):
    packing = pack(rows)
    assert len(packing.gathered) == sum(height * width for height, width in packing.rectangles)
    laid_out, at = [], 0
    for height, width in packing.rectangles:
        laid_out += [(at + i * width, width) for i in range(height)]
        at += height * width
    owners = sorted(set(packing.owners.tolist()))
    assert len(laid_out) == len(owners)
    assert torch.equal(packing.gathered[packing.results], torch.arange(len(packing.ids)))
    for token, where in enumerate(packing.results.tolist()):
        start, width = next((s, w) for s, w in laid_out if s <= where < s + w)
        row = rows[int(packing.owners[token])]
        assert where - start == int(packing.positions[token])
        assert (
            packing.gathered[start : start + len(row)].tolist()
            == packing.index[packing.owners[token]][: len(row)].tolist()
        )
        assert len(row) <= width < len(row) / 0.84 + 1  # padding costs attention


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
