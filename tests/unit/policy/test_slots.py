"""If these fail, tokens attend to keys and values that are not their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from policy.lm.engines.inprocess.slots import Blocks, SlotCache

TIME, DIM = 12, 8


def filled(heads: int, dim: int = DIM) -> SlotCache:
    cache = SlotCache(2, heads, dim, 9, TIME, torch.float32, torch.device("cpu"))
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=torch.Generator().manual_seed(heads)))
    return cache


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 3], [0, 4, 8]], ids=["neighbours", "an idle one", "far apart"])
@pytest.mark.parametrize("counts", ["single", "several", "both"])
def test_attention_is_that_of_each_query_alone(heads: int, group: int, slots: list[int], counts: str) -> None:
    """Rows of different lengths, read in place or gathered, one query a row or more: a plain loop over queries."""
    cache, rows = filled(heads), len(slots)
    starts = np.array([7, 0, 4][:rows])
    fed = {"single": np.ones(rows, dtype=int), "several": np.array([3, 4, 2][:rows])}
    fed["both"] = np.array([1, 4, 1][:rows])
    n = int(fed[counts].sum())
    q = torch.randn(n, heads * group, DIM, generator=torch.Generator().manual_seed(1))
    blocks = Blocks(np.array(slots), starts, fed[counts], group, cache)
    assert {r.bags is not None for r in blocks.rectangles} == {"single": {True}, "several": {False}}.get(
        counts, {True, False}
    )
    got = blocks.attend(q, *cache.kv[1])
    done = 0
    for slot, start, count in zip(slots, starts, fed[counts], strict=True):
        for position in range(start, start + count):
            for head in range(heads * group):
                keys, values = cache.kv[1, :, slot, head // group, : position + 1]
                expected = (keys @ q[done, head] / DIM**0.5).softmax(0) @ values
                torch.testing.assert_close(got[done, head], expected, rtol=1e-5, atol=1e-6)
            done += 1


def test_what_is_written_lies_where_it_is_read() -> None:
    cache = filled(2)
    before = cache.kv.clone()
    written = torch.randn(3, 4, DIM, generator=torch.Generator().manual_seed(2))
    slots, positions = np.array([0, 0, 8]), np.array([0, 5, TIME - 1])
    cache.write(1, cache.rows(torch.from_numpy(slots), torch.from_numpy(positions)), written)
    for i, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        for head in range(2):
            assert torch.equal(cache.kv[1, 0, slot, head, position], written[i, head])
            assert torch.equal(cache.kv[1, 1, slot, head, position], written[i, 2 + head])
            before[1, :, slot, head, position] = cache.kv[1, :, slot, head, position]
    assert torch.equal(cache.kv, before)  # and nowhere else
