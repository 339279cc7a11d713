"""Prefix-tree packing: many rows become one sequence in which every distinct prefix is computed once.

Episodes of a GRPO group share their start and often whole beginnings, and rows differ in length: most of a padded
batch is repeated, or nothing at all. What a causal decoder makes of a token depends on the token and its past only,
so a prefix that several rows share needs one computation, whose gradient is the sum over those rows. Linear layers,
norms and logits then see distinct tokens only, ``[1, n]``. Attention alone looks across tokens: there, queries, keys
and values are gathered back to rows, cut so that little is computed in vain, and each token takes the result of one row
that contains it.

Exact up to rounding wherever dropout is off. With dropout (adapters in supervised training) the rows that share a token
share its mask; it is drawn for a token instead of for a row, with the same expectation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION = "prefix_packed"
# Rows that attend together without blocks: the shortest is at least this share of the longest, so that padding costs at
# most 1.4 times the quadratic work, a fifth on average, for a handful of calls.
_SIMILAR = 0.85


class Part(NamedTuple):
    """Attention of some rows: queries from position ``start`` to ``stop``, to the keys before ``stop``."""

    rows: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows as one sequence of ``n`` distinct tokens. A token is distinct by its id and all ids before it.

    Example: rows ``[5, 6, 7]`` and ``[5, 6, 8, 9]`` are the tokens ``5 6 8 9 7`` at the positions ``0 1 2 3 2``, with
    ``index = [[0, 1, 4, 0], [0, 1, 2, 3]]`` and ``owners = [1, 1, 1, 1, 0]``.

    Attributes:
        ids, positions: ``[n]``.
        index: ``[rows, time]``, the token that stands at each place of a row; 0 on padding.
        owners: ``[n]``, one row that contains the token (at its position): the row in which its attention is computed.
        parts: how attention is cut; rows that own nothing in a part are not in it.
        queries, keys: the tokens of all parts one after the other, row by row; short rows repeat their last token.
        results: ``[n]``, where in ``queries`` each token's owner stands.
    """

    ids: Tensor
    positions: Tensor
    index: Tensor
    owners: Tensor
    parts: list[Part]
    queries: Tensor
    keys: Tensor
    results: Tensor

    def to(self, device: torch.device) -> Pack:
        """The same pack with its tensors on ``device``."""
        tensors = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "parts"}
        return Pack(**tensors, parts=self.parts)


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
    first: dict[int, int] = {}  # where the tokens begin that a row owns: from there on it owns all
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
        if shared < n:
            first[r] = shared
    cuts = _by_length(lengths, first) if block is None else _by_block(lengths, first, block)
    place, owner = torch.tensor(positions), torch.tensor(owners)
    last = torch.tensor(lengths).clamp(min=1)[:, None] - 1
    extended = index.gather(1, torch.arange(width).minimum(last))  # short rows repeat their last token
    parts: list[Part] = []
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    results = torch.zeros_like(place)
    done = 0
    for inside, start, stop in cuts:
        parts.append(Part(len(inside), start, stop))
        queries.append(extended[inside, start:stop].flatten())
        keys.append(extended[inside, :stop].flatten())
        begins = torch.full((len(rows),), -1)
        begins[inside] = done + (stop - start) * torch.arange(len(inside))
        mine = (place >= start) & (place < stop) & (begins[owner] >= 0)
        results[mine] = begins[owner[mine]] + place[mine] - start
        done += len(inside) * (stop - start)
    return Pack(torch.tensor(ids), place, index, owner, parts, torch.cat(queries), torch.cat(keys), results)


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
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every token to its own past, for decoders that ask transformers' ``AttentionInterface``.

    Args:
        query, key, value: ``[1, heads, n, dim]`` of the packed tokens; fewer heads of keys and values are allowed.
        attention_mask: not needed and not read.
        packing: where the tokens stand; reaches this function as an argument of the decoder.

    Returns:
        ``[1, n, heads, dim]`` and no attention weights.
    """
    sdpa = AttentionInterface()["sdpa"]

    def lay_out(x: Tensor, tokens: Tensor, widths: list[int]) -> list[Tensor]:
        """Per part ``[rows, heads, width, dim]``. Gathered as a matrix: torch is ten times slower with 3 axes."""
        flat = rearrange(x, "1 heads n dim -> n (heads dim)").index_select(0, tokens)
        sizes = [part.rows * width for part, width in zip(packing.parts, widths, strict=True)]
        return [
            rearrange(piece, "(rows width) (heads dim) -> rows heads width dim", width=width, dim=x.shape[-1])
            for piece, width in zip(flat.split(sizes), widths, strict=True)
        ]

    before = [part.stop for part in packing.parts]
    q = lay_out(query, packing.queries, [part.stop - part.start for part in packing.parts])
    k, v = lay_out(key, packing.keys, before), lay_out(value, packing.keys, before)
    outputs = []
    for i, (_rows, start, stop) in enumerate(packing.parts):
        # from the beginning it is plain causal attention, which needs no mask
        mask = torch.ones(1, 1, stop - start, stop, dtype=torch.bool, device=query.device).tril(start)
        output, _weights = sdpa(
            module, q[i], k[i], v[i], mask if start else None, dropout=dropout, scaling=scaling, is_causal=True
        )
        outputs.append(rearrange(output, "rows width heads dim -> (rows width) (heads dim)"))
    attended = torch.cat(outputs).index_select(0, packing.results)
    return rearrange(attended, "n (heads dim) -> 1 n heads dim", heads=query.shape[1]), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)
