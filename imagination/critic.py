"""What the critic says of played rows before an update: values, targets and advantages (PPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from imagination.advantages import masked_gae
from policy.lm.batch import Row, collate
from policy.lm.forward import encode, micro_batches
from policy.value import ValueHead


@torch.no_grad()
def with_critic(
    rows: Sequence[Row], model: Any, value: ValueHead, gamma: float, lam: float, max_tokens: int
) -> list[Row]:
    """The same rows in the same order; those that were played have ``values``, ``returns`` and GAE's ``advantages``.

    Advantages are whitened over all trained tokens of the update. ``max_tokens`` bounds a forward pass.
    """
    judged = list(rows)
    played = [i for i, row in enumerate(rows) if any(row.rl_weight)]
    device = next(value.parameters()).device
    for micro in micro_batches(model, [rows[i].ids for i in played], max_tokens):
        chosen = [played[i] for i in micro]
        batch = collate([rows[i] for i in chosen], pad=0).to(device)
        encoded = encode(model, batch.input_ids, batch.attention_mask)
        after = value(encoded.states)[encoded.index]  # [batch, time], value of the state after each token
        before = torch.cat([after.new_zeros(len(chosen), 1), after[:, :-1]], 1)
        last = batch.attention_mask.sum(1, keepdim=True) - 1
        bootstrap = torch.where(batch.truncated, after.gather(1, last)[:, 0], 0.0)
        advantages, returns = masked_gae(batch.rewards, before, batch.rl_weight != 0, gamma, lam, bootstrap)
        for r, i in enumerate(chosen):
            n = len(rows[i].ids)
            values, targets, gains = (x[r, :n].tolist() for x in (before, returns, advantages))
            judged[i] = replace(rows[i], values=values, returns=targets, advantages=gains)
    return _whitened(judged, played)


def _whitened(rows: list[Row], played: Sequence[int]) -> list[Row]:
    if not played:
        return rows
    trained = [a for i in played for a, w in zip(rows[i].advantages, rows[i].rl_weight, strict=True) if w]
    # in fp64, or the rounding of equal advantages, divided by 1e-8, would look like an advantage
    flat = torch.tensor(trained, dtype=torch.float64)
    mean, std = float(flat.mean()), float(flat.std(correction=min(1, len(flat) - 1)))
    for i in played:
        rows[i] = replace(rows[i], advantages=[(a - mean) / (std + 1e-8) for a in rows[i].advantages])
    return rows
