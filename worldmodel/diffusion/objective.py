r"""Masked diffusion: what it costs to fill in a canvas of which some tokens are hidden.

For a canvas x of L tokens after a past c, of which k are hidden, k uniform in 1 to L and each choice as likely,

.. math:: \mathcal L = E_k\, E_{x_k \mid x}\, \frac{L}{k} \sum_{i: x_k^i = M} -\log p(x^i \mid x_k, c)

is an upper bound of :math:`-\log p(x \mid c)` (LLaDA; Nie et al. 2025, arXiv 2502.09992, equation 14). Its mean is that
of the usual form, which hides each token with a probability t that is uniform in (0, 1) and weighs by 1 / t (MDLM;
Sahoo et al. 2024, arXiv 2406.07524, equation 10 with the linear schedule :math:`\alpha_t = 1 - t`, for which
:math:`-\alpha_t' / (1 - \alpha_t) = 1 / t`), and its variance is far lower: there, a token that happens to be hidden at
t = 0.003 weighs 300 times what others do, and the few canvases of a step never even that out. The model gives the mask
itself no probability (MDLM, section 3.2.3: zero masking probabilities).

Beside it the text may be predicted token by token, from the same pass: what canvases see of the past is then read by a
network that has to make something of every token of it, not only of what was hidden this time.

What a model reads is the text as a causal model reads it, so its keys and values are those of any other prompt and can
be kept from turn to turn. Canvases stand beside the text: each sees all of the text before its first token and all of
itself, and nothing sees a canvas but itself. So one pass trains every canvas of an episode, as in block diffusion
(Arriola et al. 2025, arXiv 2503.09573, section 3.3), where the clean text and its noisy blocks are one sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policy.lm.batch import RowBatch
from policy.lm.forward import decoder, token_logits

TEXT, NOWHERE = -1, -2  # where columns of a layout belong that are of no canvas


@dataclass(frozen=True, slots=True)
class Canvas:
    """A canvas and what belongs in it."""

    row: int  # whose text it is of
    start: int  # the position of its first token; it sees the text before that
    ids: tuple[int, ...]
    weight: float  # of the turn


def canvases(
    row: int, ids: Sequence[int], weights: Sequence[float], block: int, stop: int, context: int
) -> list[Canvas]:
    """The answers of a text, cut into canvases.

    An answer is a run of tokens with a weight; it is over behind ``stop``. The last canvas of an answer is filled up
    with ``stop``. A run that does not end in ``stop`` was cut, and only its full canvases are taken: the rest would
    teach where the cut was.

    Args:
        ids, weights: of the text, ``[time]``.
        block: tokens of a canvas.
        context: canvases that reach beyond it are left out.

    Example::

        canvases(0, [7, 5, 6, 2, 7], [0, 1, 1, 1, 0], block=2, stop=2, context=8)
        # [Canvas(0, 1, (5, 6), 1), Canvas(0, 3, (2, 2), 1)]
    """
    cut: list[Canvas] = []
    at = 0
    while at < len(ids):
        if not weights[at]:
            at += 1
            continue
        begin = at
        while at < len(ids) and weights[at] and ids[at] != stop:
            at += 1
        ended = at < len(ids) and bool(weights[at])
        at += ended
        for start in range(begin, at, block):
            piece = tuple(ids[start : min(start + block, at)])
            if (len(piece) == block or ended) and start + block <= context:
                cut.append(Canvas(row, start, piece + (stop,) * (block - len(piece)), weights[start]))
    return cut


@dataclass(frozen=True, slots=True)
class CanvasLayout:
    """Texts with their canvases behind them, as one rectangle: its ``n`` columns are the longest text's and the most
    tokens that the canvases of a row have.

    Attributes:
        ids, positions: ``[rows, n]``; the canvases hold what is right.
        row, column: ``[tokens]``, where the tokens of the canvases stand, one canvas after the other.
    """

    ids: Tensor
    positions: Tensor
    seen: Tensor  # ``[rows, n, n]``, which columns each one sees
    row: Tensor
    column: Tensor


def lay_out(input_ids: Tensor, chosen: Sequence[Canvas]) -> CanvasLayout:
    rows, time = input_ids.shape
    device = input_ids.device
    begins: list[int] = []  # of each canvas behind its text
    behind = [0] * rows  # tokens of the canvases of each row
    for canvas in chosen:
        begins.append(behind[canvas.row])
        behind[canvas.row] += len(canvas.ids)

    def per_token(values: Iterable[int]) -> Tensor:
        repeated = [v for value, canvas in zip(values, chosen, strict=True) for v in [value] * len(canvas.ids)]
        return torch.tensor(repeated, dtype=torch.long, device=device)

    def whole(value: int) -> Tensor:
        return torch.full((rows, n), value, dtype=torch.long, device=device)

    n = time + max(behind)
    row, start = per_token(canvas.row for canvas in chosen), per_token(canvas.start for canvas in chosen)
    inside = torch.tensor([k for canvas in chosen for k in range(len(canvas.ids))], dtype=torch.long, device=device)
    column = time + per_token(begins) + inside
    ids, positions, past, group = whole(0), whole(0), whole(0), whole(NOWHERE)
    ids[:, :time] = input_ids
    ids[row, column] = torch.tensor([i for canvas in chosen for i in canvas.ids], dtype=torch.long, device=device)
    positions[:, :time] = torch.arange(time, device=device)
    positions[row, column] = start + inside
    past[:, :time] = torch.arange(time, device=device) + 1  # how much of the text each column sees
    past[row, column] = start
    group[:, :time] = TEXT
    group[row, column] = per_token(range(len(chosen)))
    of_text = torch.arange(time, device=device) < past[:, :, None]
    of_canvas = group[:, :, None] == group[:, None, time:]  # what is nowhere sees what is nowhere: none sees nothing
    return CanvasLayout(ids, positions, torch.cat([of_text, of_canvas], 2), row, column)


def canvas_states(model: Any, layout: CanvasLayout, ids: Tensor) -> Tensor:
    """Final hidden states ``[rows, n, hidden]`` of a layout that holds ``ids``: the canvases, some of it masked."""
    seen = layout.seen[:, None]
    if model.config._attn_implementation == "eager":  # it adds the mask to the scores
        seen = torch.where(seen, 0.0, torch.finfo(model.dtype).min).to(model.dtype)
    states: Tensor = decoder(model)(
        input_ids=ids, attention_mask=seen, position_ids=layout.positions, use_cache=False
    ).last_hidden_state
    return states


def hide(n: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which tokens of ``n`` canvases are hidden, ``[n, size]``, one at least of each, and what share, ``[n]``.

    The shares are spread evenly over the canvases of a step, in random order: one uniform number shifts them all
    (MDLM, section 3.5, after Kingma et al. 2021, arXiv 2107.00630), so a mean over the step varies less.
    """
    even = (torch.rand((), generator=generator) + torch.arange(n)) / n
    counts = (even[torch.randperm(n, generator=generator)] * size).floor().long().clamp(max=size - 1) + 1
    order = torch.rand(n, size, generator=generator)
    return order.argsort(1).argsort(1) < counts[:, None], counts / size


def without_mask(logits: Tensor, mask: int) -> Tensor:
    """Logits ``[..., vocabulary]`` that give the mask token no probability."""
    index = torch.tensor([mask], device=logits.device)
    return logits.index_fill(-1, index, float("-inf"))


def weighted_nll(logprobs: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
    """The sum over hidden tokens of ``weight * L / k * -log p``.

    Args:
        logprobs, shares, weights: ``[hidden]``, of each hidden token: that of what is right, the hidden share ``k / L``
            of its canvas, and the weight of its turn.
    """
    return -(weights / shares * logprobs).sum()


@dataclass(frozen=True)
class DiffusionStep:
    """The loss of an optimiser step: its canvases and how they are hidden are drawn for all of its rows at once."""

    batch: RowBatch
    canvases: list[Canvas]
    hidden: Tensor  # ``[canvases, block]``
    shares: Tensor  # ``[canvases]``, how much of each is hidden
    mask: int
    width: int
    denominator: float  # the sum over canvases of ``weight * block``
    # of the next token of the text, a weighted mean as in ``NextToken``, beside the canvases
    causal_weight: float = 0.0

    @property
    def count(self) -> int:
        return int(self.hidden.sum())

    def part(self, model: Any, rows: slice | Sequence[int]) -> tuple[Tensor, Tensor]:
        """The share of some rows in the loss, and how many of their hidden tokens are the likeliest."""
        ids = self.batch.ids[rows]
        place = {row: k for k, row in enumerate(torch.arange(len(self.batch.ids))[rows].tolist())}
        own = [i for i, canvas in enumerate(self.canvases) if canvas.row in place]
        if not own:  # a pass all the same: processes that share out the weights make as many
            states = decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
            return states.sum() * 0.0, torch.zeros((), dtype=torch.long, device=ids.device)
        chosen = [replace(c, row=place[c.row]) for c in (self.canvases[i] for i in own)]
        layout = lay_out(ids, chosen)
        hidden = self.hidden[own].flatten().to(ids.device)
        at = layout.row[hidden], layout.column[hidden]
        truth, noisy = layout.ids[at], layout.ids.clone()
        noisy[at] = self.mask
        states = canvas_states(model, layout, noisy)
        logits = without_mask(token_logits(model, states[at]), self.mask)
        logprobs = logits.log_softmax(-1).gather(-1, truth[:, None])[:, 0]
        per_canvas = self.shares[own], torch.tensor([canvas.weight for canvas in chosen])
        block = self.hidden.shape[1]
        shares, weights = (x.repeat_interleave(block).to(ids.device)[hidden] for x in per_canvas)
        loss = weighted_nll(logprobs, shares, weights) / self.denominator
        if self.causal_weight:
            loss = loss + self.causal_weight * self._next_token_loss(model, states, rows)
        return loss, (logits.detach().argmax(-1) == truth).sum()

    def _next_token_loss(self, model: Any, states: Tensor, rows: slice | Sequence[int]) -> Tensor:
        """The share of some rows in the mean cross-entropy of the text's next tokens."""
        ids, weight = self.batch.ids[rows], self.batch.ce_weight[rows]
        predicted = weight[:, 1:] != 0
        logits = without_mask(token_logits(model, states[:, : ids.shape[1] - 1][predicted]), self.mask)
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:][predicted][:, None])[:, 0]
        return -(weight[:, 1:][predicted] * logprobs).sum() / self.batch.ce_weight.sum()


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """What ``worldmodel.kind=diffusion`` is trained by."""

    block: int
    mask: int
    stop: int
    context: int
    causal_weight: float = 0.0

    def canvases(self, batch: RowBatch) -> list[Canvas]:
        """Row by row: the tokens with a ``ce_weight``."""
        ids, weights = batch.ids.tolist(), batch.ce_weight.tolist()
        return [
            canvas
            for row, (one, weight) in enumerate(zip(ids, weights, strict=True))
            for canvas in canvases(row, one, weight, self.block, self.stop, self.context)
        ]

    def step(self, batch: RowBatch, seed: int) -> DiffusionStep:
        """The loss of a step on ``batch``; the seed decides which tokens are hidden, whatever the device."""
        generator = torch.Generator().manual_seed(seed)
        drawn = self.canvases(batch)
        hidden, shares = hide(len(drawn), self.block, generator)
        most = max(Counter(canvas.row for canvas in drawn).values(), default=0)
        return DiffusionStep(
            batch,
            drawn,
            hidden,
            shares,
            self.mask,
            batch.ids.shape[1] + most * self.block,
            max(1e-9, sum(canvas.weight * self.block for canvas in drawn)),
            self.causal_weight,
        )
