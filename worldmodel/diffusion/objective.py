r"""Masked diffusion: what it costs to fill in a canvas of which some tokens are hidden.

For a canvas x of L tokens after a past c, of which k are hidden, k uniform in 1 to L and each choice as likely,

.. math:: \mathcal L = E_k\, E_{x_k \mid x}\, \frac{L}{k} \sum_{i: x_k^i = M} -\log p(x^i \mid x_k, c)

is an upper bound of :math:`-\log p(x \mid c)` (LLaDA; Nie et al. 2025, arXiv 2502.09992, equation 14). Its mean is that
of the usual form, which hides each token with a probability t that is uniform in (0, 1) and weighs by 1 / t (MDLM;
Sahoo et al. 2024, arXiv 2406.07524, equation 10 with the linear schedule :math:`\alpha_t = 1 - t`, for which
:math:`-\alpha_t' / (1 - \alpha_t) = 1 / t`), and its variance is far lower: there, a token that happens to be hidden at
t = 0.003 weighs 300 times what others do, and the few canvases of a step never even that out. The model gives the mask
itself no probability (MDLM, section 3.2.3: zero masking probabilities).

Beside it the text may be told token by token, from the same pass: what canvases see of the past is then read by a
network that has to make something of every token of it, not only of what was hidden this time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policy.lm.batch import RowBatch
from policy.lm.forward import token_logits
from worldmodel.diffusion.canvas import Canvas, Inverse, canvas_states, canvases, lay_out


def hide(sizes: Tensor, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which tokens of each canvas are hidden, ``[n, longest]``, and what share of those asked for, ``[n]``.

    The shares are spread evenly over the canvases of a step, in random order: one uniform number shifts them all
    (MDLM, section 3.5, after Kingma et al. 2021, arXiv 2107.00630), so a mean over the step varies less.

    Args:
        sizes: ``[n]``, how many of its first tokens are asked for; one at least of them is hidden.
    """
    n = len(sizes)
    even = (torch.rand((), generator=generator) + torch.arange(n)) / n
    counts = (even[torch.randperm(n, generator=generator)] * sizes).floor().long().clamp(max=sizes - 1) + 1
    order = torch.rand(n, longest, generator=generator)
    order[torch.arange(longest) >= sizes[:, None]] = 2.0  # behind all that may be hidden
    return order.argsort(1).argsort(1) < counts[:, None], counts / sizes


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
    """The loss of an optimiser step: its canvases and how they are hidden are drawn for all of its rows at once.

    Attributes:
        batch: the texts.
        canvases: of all rows.
        hidden: ``[canvases, longest]``.
        shares: ``[canvases]``, of what is asked for, how much is hidden.
        mask: as in ``MaskedDiffusion``.
        width: columns of a row in a forward pass.
        denominator: the sum over canvases of ``weight * tokens to be filled in``.
        causal_weight: of the next token of the text, a weighted mean as in ``NextToken``, beside the canvases.
    """

    batch: RowBatch
    canvases: list[Canvas]
    hidden: Tensor
    shares: Tensor
    mask: int
    width: int
    denominator: float
    causal_weight: float = 0.0

    @property
    def count(self) -> int:
        """How many tokens are to be filled in."""
        return int(self.hidden.sum())

    def part(self, model: Any, rows: slice) -> tuple[Tensor, Tensor]:
        """The share of some rows in the loss, and how many of their hidden tokens are the likeliest."""
        ids = self.batch.input_ids[rows]
        first, last = rows.start, rows.start + len(ids)
        mine = [i for i, canvas in enumerate(self.canvases) if first <= canvas.row < last]
        if not mine:
            trained = next(p for p in model.parameters() if p.requires_grad)
            return trained.sum() * 0.0, torch.zeros((), dtype=torch.long, device=ids.device)
        chosen = [replace(c, row=c.row - first) for c in (self.canvases[i] for i in mine)]
        layout = lay_out(ids, chosen)
        each = torch.tensor([len(canvas.ids) for canvas in chosen])
        hidden = self.hidden[mine][torch.arange(self.hidden.shape[1]) < each[:, None]].to(ids.device)
        at = layout.row[hidden], layout.column[hidden]
        truth, noisy = layout.ids[at], layout.ids.clone()
        noisy[at] = self.mask
        states = canvas_states(model, layout, noisy)
        logits = without_mask(token_logits(model, states[at]), self.mask)
        logprobs = logits.log_softmax(-1).gather(-1, truth[:, None])[:, 0]
        per_canvas = self.shares[mine], torch.tensor([canvas.weight for canvas in chosen])
        shares, weights = (x.repeat_interleave(each).to(ids.device)[hidden] for x in per_canvas)
        loss = weighted_nll(logprobs, shares, weights) / self.denominator
        if self.causal_weight:
            loss = loss + self.causal_weight * self._told(model, states, rows)
        return loss, (logits.detach().argmax(-1) == truth).sum()

    def _told(self, model: Any, states: Tensor, rows: slice) -> Tensor:
        """The share of some rows in the mean cross-entropy of the text's next tokens."""
        ids, weight = self.batch.input_ids[rows], self.batch.ce_weight[rows]
        told = weight[:, 1:] != 0
        logits = without_mask(token_logits(model, states[:, : ids.shape[1] - 1][told]), self.mask)
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:][told][:, None])[:, 0]
        return -(weight[:, 1:][told] * logprobs).sum() / self.batch.ce_weight.sum()


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """What ``worldmodel.kind=diffusion`` is trained by.

    Attributes:
        block: tokens of a canvas.
        mask: the id that hides a token.
        stop: the id that ends an answer.
        context: the longest text.
        causal_weight: as in ``DiffusionStep``.
        inverse: how actions are asked for; ``None`` where they are not.
        inverse_share: of the actions that are asked for in a step, drawn anew for each.
    """

    block: int
    mask: int
    stop: int
    context: int
    causal_weight: float = 0.0
    inverse: Inverse | None = None
    inverse_share: float = 0.0

    def canvases(self, batch: RowBatch) -> list[Canvas]:
        """All that the batch has, row by row: the tokens with a ``ce_weight``."""
        ids, weights = batch.input_ids.tolist(), batch.ce_weight.tolist()
        return [
            canvas
            for row, (one, weight) in enumerate(zip(ids, weights, strict=True))
            for canvas in canvases(row, one, weight, self.block, self.stop, self.context)
        ]

    def inverse_canvases(self, batch: RowBatch, generator: torch.Generator) -> list[Canvas]:
        """Those of a step; none where actions are not asked for."""
        if self.inverse is None:
            return []
        found: list[Canvas] = []
        for row, (ids, weights) in enumerate(zip(batch.input_ids.tolist(), batch.ce_weight.tolist(), strict=True)):
            found += self.inverse.canvases(row, ids, weights, self.stop, self.context)
        drawn = torch.rand(len(found), generator=generator) < self.inverse_share
        return [canvas for canvas, taken in zip(found, drawn.tolist(), strict=True) if taken]

    def step(self, batch: RowBatch, seed: int) -> DiffusionStep:
        """The loss of a step on ``batch``, divided by the tokens of its canvases, each with the weight of its turn.

        Args:
            seed: all that decides which tokens are hidden, whatever the device.
        """
        generator = torch.Generator().manual_seed(seed)
        found = self.canvases(batch) + self.inverse_canvases(batch, generator)
        asked = torch.tensor([canvas.asked for canvas in found], dtype=torch.long)
        hidden, shares = hide(asked, max((len(canvas.ids) for canvas in found), default=0), generator)
        beside = Counter[int]()
        for canvas in found:
            beside[canvas.row] += len(canvas.ids)
        return DiffusionStep(
            batch,
            found,
            hidden,
            shares,
            self.mask,
            batch.input_ids.shape[1] + max(beside.values(), default=0),
            max(1e-9, sum(canvas.weight * canvas.asked for canvas in found)),
            self.causal_weight,
        )
