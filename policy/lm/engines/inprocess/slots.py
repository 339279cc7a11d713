"""Keys and values of many sequences in one buffer, and attention of ragged blocks of new tokens over them.

Every sequence owns a *slot*. A step feeds each sequence a block of new tokens: one while it decodes, many where a
prompt or a draft is read. Linear layers see the blocks laid end to end (*flat*, no padding); only attention needs
rectangles, which ``Blocks`` plans once per step for all layers.
"""

from __future__ import annotations

import math
import mmap
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from policy.lm.compiled import native_attention


@dataclass(frozen=True, slots=True)
class Feed:
    """The new tokens of one step. Row ``r`` feeds ``counts[r]`` tokens at positions ``starts[r] ...`` of its slot."""

    slots: np.ndarray  # ``[row]``, ascending
    starts: np.ndarray  # ``[row]``
    counts: np.ndarray  # ``[row]``
    tokens: np.ndarray  # ``[n]`` ids, row after row
    wanted: np.ndarray  # ascending indices into ``tokens``: whose logits are asked for
    canvas: bool = False  # every token also sees those of its own row that stand behind it

    def slot_of_token(self) -> np.ndarray:
        return np.repeat(self.slots, self.counts)

    def positions(self) -> np.ndarray:
        first = np.cumsum(self.counts) - self.counts
        return np.arange(len(self.tokens)) + np.repeat(self.starts - first, self.counts)


class SlotCache:
    """``kv[layer, 0 | 1]`` are keys and values ``[slot, head, time, dim]``; written in place, never copied to grow.

    Zeros at first: masked attention multiplies what lies in unused places by zero, which NaN would survive. On CPUs the
    zeros cost no memory until they are written to.
    """

    def __init__(
        self, layers: int, heads: int, dim: int, slots: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # one place more than the context: what padding writes goes there, and nobody sees it
        shape = (layers, 2, slots, heads, context + 1, dim)
        if device.type == "cpu":
            width = torch.empty((), dtype=dtype).element_size()
            self.kv = torch.from_numpy(_zeros((*shape[:-1], dim * width))).view(dtype)
        else:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.waste_position = context
        self.native = native_attention(dtype, dim, device)

    def rows(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where ``write`` puts what token ``n`` leaves, in a layer as a table ``[2 * slot * head * time, dim]``.

        Returns:
            ``[n, 2 * head]``: first the keys, then the values.
        """
        _, _, slot_count, heads, time, _ = self.kv.shape
        head = torch.arange(heads, device=slots.device)
        return torch.cat([head, slot_count * heads + head]) * time + (slots * heads * time + positions)[:, None]

    def write(self, layer: int, rows: torch.Tensor, keys_and_values: torch.Tensor) -> None:
        """``[n, 2 * head, dim]``, to where ``rows`` says."""
        self.kv[layer].view(-1, self.kv.shape[-1])[rows] = keys_and_values

    def copy(self, source: int, target: int, length: int) -> None:
        """The first ``length`` positions of one slot, for another sequence that begins with the same tokens."""
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def clear(self, slot: int) -> None:
        """Zeros, after a broken sequence: its NaN would leak through the mask into whoever gets the slot next."""
        self.kv[:, :, slot].zero_()


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Bytes that take memory where they are written to. NumPy asks for pages of two megabytes, of which each slot uses
    the beginning: several times the memory, and most of the time of a first turn."""
    if sys.platform == "win32":
        return np.zeros(shape, dtype=np.uint8)
    memory = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8).reshape(shape)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows of similar block length, padded to one shape."""

    slots: slice | torch.Tensor  # a slice of neighbouring slots, or their indices: keys of a slice are read in place
    queries: torch.Tensor  # ``[row, width]`` indices into the flat tokens; where ``real`` is false, any valid index
    mask: torch.Tensor  # ``[row, 1, group * width, visible]``, 0 where a query may see a position and -inf elsewhere
    real: torch.Tensor  # flat positions in the rectangle that hold real queries, in the order of ``targets``
    targets: torch.Tensor  # the flat tokens that they are
    visible: int  # how many positions any row can see
    whole: bool  # the rectangle is the flat tokens themselves, nothing to sort
    # for single queries on CPUs in fp32, which rows of the layer's values ``[slot * head * time, dim]`` each query head
    # sums up: ``[row * head * group * visible]``
    bags: torch.Tensor | None


def sizes(counts: np.ndarray) -> np.ndarray:
    """Powers of two, as exponents, that block lengths are rounded up to: equal ones pad each other at most twofold."""
    exponents: np.ndarray = np.ceil(np.log2(np.maximum(counts, 1))).astype(int)
    return exponents


class Blocks:
    """The attention plan of a step: row ``r`` has ``counts[r]`` queries at positions ``starts[r] ...`` of ``slots[r]``.

    ``group`` query heads share each head of keys; ``canvas`` is that of a ``Feed``. Short blocks go to compiled
    attention where there is such; the others are grouped by length (in powers of two), so that one long prompt does not
    pad a batch of decoding rows.
    """

    def __init__(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        group: int,
        cache: SlotCache,
        canvas: bool = False,
    ) -> None:
        self.rectangles: list[Rectangle] = []
        blocks = np.stack([slots, starts, counts, np.cumsum(counts) - counts], 1).astype(np.int64)  # [row, 4]
        self._native = cache.native
        few = counts <= (cache.native.most if cache.native and not canvas else 0)  # what is compiled is causal
        self.plan = blocks[few]
        kinds = sizes(counts)
        for kind in np.unique(kinds[~few]):
            rows = np.flatnonzero((kinds == kind) & ~few)
            rows = rows[np.argsort(slots[rows])]
            self.rectangles.append(_rectangle(blocks[rows], int(counts.sum()), group, cache, canvas))

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Softmax attention of every query over what its slot holds up to its own position.

        Args:
            q: ``[n, query_head, dim]``, flat.
            keys, values: ``[slot, head, time, dim]``.

        Returns:
            ``[n, query_head, dim]``.
        """
        n, query_heads, dim = q.shape
        heads = keys.shape[1]
        group = query_heads // heads
        out: torch.Tensor | None = None
        if self._native and len(self.plan):
            out = q.new_empty(n, query_heads, dim)
            self._native(q, keys, values, self.plan, out)
        for part in self.rectangles:
            rows = len(part.queries)
            k = keys[part.slots, :, : part.visible]
            if part.bags is None:
                v = values[part.slots, :, : part.visible]
                seen = attention(q[part.queries], k, v, part.mask).flatten(0, 1)
            else:
                single = q if part.whole else q[part.queries[:, 0]]
                seen = _single(single.view(rows, heads, group, dim), k, values, part.mask, part.bags)
            if part.whole:
                return seen
            out = q.new_empty(n, query_heads, dim) if out is None else out
            out[part.targets] = seen[part.real]
        assert out is not None
        return out


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax attention of as many queries in each row.

    Args:
        q: ``[row, width, query_head, dim]``.
        keys, values: ``[row, head, visible, dim]``.
        mask: as in ``Rectangle``.

    Returns:
        ``[row, width, query_head, dim]``.
    """
    (rows, width, _, dim), heads = q.shape, keys.shape[1]
    # query heads that share keys become further queries of them: [row, head, group * width, dim]
    block = q.view(rows, width, heads, -1, dim).permute(0, 2, 3, 1, 4).reshape(rows, heads, -1, dim)
    seen = F.scaled_dot_product_attention(block, keys, values, attn_mask=mask)
    return seen.view(rows, heads, -1, width, dim).permute(0, 3, 1, 2, 4).reshape(q.shape)


def attention_mask(positions: torch.Tensor, visible: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """That of ``Rectangle`` for queries that see the positions up to ``positions[row, width]``."""
    allowed = positions[:, None, :, None] >= torch.arange(visible, device=positions.device)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=positions.device).masked_fill_(~allowed, float("-inf"))
    return mask.expand(-1, -1, group, -1) if positions.shape[1] == 1 else mask.repeat(1, 1, group, 1)


def _rectangle(blocks: np.ndarray, total: int, group: int, cache: SlotCache, canvas: bool) -> Rectangle:
    """``blocks``: slot, start, count and first flat token, ``[row, 4]``; of ``total`` flat tokens."""
    slots, starts, counts, first = blocks.T
    dtype, device = cache.kv.dtype, cache.kv.device
    low, high = int(slots[0]), int(slots[-1]) + 1
    where: slice | torch.Tensor
    if high - low <= 2 * len(slots):  # idle slots in between cost less than a copy of all keys
        where, height, place = slice(low, high), high - low, slots - low
    else:
        where, height, place = torch.from_numpy(slots).to(device), len(slots), np.arange(len(slots))
    width, visible = int(counts.max()), int((starts + counts).max())
    columns = np.arange(width)
    inside = columns < counts[:, None]  # [row, width]
    queries = np.zeros((height, width), dtype=np.int64)
    queries[place] = np.where(inside, first[:, None] + columns, 0)
    horizons = np.zeros((height, width), dtype=np.int64)  # position 0 for padding: it always sees one key
    last = (starts + counts - 1)[:, None] if canvas else starts[:, None] + columns
    horizons[place] = np.where(inside, last, 0)
    mask = attention_mask(torch.from_numpy(horizons).to(device), visible, group, dtype)
    real = (place[:, None] * width + columns)[inside]
    targets = queries[place][inside]
    size = height * width
    whole = len(targets) == total == size and np.array_equal(real, targets)
    single = width == 1 and device.type == "cpu" and dtype == torch.float32
    return Rectangle(
        where,
        torch.from_numpy(queries).to(device),
        mask,
        torch.from_numpy(real).to(device),
        torch.from_numpy(targets).to(device),
        visible,
        whole,
        _bags(np.arange(low, high) if isinstance(where, slice) else slots, visible, group, cache) if single else None,
    )


def _bags(slots: np.ndarray, visible: int, group: int, cache: SlotCache) -> torch.Tensor:
    _, _, slot_count, heads, time, _ = cache.kv.shape
    kind = torch.int32 if slot_count * heads * time < 2**31 else torch.int64
    begins = (slots[:, None] * heads + np.arange(heads)) * time
    rows = torch.from_numpy(begins).to(kind)[:, :, None, None] + torch.arange(visible, dtype=kind)
    return rows.expand(-1, -1, group, -1).flatten()


def _single(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, bags: torch.Tensor
) -> torch.Tensor:
    """Attention of one query a row and head, ``[row, head, group, dim]``; returns ``[row, head * group, dim]``.

    Products of so few rows with a matrix run far below the speed of memory in BLAS. A weighted sum of rows of a table
    has a kernel of its own, made for embeddings, which also takes the values from where they lie.
    """
    rows, heads, group, dim = q.shape
    visible = keys.shape[2]
    q = q * dim**-0.5
    if group == 1:
        scores = torch.matmul(keys, q.transpose(2, 3)).view(rows, heads, 1, visible)  # faster this way round
    else:
        scores = torch.matmul(q, keys.transpose(2, 3))
    weights = scores.add_(mask).softmax(-1).flatten()
    offsets = torch.arange(0, len(bags), visible, dtype=bags.dtype)
    summed = F.embedding_bag(bags, values.view(-1, dim), offsets, mode="sum", per_sample_weights=weights)
    return summed.view(rows, heads * group, dim)
