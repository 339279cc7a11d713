"""The critic: its values of rows before an update, a value head fitted to logged returns, and its checkpoint.

It is fitted to Monte-Carlo returns, no TD targets. They need no values of a critic that does not exist yet, and of a
synthetic transition only the state and its return have to be right, where ``r + gamma V(s')`` would also lean on a
dreamed next state. They are the returns of those who made the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from imagination.learning.advantages.turns import place_turn_rewards
from imagination.learning.algorithms import Algorithm
from imagination.learning.experience import assign_credit
from imagination.learning.reward_shaping import RewardShaping
from imagination.settings import CriticSettings, TrainSettings, UserError
from policy.lm.batch import Row, RowBatch, collate
from policy.lm.forward import ValueHead, encode, split
from policy.lm.render import ChatFormat, render_for_policy
from real_envs.files import check_checksums, write_atomically, write_checksums
from real_envs.seeding import derive_seed
from real_envs.trajectory import Owner, StopReason, Trajectory
from worldmodel.extras.synther.transitions import Transitions
from worldmodel.rewards import Goal

NAME = "critic"  # of the folder under models/
_WEIGHTS, _MADE_FOR = "model.safetensors", "critic.json"


@torch.no_grad()
def critic_values(batch: RowBatch, model: Any, value: ValueHead, max_tokens: int, rows: Sequence[int]) -> None:
    """Fills in ``values`` before each token of some rows, in units of return, and ``bootstrap`` where they were cut.

    The first token has the value 0.0: there is no state before it. ``max_tokens`` bounds a forward pass.
    """
    for picked, part in split(model, batch, max_tokens, rows):
        encoded = encode(model, part.ids, part.attention_mask)
        after = value(encoded.states)[encoded.which]  # [batch, time], value of the state after each token
        before = torch.cat([after.new_zeros(len(part), 1), after[:, :-1]], 1)
        last = part.attention_mask.sum(1, keepdim=True) - 1
        batch.values[picked, : before.shape[1]] = torch.where(part.attention_mask, before, 0.0).cpu()
        batch.bootstrap[picked] = torch.where(part.truncated, after.gather(1, last)[:, 0], 0.0).cpu()


# --- logged episodes as the critic sees them ---


def logged_rows(chat: ChatFormat, episodes: Sequence[Trajectory], shaping: RewardShaping, limit: int) -> list[Row]:
    """The rows of logged episodes with a measured reward; ``truncated`` where one did not end.

    An episode that was cut counts as what it earned until then. To leave those out would be to learn from the
    successes alone.

    Args:
        limit: longer rows are left out, as their ends, which are what was earned, lie outside the model.
    """
    rows: list[Row] = []
    for episode in episodes:
        tokens = render_for_policy(chat, episode, whole=True)
        if len(tokens.ids) > limit or all(turn.reward is None for turn in episode.turns):
            continue
        made = torch.tensor([owner == Owner.AGENT for owner in tokens.owners])
        rows.append(
            Row(
                tokens.ids,
                made,
                episode.source,
                rl_weight=made.float(),
                rewards=shaping.rewards(episode),
                turns=torch.where(made, torch.tensor(tokens.turns), -1),
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

    Returns:
        ``(transitions, row)``, in the order of the rows; ``row`` is ``[n]``, of each transition. On the CPU, fp32.
    """
    by_row: dict[int, Transitions] = {}
    rewards = place_turn_rewards(batch.rewards, batch.turns)
    for picked, part in split(model, batch, max_tokens):
        encoded = encode(model, part.ids, part.attention_mask)
        for r, i in enumerate(picked):
            learned = batch.learned[i].nonzero()[:, 0]
            ends = torch.cat([learned[1:], batch.attention_mask[i].sum()[None]])
            states = encoded.states[encoded.which[r]]  # [time, hidden], after each token
            earned = torch.cat([rewards.new_zeros(1), rewards[i]]).cumsum(0)
            dones = torch.zeros(len(learned), dtype=torch.bool)
            dones[-1:] = ~batch.truncated[i]
            by_row[i] = Transitions(
                states=states[(learned - 1).to(states.device)].float().cpu(),
                next_states=states[(ends - 1).to(states.device)].float().cpu(),
                rewards=earned[ends] - earned[learned],
                dones=dones,
                returns=batch.returns[i, learned],
            )
    parts = [by_row[i] for i in range(len(batch))]
    joined = Transitions(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Transitions)))
    return joined, torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])


# --- the value head ---


def fit_value_head(
    real: Transitions, settings: CriticSettings, seed: int, synthetic: Transitions | None = None
) -> ValueHead:
    """Regression of returns on states by AdamW; the number of steps and of states a step is the same with synthetic
    transitions and without.

    States and returns are scaled to mean 0 and deviation 1 of the real ones while it learns, so that no setting hangs
    on their units; the scaling is then made part of the head. So the head begins at the mean return.

    Args:
        synthetic: ``settings.synther.ratio`` of each batch is drawn from these, the rest from the real ones.
    """
    centre, spread = real.states.mean(0), real.states.std(0, correction=0).clamp(min=1e-6)
    mean, deviation = real.returns.mean(), real.returns.std(correction=0).clamp(min=1e-6)
    states, returns = (real.states - centre) / spread, (real.returns - mean) / deviation
    head = ValueHead(states.shape[1])
    groups = [
        {"params": [head.linear.weight], "weight_decay": settings.weight_decay},
        {"params": [head.linear.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    rng = torch.Generator().manual_seed(derive_seed("critic", seed))
    made = 0 if synthetic is None else round(settings.synther.ratio * settings.batch)
    others = states[:0] if synthetic is None else (synthetic.states - centre) / spread
    other_returns = returns[:0] if synthetic is None else (synthetic.returns - mean) / deviation
    for _ in range(settings.steps):
        logged = torch.randint(len(states), (settings.batch - made,), generator=rng)
        drawn = torch.randint(max(len(others), 1), (made,), generator=rng)
        values = head(torch.cat([states[logged], others[drawn]]))
        targets = torch.cat([returns[logged], other_returns[drawn]])
        loss: Tensor = (values - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    with torch.no_grad():
        head.linear.weight.mul_(deviation / spread)
        head.linear.bias.mul_(deviation).add_(mean - head.linear.weight @ centre)
    return head


@torch.no_grad()
def squared_errors(head: ValueHead, transitions: Transitions) -> Tensor:
    """``[n]``, of the values of their states against their returns."""
    return (head(transitions.states) - transitions.returns).square()


def made_for(policy: str, algorithm: Algorithm, train: TrainSettings, goal: Goal) -> dict[str, Any]:
    """What a head is good for: a policy, by its weights, and returns, by what is paid and how it is discounted."""
    keys = ("gamma", "turn_gamma", "token_gamma")
    discounts = {key: algorithm.settings[key] for key in keys if key in algorithm.settings}
    return {
        "policy": policy,
        "per": "turn" if algorithm.name == "turn_ppo" else "token",
        **discounts,
        "reward_tiers": train.reward_tiers,
        **({"goal": asdict(goal)} if goal.declared else {}),
    }


def save_critic(head: ValueHead, folder: Path, purpose: Mapping[str, Any]) -> None:
    """``model.safetensors``, and what it is good for as ``critic.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(head.state_dict(), folder / _WEIGHTS)
    write_atomically(folder / _MADE_FOR, json.dumps(purpose, indent=1))
    write_checksums(folder)


def load_critic(folder: Path, purpose: Mapping[str, Any]) -> ValueHead:
    """The head of ``save_critic``.

    Raises:
        UserError: it was fitted for another purpose, cannot be read, or is not as it was written.
    """
    try:
        check_checksums(folder)
        known = json.loads((folder / _MADE_FOR).read_text(encoding="utf-8"))
        weights = load_file(folder / _WEIGHTS)
        head = ValueHead(weights["linear.weight"].shape[1])
        head.load_state_dict(weights)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} holds no value head that can be read ({error}); run `imagine fit-critic`") from error
    other = [key for key in purpose if known.get(key) != purpose[key]]
    if other:
        changes = "; ".join(f"{key} was {known.get(key)} and is {purpose[key]}" for key in other)
        raise UserError(
            f"the value head in {folder} was fitted for something else ({changes}): run `imagine fit-critic` again, or "
            "remove the folder to begin with values of 0"
        )
    return head
