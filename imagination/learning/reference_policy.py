"""Log-probs of chosen tokens under a model, and how far they are from those of a frozen reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from imagination.learning.losses import kl_k1, kl_k2, kl_k3, token_logprobs
from imagination.learning.losses.auxiliary import Estimator
from policy.lm.batch import Row, TokenBatch, collate
from policy.lm.forward import hidden_before, micro_batches, token_logits

_KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


@torch.no_grad()
def logprobs_under(model: Any, batch: TokenBatch, mask: Tensor, temperature: float) -> Tensor:
    """``[n]``, nats, of the masked tokens under ``model`` at the sampling temperature."""
    found = hidden_before(model, batch.input_ids, batch.attention_mask, mask)
    return token_logprobs(token_logits(model, found.states), batch.input_ids[mask], temperature, which=found.which)


@torch.no_grad()
def reference_kl(
    rows: Sequence[Row], reference: Any, estimator: Estimator, temperature: float, max_tokens: int
) -> Tensor:
    """An estimate of KL(policy || reference) for each token that RL trains, 0.0 for all others: ``[row, longest]``.

    The policy is the one that acted, by the log-probs that came with its tokens.

    Args:
        max_tokens: bound of a forward pass.
    """
    device = next(reference.parameters()).device
    found = torch.zeros(len(rows), max((len(row.ids) for row in rows), default=0))
    for micro in micro_batches(reference, [row.ids for row in rows], max_tokens):
        batch = collate([rows[i] for i in micro], pad=0).to(device)
        mask = batch.rl_weight != 0
        kl = torch.zeros_like(batch.behavior_logprobs)
        kl[mask] = _KL[estimator](batch.behavior_logprobs[mask], logprobs_under(reference, batch, mask, temperature))
        for r, i in enumerate(micro):
            n = len(rows[i].ids)
            found[i, :n] = kl[r, :n].cpu()
    return found
