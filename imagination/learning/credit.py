"""Rows of an update <-> the tensors that algorithms judge: all episodes at once, before rows are packed or split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imagination.learning.advantages import turn_bounds, with_process_rewards
from imagination.learning.algorithms import Algorithm, Episodes
from policy.lm.batch import Row, padded
from real_envs.trajectory import Source

_SOURCES = tuple(Source)


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """What models said of the played rows of an update, in their order; columns beside what the rows hold themselves.

    Attributes:
        values: ``[row, longest]``, the critic before each token; ``None`` without one.
        bootstrap: ``[row]``, the critic's value of the state after the last token, 0.0 where the episode ended.
        kl: ``[row, longest]``, an estimate of the KL to the reference; ``None`` where the KL is no reward.
        turn_rewards: ``[row, turns]``, what each turn is judged by in place of what it earned; ``None`` for just that.
    """

    values: Tensor | None = None
    bootstrap: Tensor | None = None
    kl: Tensor | None = None
    turn_rewards: Tensor | None = None


def played(rows: Sequence[Row]) -> list[int]:
    """Which rows are to be judged: those with tokens that the policy sampled and may learn from."""
    return [i for i, row in enumerate(rows) if any(row.rl_weight)]


def _compared(rows: Sequence[Row]) -> list[int]:
    """Episodes of experts that are judged within a group: they move its mean and deviation (LUFFY)."""
    return [i for i, row in enumerate(rows) if any(row.ce_weight) and row.turns]


@torch.no_grad()
def assign_credit(
    rows: Sequence[Row],
    algorithm: Algorithm,
    said: ModelOutputs | None = None,
    *,
    loss_mask: bool = True,
    advantage_mask: bool = True,
    process_coef: float = 0.0,
) -> list[Row]:
    """The same rows in the same order; those that were played have what the algorithm makes of them.

    ``advantages``, ``values``, ``returns`` and ``learned`` are set, and ``rl_weight`` becomes 0 where the algorithm
    trains nothing; where it trains, it stays what it was. A row without any weight is to be left out.

    Args:
        loss_mask, advantage_mask: false lets the loss, or the estimate of advantages, read all tokens but the first,
            which nothing predicts; for ablation.
        process_coef: of ``Row.process``, in units of reward.

    Raises:
        ValueError: as ``Algorithm.judge``, a row has no turns, a reward on a token of none, or no ``process`` where
            that is asked for.
    """
    own = played(rows)
    if not own:
        return list(rows)
    mine = [*own, *_compared(rows)]
    said = said or ModelOutputs()
    episodes = _episodes([rows[i] for i in mine], said, process_coef)
    if not (loss_mask and advantage_mask):
        everything = padded([[False, *[True] * (len(rows[i].ids) - 1)] for i in mine], False, torch.bool)
        episodes = replace(
            episodes,
            loss_mask=None if loss_mask else everything,
            advantage_mask=None if advantage_mask else everything,
        )
    found = algorithm.judge(episodes)
    result = list(rows)
    for r, i in enumerate(mine):
        row, n = rows[i], len(rows[i].ids)
        if r >= len(own):
            result[i] = replace(row, advantages=found.advantages[r, :n].tolist())
            continue
        weight = list(zip(found.trained[r, :n].tolist(), row.rl_weight, strict=True))
        result[i] = replace(
            row,
            advantages=found.advantages[r, :n].tolist(),
            # what the world said has no weight of its own, and counts fully where it is trained on
            rl_weight=[(w if loss_mask else w or 1.0) if trains else 0.0 for trains, w in weight],
            values=() if said.values is None else said.values[r, :n].tolist(),
            returns=() if found.returns is None else found.returns[r, :n].tolist(),
            learned=() if found.learned is None else found.learned[r, :n].tolist(),
        )
    return result


def trained(rows: Sequence[Row]) -> list[Row]:
    """The rows from which anything is learned."""
    return [r for r in rows if any(r.rl_weight) or any(r.ce_weight) or any(r.replay_weight) or any(r.learned)]


def _episodes(rows: Sequence[Row], said: ModelOutputs, process_coef: float) -> Episodes:
    for number, row in enumerate(rows):
        if len(row.turns) != len(row.ids):
            raise ValueError(f"played row {number} has {len(row.turns)} turns for {len(row.ids)} tokens")
    index = padded([row.turns for row in rows], -1, torch.long)
    rewards = padded([row.rewards for row in rows], 0.0, torch.float32)
    if ((rewards != 0) & (index < 0)).any():
        raise ValueError("a reward stands on a token of no action, where it would be lost: put it on the turn's last")
    turns = max(int(index.max()) + 1, 1)
    # a reward stands on one token of its turn, so this moves it and adds nothing to it
    per_turn = rewards.new_zeros(len(rows), turns).scatter_add(1, index.clamp(min=0), rewards)
    shaped = None if said.turn_rewards is None else _widened(said.turn_rewards, len(rows), turns)
    if process_coef:
        process = padded([list(row.process[:turns]) for row in rows], math.nan, torch.float32, turns)
        exists = turn_bounds(index, turns)[0] >= 0
        shaped = with_process_rewards(per_turn if shaped is None else shaped, process, exists, process_coef)
        # judgements that cost something cost it for the turns that a doubt gave up as well: the worst of the update
        worst = torch.where(exists & process.isfinite(), process_coef * process, 0.0).amin().clamp(max=0.0)
        last = index.amax(1).clamp(min=0)
        shaped[torch.arange(len(rows)), last] += worst * torch.tensor([float(row.given_up) for row in rows])
    of_group = {row.group: row.source for row in rows if row.source is not Source.EXPERT}
    return Episodes(
        turn_rewards=per_turn,
        action_turn_index=index,
        group_ids=torch.tensor([row.group for row in rows]),
        valid=torch.ones(len(rows), dtype=torch.bool),
        anchors=padded([list(row.anchors[:turns]) for row in rows], -1, torch.long, turns),
        values=said.values,
        bootstrap_value=said.bootstrap,
        kl=None if said.kl is None else _widened(said.kl, *index.shape),
        shaped=shaped,
        # an expert belongs to the world of the group that it is compared with
        sources=torch.tensor([_SOURCES.index(of_group.get(row.group, row.source)) for row in rows]),
    )


def _widened(x: Tensor, rows: int, width: int) -> Tensor:
    """``[rows, width]``, zero where ``x`` has nothing: of experts, which no model was asked about."""
    return torch.nn.functional.pad(x, (0, width - x.shape[1], 0, rows - x.shape[0]))
