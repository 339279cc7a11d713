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
from imagination.learning.credit import ModelOutputs, assign_credit
from imagination.learning.reward_shaping import RewardShaping
from policy.lm.batch import Row, collate
from policy.lm.forward import encode, micro_batches
from policy.lm.render import ChatFormat, render_for_policy
from real_envs.trajectory import Owner, StopReason, Trajectory
from worldmodel.synther.transitions import Transitions


def logged_rows(
    chat: ChatFormat, episodes: Sequence[Trajectory], algorithm: Algorithm, pay: RewardShaping, limit: int
) -> list[Row]:
    """Rows with ``returns`` where the algorithm's critic is trained (``learned``): its own with lambda = 1.

    An episode that was cut counts as what it earned until then. To leave those out would be to learn from the
    successes alone.

    Args:
        limit: longer rows are left out, as their ends, which are what was earned, lie outside the model.

    Returns:
        For each episode, its row; ``truncated`` where it did not end. Episodes that are left out have none.
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
    plain = {key: 1.0 for key in ("lam", "turn_lam", "token_lam") if key in algorithm.settings}
    nothing = torch.zeros(len(rows), max((len(row.ids) for row in rows), default=0))
    return assign_credit(rows, algorithm.with_settings(**plain, whiten=False), ModelOutputs(values=nothing))


@torch.no_grad()
def logged_transitions(rows: Sequence[Row], model: Any, max_tokens: int) -> tuple[Transitions, Tensor]:
    """From each state that a critic is trained on to the next of the same row.

    A state is the policy's hidden state before a token, as ``critic_values`` reads it. After the last one comes the
    state after the whole row. ``dones`` is false where the row was cut.

    Args:
        rows: of ``logged_rows``; at least one.
        max_tokens: bound of a forward pass.

    Returns:
        ``(transitions, row)``, in the order of the rows; ``row`` is ``[n]``, of each transition. On the CPU, fp32.
    """
    found: dict[int, Transitions] = {}
    device = next(model.parameters()).device
    for micro in micro_batches(model, [row.ids for row in rows], max_tokens):
        batch = collate([rows[i] for i in micro], pad=0).to(device)
        encoded = encode(model, batch.input_ids, batch.attention_mask)
        for r, i in enumerate(micro):
            row = rows[i]
            learned = torch.tensor(row.learned, dtype=torch.bool).nonzero()[:, 0]
            ends = torch.cat([learned[1:], learned.new_tensor([len(row.ids)])])
            states = encoded.states[encoded.index[r]]  # [time, hidden], after each token
            earned = torch.tensor([0.0, *row.rewards]).cumsum(0)
            dones = torch.zeros(len(learned), dtype=torch.bool)
            dones[-1:] = not row.truncated
            found[i] = Transitions(
                states=states[(learned - 1).to(device)].float().cpu(),
                next_states=states[(ends - 1).to(device)].float().cpu(),
                rewards=earned[ends] - earned[learned],
                dones=dones,
                returns=torch.tensor(row.returns)[learned],
            )
    parts = [found[i] for i in range(len(rows))]
    joined = Transitions(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Transitions)))
    return joined, torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
