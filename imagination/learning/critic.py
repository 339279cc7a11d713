"""What the critic says of played rows before an update: a value before each token, and of the state after the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policy.lm.batch import Row, collate
from policy.lm.forward import encode, micro_batches
from policy.value import ValueHead


@torch.no_grad()
def critic_values(rows: Sequence[Row], model: Any, value: ValueHead, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Values before each token of each row, in units of return, and of the states in which truncated rows stop.

    Args:
        max_tokens: bound of a forward pass.

    Returns:
        ``(values, bootstrap)``: ``[row, longest]``, 0.0 before the first token, of which there is no state, and on
        padding; ``[row]``, 0.0 for rows that ended. Both on the CPU.
    """
    values = torch.zeros(len(rows), max((len(row.ids) for row in rows), default=0))
    bootstrap = torch.zeros(len(rows))
    device = next(value.parameters()).device
    for micro in micro_batches(model, [row.ids for row in rows], max_tokens):
        batch = collate([rows[i] for i in micro], pad=0).to(device)
        encoded = encode(model, batch.input_ids, batch.attention_mask)
        after = value(encoded.states)[encoded.index]  # [batch, time], value of the state after each token
        before = torch.cat([after.new_zeros(len(micro), 1), after[:, :-1]], 1)
        last = batch.attention_mask.sum(1, keepdim=True) - 1
        follows = torch.where(batch.truncated, after.gather(1, last)[:, 0], 0.0)
        for r, i in enumerate(micro):
            n = len(rows[i].ids)
            values[i, :n] = before[r, :n].cpu()
        bootstrap[micro] = follows.cpu()
    return values, bootstrap
