r"""Masked diffusion: what it costs to fill in a canvas of which each token is hidden with one probability.

For a canvas x of L tokens after a past c, with t uniform in (0, 1) and each token hidden with probability t,

.. math:: \mathcal L = E_t\, E_{x_t \mid x}\, \frac{1}{t} \sum_{i: x_t^i = M} -\log p(x^i \mid x_t, c)

is an upper bound of :math:`-\log p(x \mid c)` (MDLM; Sahoo et al. 2024, arXiv 2406.07524, equation 10 with the linear
schedule :math:`\alpha_t = 1 - t`, for which :math:`-\alpha_t' / (1 - \alpha_t) = 1 / t`; LLaDA; Nie et al. 2025, arXiv
2502.09992, equation 3, and appendix A for a prompt). The model gives the mask itself no probability (MDLM, section
3.2.3: zero masking probabilities).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policy.lm.batch import TokenBatch
from policy.lm.forward import token_logits
from worldmodel.diffusion.canvas import Canvas, Layout, canvas_states, canvases, lay_out

LEAST_NOISE = 1e-3  # as in LLaDA: below, a weight of 1 / t meets almost no hidden token


def noise_levels(n: int, generator: torch.Generator) -> Tensor:
    """``[n]`` numbers, each uniform in (``LEAST_NOISE``, 1), one in each n-th of it, in random order.

    One uniform number shifts all (MDLM, section 3.5, after Kingma et al. 2021, arXiv 2107.00630): a mean over a batch
    then varies less. The order must be random, or a canvas would be hidden more the later it stands in its batch.
    """
    shifted = (torch.rand((), generator=generator) + torch.arange(n)) / n
    return LEAST_NOISE + (1 - LEAST_NOISE) * shifted[torch.randperm(n, generator=generator)]


def without_mask(logits: Tensor, mask: int) -> Tensor:
    """Logits ``[..., vocabulary]`` that give the mask token no probability."""
    index = torch.tensor([mask], device=logits.device)
    return logits.index_fill(-1, index, float("-inf"))


def weighted_nll(logprobs: Tensor, levels: Tensor, weights: Tensor) -> Tensor:
    """The sum over hidden tokens of ``weight / t * -log p``.

    Args:
        logprobs, levels, weights: ``[hidden]``, of each hidden token: that of what is right, the noise level of its
            canvas, and the weight of its turn.
    """
    return -(weights / levels * logprobs).sum()


@dataclass(frozen=True)
class DiffusionStep:
    """The loss of an optimiser step: its canvases and how they are hidden are drawn for all of its rows at once.

    Attributes:
        batch: the texts.
        canvases: of all rows, in order.
        hidden: ``[canvases, block]``.
        levels: ``[canvases]``.
        block, mask: as in ``MaskedDiffusion``.
        width: columns of a row in a forward pass.
        denominator: the sum over canvases of ``weight * block``.
    """

    batch: TokenBatch
    canvases: list[Canvas]
    hidden: Tensor
    levels: Tensor
    block: int
    mask: int
    width: int
    denominator: float

    @property
    def count(self) -> int:
        """How many tokens are to be filled in."""
        return int(self.hidden.sum())

    def part(self, model: Any, rows: slice) -> tuple[Tensor, Tensor]:
        """The share of some rows in the loss, and how many of their hidden tokens are the likeliest."""
        ids = self.batch.input_ids[rows]
        first, last = rows.start, rows.start + len(ids)
        mine = [i for i, canvas in enumerate(self.canvases) if first <= canvas.row < last]
        if not mine or not self.hidden[mine].any():
            trained = next(p for p in model.parameters() if p.requires_grad)
            return trained.sum() * 0.0, torch.zeros((), dtype=torch.long, device=ids.device)
        chosen = [Canvas(c.row - first, c.start, c.ids, c.weight) for c in (self.canvases[i] for i in mine)]
        layout = lay_out(ids, chosen, self.block)
        where, hidden = torch.tensor(mine), self.hidden[mine].to(ids.device)
        logits, truth = self._filled(model, layout, hidden)
        logprobs = logits.log_softmax(-1).gather(-1, truth[:, None])[:, 0]
        per_canvas = torch.tensor([canvas.weight for canvas in chosen])
        levels, weights = (
            x.to(ids.device)[:, None].expand(-1, self.block)[hidden] for x in (self.levels[where], per_canvas)
        )
        loss = weighted_nll(logprobs, levels, weights) / self.denominator
        return loss, (logits.detach().argmax(-1) == truth).sum()

    def _filled(self, model: Any, layout: Layout, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``[hidden, vocabulary]`` logits of all hidden tokens, and what is right there."""
        at = layout.row[hidden], layout.column[hidden]
        truth = layout.ids[at]
        noisy = layout.ids.clone()
        noisy[at] = self.mask
        states = canvas_states(model, layout, noisy)[at]
        return without_mask(token_logits(model, states), self.mask), truth


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """What ``worldmodel.kind=diffusion`` is trained by.

    Attributes:
        block: tokens of a canvas.
        mask: the id that hides a token.
        stop: the id that ends an answer.
        context: the longest text.
    """

    block: int
    mask: int
    stop: int
    context: int

    def canvases(self, batch: TokenBatch) -> list[Canvas]:
        """All that the batch has, row by row: the tokens with a ``ce_weight``."""
        ids, weights = batch.input_ids.tolist(), batch.ce_weight.tolist()
        return [
            canvas
            for row, (one, weight) in enumerate(zip(ids, weights, strict=True))
            for canvas in canvases(row, one, weight, self.block, self.stop, self.context)
        ]

    def step(self, batch: TokenBatch, seed: int) -> DiffusionStep:
        """The loss of a step on ``batch``, divided by the tokens of its canvases, each with the weight of its turn.

        Args:
            seed: all that decides which tokens are hidden, whatever the device.
        """
        found = self.canvases(batch)
        generator = torch.Generator().manual_seed(seed)
        levels = noise_levels(len(found), generator)
        hidden = torch.rand(len(found), self.block, generator=generator) < levels[:, None]
        most = max((sum(c.row == row for c in found) for row in {c.row for c in found}), default=0)
        return DiffusionStep(
            batch,
            found,
            hidden,
            levels,
            self.block,
            self.mask,
            batch.input_ids.shape[1] + most * self.block,
            max(1e-9, sum(canvas.weight for canvas in found) * self.block),
        )
