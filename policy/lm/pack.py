"""Prefix-tree packing: many rows become one sequence in which every distinct prefix is computed once.

Episodes of a GRPO group share their start and often whole beginnings, and rows differ in length: most of a padded
batch is repeated, or nothing at all. What a causal decoder makes of a token depends on the token and its past only,
so a prefix that several rows share needs one computation, whose gradient is the sum over those rows. Linear layers,
norms and logits then see distinct tokens only, ``[1, n]``. Attention alone looks across tokens. Where it is compiled
(``native_training``) it goes along the runs of tokens that make up a past. Elsewhere queries, keys and values are
gathered back to rows, cut so that little is computed in vain, and each token takes the result of one row that contains
it.

Exact up to rounding wherever dropout is off. With dropout (adapters in supervised training) the rows that share a token
share its mask; it is drawn for a token instead of for a row, with the same expectation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION = "prefix_packed"
# Rows that attend together without blocks: the shortest is at least this share of the longest, so that padding costs at
# most 1.4 times the quadratic work, a fifth on average, for a handful of calls.
_SIMILAR = 0.85
_CHUNK = 64  # tokens that attend together where rows are not laid out


class AttentionSpan(NamedTuple):
    """Attention of some rows: queries from position ``start`` to ``stop``, to the keys before ``stop``."""

    rows: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How attention is laid out in rows.

    Attributes:
        parts: how it is cut; rows that own nothing in a part are not in it.
        queries, keys: the tokens of all parts one after the other, row by row; short rows repeat their last token.
        results: ``[n]``, where in ``queries`` each token's owner stands.
    """

    parts: list[AttentionSpan]
    queries: Tensor
    keys: Tensor
    results: Tensor


@dataclass(frozen=True)
class Pack:
    """Rows as one sequence of ``n`` distinct tokens. A token is distinct by its id and all ids before it.

    Example: rows ``[5, 6, 7]`` and ``[5, 6, 8, 9]`` are the tokens ``5 6 8 9 7`` at the positions ``0 1 2 3 2``, with
    ``index = [[0, 1, 4, 0], [0, 1, 2, 3]]`` and ``owners = [1, 1, 1, 1, 0]``. Their chunks are ``5 6 8 9``, whose only
    run is itself, and ``7``, which sees the run ``5 6`` and itself: ``runs = [[0, 4], [0, 2], [4, 1]]`` and
    ``chunks = [[0, 1], [1, 3]]``.

    Attributes:
        ids, positions: ``[n]``.
        index: ``[rows, time]``, the token that stands at each place of a row; 0 on padding.
        owners: ``[n]``, one row that contains the token (at its position): the row in which its attention is computed.
        lengths: of the rows.
        block: attention that is laid out in rows goes by blocks of so many positions, or by whole rows.
        runs: ``[., 2]``, tokens that follow each other here as they do in a row: the first, and how many.
        chunks: ``[., 2]``, begin and end in ``runs`` of all that some tokens see, from position 0 on; the last run are
            those tokens themselves. Every token is in one chunk.
    """

    ids: Tensor
    positions: Tensor
    index: Tensor
    owners: Tensor
    lengths: list[int]
    block: int | None
    runs: np.ndarray
    chunks: np.ndarray

    def to(self, device: torch.device) -> Pack:
        """The same pack with its tensors on ``device``."""
        moved = {name: getattr(self, name).to(device) for name in ("ids", "positions", "index", "owners")}
        return replace(self, **moved)

    @cached_property
    def layout(self) -> Layout:
        """For kernels that know rows only."""
        return _laid_out(self)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two rows have in common."""
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def pack(rows: Sequence[Sequence[int]], width: int | None = None, block: int | None = None) -> Pack:
    """Packs rows of token ids; empty rows are allowed, as long as not all are.

    In lexicographic order the longest prefix that a row shares with any earlier row is the one it shares with its
    predecessor. The order is descending, so that a row comes before its own prefixes, which then own nothing.

    Args:
        width: number of columns of ``index``; that of the longest row by default.
        block: attention goes by blocks of so many positions, for kernels that compute what a causal mask hides; without
            it, by whole rows of similar length, for kernels that do not.

    Raises:
        ValueError: there is no token, or a row is longer than ``width``.
    """
    lengths = [len(row) for row in rows]
    longest = max(lengths, default=0)
    if not longest:
        raise ValueError("there is no token to pack")
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a row of {longest} tokens does not fit an index of width {width}")
    index = torch.zeros(len(rows), width, dtype=torch.long)
    ids: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    path: list[tuple[int, int]] = []
    runs: list[tuple[int, int]] = []
    chunks: list[tuple[int, int]] = []
    order = sorted((r for r in range(len(rows)) if rows[r]), key=lambda r: list(rows[r]), reverse=True)
    for before, r in pairwise([None, *order]):
        assert r is not None
        n = lengths[r]
        shared = 0 if before is None else shared_prefix(rows[before], rows[r])
        if before is not None:
            index[r, :shared] = index[before, :shared]
        index[r, shared:n] = torch.arange(len(ids), len(ids) + n - shared)
        ids.extend(rows[r][shared:])
        positions.extend(range(shared, n))
        owners.extend([r] * (n - shared))
        for start in range(shared, n, _CHUNK):
            path = _within(path, start)
            path.append((len(ids) - n + start, min(_CHUNK, n - start)))
            chunks.append((len(runs), len(runs) + len(path)))
            runs.extend(path)
    return Pack(
        torch.tensor(ids),
        torch.tensor(positions),
        index,
        torch.tensor(owners),
        lengths,
        block,
        np.array(runs, dtype=np.int64),
        np.array(chunks, dtype=np.int64),
    )


def _within(path: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The first tokens of a path, in as few runs as they are."""
    runs: list[tuple[int, int]] = []
    for start, count in path:
        count = min(count, tokens)
        if count and runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        elif count:
            runs.append((start, count))
        tokens -= count
    return runs


def _laid_out(packing: Pack) -> Layout:
    index, place, owner = packing.index.cpu(), packing.positions.cpu(), packing.owners.cpu()
    lengths, width = packing.lengths, index.shape[1]
    # from its first token on a row owns all; each is visited from its last to its first
    first = {r: p for r, p in zip(owner.flip(0).tolist(), place.flip(0).tolist(), strict=True)}
    cuts = _by_length(lengths, first) if packing.block is None else _by_block(lengths, first, packing.block)
    last = torch.tensor(lengths).clamp(min=1)[:, None] - 1
    extended = index.gather(1, torch.arange(width).minimum(last))  # short rows repeat their last token
    parts: list[AttentionSpan] = []
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    results = torch.zeros_like(place)
    done = 0
    for inside, start, stop in cuts:
        parts.append(AttentionSpan(len(inside), start, stop))
        queries.append(extended[inside, start:stop].flatten())
        keys.append(extended[inside, :stop].flatten())
        begins = torch.full((len(lengths),), -1)
        begins[inside] = done + (stop - start) * torch.arange(len(inside))
        owned = (place >= start) & (place < stop) & (begins[owner] >= 0)
        results[owned] = begins[owner[owned]] + place[owned] - start
        done += len(inside) * (stop - start)
    device = packing.index.device
    return Layout(parts, *(x.to(device) for x in (torch.cat(queries), torch.cat(keys), results)))


def _by_length(lengths: Sequence[int], first: Mapping[int, int]) -> list[tuple[list[int], int, int]]:
    """Rows that attend together, from the beginning to the end of the longest."""
    groups: list[list[int]] = []
    for r in sorted(first, key=lambda r: -lengths[r]):
        if not groups or lengths[r] < _SIMILAR * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(r)
    return [(rows, 0, lengths[rows[0]]) for rows in groups]


def _by_block(lengths: Sequence[int], first: Mapping[int, int], block: int) -> list[tuple[list[int], int, int]]:
    """The same, block by block: the rows that own a token there."""
    cuts = []
    for start in range(0, max(lengths), block):
        rows = [r for r in first if first[r] < start + block and lengths[r] > start]
        cuts.append((rows, start, min(start + block, max(lengths[r] for r in rows))))
    return cuts


def by_prefix(rows: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Which rows go together: neighbours in lexicographic order, so that what is shared is computed once.

    A micro-batch has at most ``max_tokens`` distinct tokens and at most twice as many in all its rows, because its
    attention is laid out row by row; one row at least.

    Returns:
        Indices of rows; every row occurs once.

    Example::

        by_prefix([[1, 2, 3], [9, 9], [1, 2, 4]], max_tokens=4)  # [[1], [2, 0]]
    """
    batches: list[list[int]] = []
    distinct = total = 0
    for r in sorted(range(len(rows)), key=lambda r: list(rows[r]), reverse=True):
        n = len(rows[r])
        new = n - shared_prefix(rows[batches[-1][-1]], rows[r]) if batches else n
        if not batches or distinct + new > max_tokens or total + n > 2 * max_tokens:
            batches.append([])
            distinct = total = 0
            new = n
        batches[-1].append(r)
        distinct += new
        total += n
    return batches


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Pack,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every token to its own past, for decoders that ask transformers' ``AttentionInterface``.

    Args:
        query, key, value: ``[1, heads, n, dim]`` of the packed tokens; fewer heads of keys and values are allowed.
        attention_mask: not needed and not read.
        packing: where the tokens stand; reaches this function as an argument of the decoder.
        rest: what else a decoder says; ``dropout`` and ``scaling`` are read.

    Returns:
        ``[1, n, heads, dim]`` and no attention weights.
    """
    sdpa, layout = AttentionInterface()["sdpa"], packing.layout
    options = {"dropout": rest.get("dropout", 0.0), "scaling": rest.get("scaling"), "is_causal": True}

    def lay_out(x: Tensor, tokens: Tensor, widths: list[int]) -> list[Tensor]:
        """Per part ``[rows, heads, width, dim]``. Gathered as a matrix: torch is ten times slower with 3 axes."""
        flat = rearrange(x, "1 heads n dim -> n (heads dim)").index_select(0, tokens)
        sizes = [part.rows * width for part, width in zip(layout.parts, widths, strict=True)]
        return [
            rearrange(piece, "(rows width) (heads dim) -> rows heads width dim", width=width, dim=x.shape[-1])
            for piece, width in zip(flat.split(sizes), widths, strict=True)
        ]

    before = [part.stop for part in layout.parts]
    q = lay_out(query, layout.queries, [part.stop - part.start for part in layout.parts])
    k, v = lay_out(key, layout.keys, before), lay_out(value, layout.keys, before)
    outputs = []
    for i, (_rows, start, stop) in enumerate(layout.parts):
        # from the beginning it is plain causal attention, which needs no mask
        mask = torch.ones(1, 1, stop - start, stop, dtype=torch.bool, device=query.device).tril(start)
        output, _weights = sdpa(module, q[i], k[i], v[i], mask if start else None, **options)
        outputs.append(rearrange(output, "rows width heads dim -> (rows width) (heads dim)"))
    attended = torch.cat(outputs).index_select(0, layout.results)
    return rearrange(attended, "n (heads dim) -> 1 n heads dim", heads=query.shape[1]), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)
