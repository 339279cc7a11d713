"""Logged episodes as a critic sees them: the hidden states that it reads values of, and what followed each.

Monte-Carlo returns, no TD targets. They need no values of a critic that does not exist yet, and of a synthetic
transition only the state and its return have to be right, where ``r + gamma V(s')`` would also lean on a dreamed next
state. They are the returns of those who made the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from imagination.learning.advantages import place_turn_rewards
from imagination.learning.algorithms import Algorithm
from imagination.learning.credit import assign_credit
from imagination.learning.reward_shaping import RewardShaping
from policy.lm.batch import Row, RowBatch, collate
from policy.lm.forward import encode, split
from policy.lm.render import ChatFormat, render_for_policy
from real_envs.trajectory import Owner, StopReason, Trajectory
from worldmodel.extras.synther.transitions import Transitions


def logged_rows(chat: ChatFormat, episodes: Sequence[Trajectory], pay: RewardShaping, limit: int) -> list[Row]:
    """The rows of logged episodes; ``truncated`` where one did not end.

    An episode that was cut counts as what it earned until then. To leave those out would be to learn from the
    successes alone.

    Args:
        limit: longer rows are left out, as their ends, which are what was earned, lie outside the model.
    """
    rows: list[Row] = []
    for episode in episodes:
        tokens = render_for_policy(chat, episode, whole=True)
        if len(tokens.ids) > limit:
            continue
        mine = [owner == Owner.AGENT for owner in tokens.owners]
        turns = [turn if acts else -1 for turn, acts in zip(tokens.turns, mine, strict=True)]
        rewards = place_turn_rewards(torch.tensor([pay.rewards(episode)]), torch.tensor([turns]))[0]
        rows.append(
            Row(
                ids=tokens.ids,
                action_mask=mine,
                source=episode.source,
                rl_weight=[float(acts) for acts in mine],
                rewards=rewards.tolist(),
                turns=turns,
                group=len(rows),
                truncated=episode.stop is not StopReason.TERMINATED,
            )
        )
    return rows


def with_returns(rows: Sequence[Row], algorithm: Algorithm) -> RowBatch:
    """The rows with ``returns`` where the algorithm's critic is trained (``learned``): its own with lambda = 1."""
    batch = collate(rows, pad=0)
    batch.values = torch.zeros_like(batch.values)
    plain = {key: 1.0 for key in ("lam", "turn_lam", "token_lam") if key in algorithm.settings}
    assign_credit(batch, algorithm.with_settings(**plain, whiten=False))
    return batch


@torch.no_grad()
def logged_transitions(batch: RowBatch, model: Any, max_tokens: int) -> tuple[Transitions, Tensor]:
    """From each state that a critic is trained on to the next of the same row.

    A state is the policy's hidden state before a token, as ``critic_values`` reads it. After the last one comes the
    state after the whole row. ``dones`` is false where the row was cut.

    Args:
        batch: of ``with_returns``.
        max_tokens: bound of a forward pass.

    Returns:
        ``(transitions, row)``, in the order of the rows; ``row`` is ``[n]``, of each transition. On the CPU, fp32.
    """
    found: dict[int, Transitions] = {}
    for picked, part in split(model, batch, max_tokens):
        encoded = encode(model, part.input_ids, part.attention_mask)
        for r, i in enumerate(picked):
            learned = batch.learned[i].nonzero()[:, 0]
            ends = torch.cat([learned[1:], batch.attention_mask[i].sum()[None]])
            states = encoded.states[encoded.index[r]]  # [time, hidden], after each token
            earned = torch.cat([batch.rewards.new_zeros(1), batch.rewards[i]]).cumsum(0)
            dones = torch.zeros(len(learned), dtype=torch.bool)
            dones[-1:] = ~batch.truncated[i]
            found[i] = Transitions(
                states=states[(learned - 1).to(states.device)].float().cpu(),
                next_states=states[(ends - 1).to(states.device)].float().cpu(),
                rewards=earned[ends] - earned[learned],
                dones=dones,
                returns=batch.returns[i, learned],
            )
    parts = [found[i] for i in range(len(batch))]
    joined = Transitions(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Transitions)))
    return joined, torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
