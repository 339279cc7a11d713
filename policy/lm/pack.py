"""Prefix-tree packing: many rows become one sequence in which every distinct prefix is computed once.

Episodes of a GRPO group share their start and often whole beginnings, and rows differ in length: most of a padded
batch is repeated, or nothing at all. What a causal decoder makes of a token depends on the token and its past only,
so a prefix that several rows share needs one computation, whose gradient is the sum over those rows. Linear layers,
norms and logits then see distinct tokens only, ``[1, n]``. Attention alone looks across tokens: there, queries, keys
and values are gathered back into a few rectangles of rows of similar length (plain causal attention, no mask), and
each token takes the result of one row that contains it.

Exact up to rounding wherever dropout is off. With dropout (adapters in supervised training) the rows that share a token
share its mask; it is drawn for a token instead of for a row, with the same expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION = "prefix_packed"
# Rows in one rectangle of attention are at least this share of its longest: at most 1.4 times the quadratic cost of
# rows without padding, a fifth more on average, for a handful of rectangles.
_SIMILAR = 0.85


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows as one sequence of ``n`` distinct tokens. A token is distinct by its id and all ids before it.

    Example: rows ``[5, 6, 7]`` and ``[5, 6, 8, 9]`` are the tokens ``5 6 8 9 7`` at the positions ``0 1 2 3 2``, with
    ``index = [[0, 1, 4, 0], [0, 1, 2, 3]]`` and ``owners = [1, 1, 1, 1, 0]``.

    Attributes:
        ids, positions: ``[n]``.
        index: ``[rows, time]``, the token that stands at each place of a row; 0 on padding.
        lengths: of the rows.
        owners: ``[n]``, one row that contains the token (at its position): the row in which its attention is computed.
        rectangles: shapes ``(rows, time)`` of the attention; rows that own nothing take no part in it.
        gathered: the tokens of all rectangles one after the other; short rows repeat their last token.
        results: ``[n]``, where in ``gathered`` each token's owner stands.
    """

    ids: Tensor
    positions: Tensor
    index: Tensor
    lengths: list[int]
    owners: Tensor
    rectangles: list[tuple[int, int]]
    gathered: Tensor
    results: Tensor

    def to(self, device: torch.device) -> Pack:
        """The same pack with its tensors on ``device``."""
        tensors = (self.ids, self.positions, self.index, self.owners, self.gathered, self.results)
        ids, positions, index, owners, gathered, results = (tensor.to(device) for tensor in tensors)
        return Pack(ids, positions, index, self.lengths, owners, self.rectangles, gathered, results)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two rows have in common."""
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def pack(rows: Sequence[Sequence[int]], width: int | None = None) -> Pack:
    """Packs rows of token ids; empty rows are allowed, as long as not all are.

    In lexicographic order the longest prefix that a row shares with any earlier row is the one it shares with its
    predecessor. The order is descending, so that a row comes before its own prefixes, which then own nothing.

    Args:
        width: number of columns of ``index``; that of the longest row by default.

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
    rectangles, gathered, results = _lay_out(index, lengths, torch.tensor(owners), torch.tensor(positions))
    return Pack(
        torch.tensor(ids), torch.tensor(positions), index, lengths, torch.tensor(owners), rectangles, gathered, results
    )


def _lay_out(
    index: Tensor, lengths: Sequence[int], owners: Tensor, positions: Tensor
) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
    """The rectangles of attention over the rows that own a token."""
    groups: list[list[int]] = []
    for r in sorted(set(owners.tolist()), key=lambda r: -lengths[r]):
        if not groups or lengths[r] < _SIMILAR * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(r)
    starts = torch.zeros(len(index), dtype=torch.long)  # where in the gathered tokens a row begins
    pieces: list[Tensor] = []
    total = 0
    for rows in groups:
        time = lengths[rows[0]]
        for r in rows:
            starts[r] = total
            total += time
            piece = index[r, :time].clone()
            piece[lengths[r] :] = index[r, lengths[r] - 1]
            pieces.append(piece)
    shapes = [(len(rows), lengths[rows[0]]) for rows in groups]
    return shapes, torch.cat(pieces), starts[owners] + positions


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
    sizes = [rows * time for rows, time in packing.rectangles]

    def lay_out(x: Tensor) -> list[Tensor]:
        """Per rectangle ``[rows, heads, time, dim]``. Gathered as a matrix: torch is ten times slower with 3 axes."""
        flat = rearrange(x, "1 heads n dim -> n (heads dim)").index_select(0, packing.gathered)
        return [
            rearrange(part, "(rows time) (heads dim) -> rows heads time dim", time=time, dim=x.shape[-1])
            for part, (_, time) in zip(flat.split(sizes), packing.rectangles, strict=True)
        ]

    outputs = []
    for q, k, v in zip(*map(lay_out, (query, key, value)), strict=True):
        output, _weights = sdpa(module, q, k, v, None, dropout=dropout, scaling=scaling, is_causal=True)
        outputs.append(rearrange(output, "rows time heads dim -> (rows time) (heads dim)"))
    attended = torch.cat(outputs).index_select(0, packing.results)
    return rearrange(attended, "n (heads dim) -> 1 n heads dim", heads=query.shape[1]), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)
