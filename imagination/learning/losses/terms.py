"""What every loss is made of: its terms, the weights of its tokens, log-probs and entropies of tokens from logits.

Every loss is ``sum of weight * token loss / denominator``. An average is a choice of the two, made once per optimiser
step (``token_weights``), so none depends on how the batch is padded, packed or split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from imagination.learning.shapes import at_least_fp32, check_mask, check_shapes
from imagination.settings.algorithm_parts import Aggregation


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What losses read of the tokens of a micro-batch, all of one shape, ``[batch, time]`` or ``[n]``.

    Attributes:
        logprobs: nats, of the policy that is trained; the only part with a gradient besides ``entropy`` and ``values``.
        behavior_logprobs: of the policy that acted. Where engine and trainer compute differently they are the
            trainer's own, of the policy before the update.
        advantages: as ``Advantages`` has them.
        weight: as ``token_weights`` gives it; 0 on every token that is not trained.
        sequences: integers, equal within an episode; for ratios of sequences. A micro-batch holds whole episodes.
        turns: integers, equal within a turn; for ratios of turns.
        importance: constant factors of each token's loss against a mismatch of engine and trainer; ``None`` for 1.
        ref_logprobs: of the frozen reference; for the KL as a loss.
        entropy: for the entropy terms.
        values, old_values, returns, learned: of the critic; ``learned`` is bool.
    """

    logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    weight: Tensor
    sequences: Tensor | None = None
    turns: Tensor | None = None
    importance: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    learned: Tensor | None = None

    @property
    def active(self) -> Tensor:
        """Bool, the trained tokens."""
        return self.weight != 0

    def given(self, name: str, instead: str) -> Tensor:
        """A column that the settings call for. The error where it is missing says what to choose ``instead``."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ValueError(f"give LossInputs.{name}, or choose {instead}")
        return column

    def where(self, mask: Tensor) -> LossInputs:
        """Some of the tokens, ``[n]``, without gradient."""
        columns: dict[str, Any] = {}
        for f in fields(self):
            column: Tensor | None = getattr(self, f.name)
            columns[f.name] = None if column is None else column.detach()[mask]
        return LossInputs(**columns)

    def times_importance(self, factor: Tensor) -> LossInputs:
        """The same tokens, the loss of each multiplied by another constant factor."""
        if self.importance is not None:
            factor = factor * constant(self.importance, self.active)
        return replace(self, importance=factor)

    def check_shapes(self, where: str) -> None:
        """Raises ``ValueError`` where what a policy's loss reads is not of one shape."""
        columns = {name: getattr(self, name) for name in ("logprobs", "behavior_logprobs", "advantages", "weight")}
        check_shapes(where, **columns, importance=self.weight if self.importance is None else self.importance)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss and what is to be logged about it; all are scalars.

    Attributes:
        loss: the only part with a gradient.
        tokens: how many tokens had a weight other than 0.
        sums: add over micro-batches and ranks; divided by ``tokens`` they are means over tokens.
        maxima: of which to take the largest; 0 where no token counted.
    """

    loss: Tensor
    tokens: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def times(self, coef: float) -> LossTerms:
        """The loss times its coefficient; what is logged stays."""
        return replace(self, loss=coef * self.loss)

    def means(self) -> dict[str, Tensor]:
        """``sums`` per token; zeros where no token counted."""
        return {name: total / self.tokens.clamp(min=1) for name, total in self.sums.items()}


def loss_terms(
    per_token: Tensor,
    weight: Tensor,
    denominator: float,
    sums: Mapping[str, Tensor],
    maxima: Mapping[str, Tensor] | None = None,
) -> LossTerms:
    """The terms of a loss.

    Args:
        per_token: finite where the weight is 0, too.
        sums: of each token, numbers or whether something holds; 0 where the weight is.
    """
    if not (denominator > 0 and math.isfinite(denominator)):
        raise ValueError(
            f"denominator is the global number of tokens and must be positive, got {denominator}; "
            "leave a loss out of a step in which nothing has weight"
        )
    return LossTerms(
        loss=(per_token * weight.to(per_token.dtype)).sum() / denominator,
        tokens=(weight != 0).sum().to(per_token.dtype),
        sums={name: x.detach().sum().to(per_token.dtype) for name, x in sums.items()},
        maxima=maxima or {},
    )


def difference(a: Tensor, b: Tensor, active: Tensor) -> Tensor:
    """``a - b`` where active, else 0. Subtraction is linear: a junk operand cannot turn a zero gradient into NaN."""
    return (at_least_fp32(a) - at_least_fp32(b)).masked_fill(~active, 0.0)


def constant(x: Tensor, active: Tensor) -> Tensor:
    """``x`` without gradient, exactly 0 where not active."""
    return at_least_fp32(x.detach()).masked_fill(~active, 0.0)


def largest(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_zeros(())


@torch.no_grad()
def token_weights(mask: Tensor, aggregation: Aggregation, *, max_tokens: int | None = None) -> tuple[Tensor, float]:
    """Weights ``[batch, time]`` of a global batch of episodes, and the denominator of its losses.

    * ``token_mean`` (DAPO): all tokens weigh the same, so long episodes weigh more.
    * ``sequence_mean`` (GRPO, GSPO): the mean over episodes of the mean over tokens.
    * ``constant`` (Dr.GRPO, Liu et al. 2025, arXiv 2503.20783): the mean over episodes of the sum over tokens, divided
      by a constant length. A length bias neither for nor against long episodes.

    Args:
        mask: ``[batch, time]`` bool, trained tokens; a row is an episode. All rows of the optimiser step.
        max_tokens: the constant of ``constant``, the most agent tokens that an episode can have. It is a setting, never
            the longest of the batch: that would make the gradient depend on who is in the batch.

    Returns:
        ``(weights, denominator)``. Rows without a trained token count for nothing. The denominator is 0 where nothing
        is trained: leave the loss out.

    Raises:
        ValueError: ``mask`` is not bool, the name is unknown, or ``max_tokens`` is missing, given without use, or too
            small for an episode.

    Example::

        token_weights(tensor([[True, True], [True, False]]), "sequence_mean")  # [[0.5, 0.5], [1, 0]], 2
    """
    check_mask("token_weights", mask)
    if aggregation not in ("token_mean", "sequence_mean", "constant"):
        raise ValueError(f"aggregation must be token_mean, sequence_mean or constant, got {aggregation!r}")
    if (max_tokens is not None) != (aggregation == "constant"):
        raise ValueError("max_tokens belongs to aggregation=constant, and constant needs it")
    lengths = mask.sum(1)
    rows = float((lengths > 0).sum())
    weights = mask.float()
    if aggregation == "token_mean":
        return weights, float(lengths.sum())
    if aggregation == "sequence_mean":
        return weights / lengths.clamp(min=1)[:, None], rows
    assert max_tokens is not None
    if lengths.numel() and int(lengths.max()) > max_tokens:
        raise ValueError(f"an episode has {int(lengths.max())} agent tokens: set max_tokens to at least that")
    return weights, rows * max_tokens


def token_logprobs(
    logits: Tensor, ids: Tensor, temperature: float = 1.0, mask: Tensor | None = None, which: Tensor | None = None
) -> Tensor:
    """``log_softmax(logits / temperature)`` at ``ids``: the log-prob an engine reports when it samples at T.

    Args:
        logits: ``[batch, time, vocab]`` or ``[n, vocab]``, already shifted: ``logits[:, t]`` predicts ``ids[:, t]``.
        mask: bool; where false, logits and ids may be anything and the result is 0.
        which: ``[n]``, where several of the ids ``[n]`` are predicted by the same logits ``[m, vocab]``: which of the
            ``m``. Without a mask.

    Returns:
        nats, fp32 or better.

    Raises:
        ValueError: shapes disagree or ``temperature`` is not positive (greedy tokens have no log-prob).

    Example::

        token_logprobs(tensor([[[0.0, log(3.0)]]]), tensor([[1]]), temperature=0.5)  # [[log(9/10)]]
        token_logprobs(tensor([[0.0, log(3.0)]]), tensor([1, 0]), which=tensor([0, 0]))  # [log(3/4), log(1/4)]
    """
    logits = _scaled_logits("token_logprobs", logits, temperature, mask)
    if which is not None:
        if mask is not None or logits.ndim != 2 or ids.ndim != 1 or which.shape != ids.shape:
            raise ValueError(
                "with `which`, token_logprobs needs logits [m, vocab], ids [n], which [n] and no mask, got "
                f"{tuple(logits.shape)}, {tuple(ids.shape)} and {tuple(which.shape)}"
            )
        return logits.log_softmax(dim=-1)[which, ids.long()]
    if ids.shape != logits.shape[:-1]:
        raise ValueError(f"ids must have the tokens' shape {tuple(logits.shape[:-1])}, got {tuple(ids.shape)}")
    if mask is not None:
        ids = ids.masked_fill(~mask, 0)
    picked = logits.log_softmax(dim=-1).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)
    return picked if mask is None else picked.masked_fill(~mask, 0.0)


def token_entropy(logits: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Entropy of the distribution each token was sampled from, ``-sum p log p``, in nats, with a gradient.

    Arguments and errors are those of ``token_logprobs``; a logit of -inf is a token that cannot be sampled.

    Example::

        token_entropy(tensor([[[0.0, 0.0]]]))  # [[log(2)]]
    """
    logits = _scaled_logits("token_entropy", logits, temperature, mask)
    log_p = logits.log_softmax(dim=-1)
    # A log-prob of -inf times its probability 0 would be NaN.
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)
    return entropy if mask is None else entropy.masked_fill(~mask, 0.0)


def _scaled_logits(where: str, logits: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    if logits.ndim < 2:
        raise ValueError(f"{where} needs logits [batch, time, vocab] or [n, vocab], got {tuple(logits.shape)}")
    if not temperature > 0.0:
        raise ValueError(f"{where} needs a positive temperature, got {temperature}")
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != logits.shape[:-1]:
            raise ValueError(
                f"{where} needs a bool mask of the tokens' shape {tuple(logits.shape[:-1])}, "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        logits = logits.masked_fill(~mask.unsqueeze(-1), 0.0)
    logits = at_least_fp32(logits)
    return logits if temperature == 1.0 else logits / temperature  # the largest tensor of a step: no needless copy
