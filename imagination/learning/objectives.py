"""What supervised training is by: the next token, or another objective behind the same protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from imagination.learning.losses import cross_entropy_loss, token_logprobs
from policy.lm.batch import TokenBatch
from policy.lm.forward import hidden_before, token_logits


class StepLoss(Protocol):
    """The loss of one optimiser step, which may be computed a few rows at a time."""

    @property
    def width(self) -> int:
        """Tokens of a row in a forward pass, padding included."""
        ...

    @property
    def count(self) -> int:
        """How many tokens of all rows are to be told."""
        ...

    def part(self, model: Any, rows: slice) -> tuple[Tensor, Tensor]:
        """The share of some rows in the loss, and how many of their tokens to be told are the likeliest."""
        ...


class Objective(Protocol):
    def step(self, batch: TokenBatch, seed: int) -> StepLoss:
        """The loss of a step on ``batch``; ``seed`` is its only source of chance."""
        ...


@dataclass(frozen=True, slots=True)
class NextTokenStep:
    """Cross-entropy of the tokens with a ``ce_weight``, a weighted mean over all rows."""

    batch: TokenBatch
    denominator: float

    @property
    def width(self) -> int:
        return self.batch.input_ids.shape[1]

    @property
    def count(self) -> int:
        return int((self.batch.ce_weight != 0).sum())

    def part(self, model: Any, rows: slice) -> tuple[Tensor, Tensor]:
        """See ``StepLoss``."""
        ids, present, weight = (
            x[rows] for x in (self.batch.input_ids, self.batch.attention_mask, self.batch.ce_weight)
        )
        mask = weight != 0
        predictors = hidden_before(model, ids, present, mask)
        logits = token_logits(model, predictors.states)
        logprobs = token_logprobs(logits, ids[mask], which=predictors.which)
        terms = cross_entropy_loss(logprobs[None], weight[mask][None], denominator=self.denominator)
        return terms.loss, (logits.detach().argmax(-1)[predictors.which] == ids[mask]).sum()


class NextToken:
    """What a causal model is trained by."""

    def step(self, batch: TokenBatch, seed: int) -> NextTokenStep:
        return NextTokenStep(batch, float(batch.ce_weight.sum()))


__all__ = ["NextToken", "Objective", "StepLoss"]
