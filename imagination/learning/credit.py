"""An update's rows get their advantages: all episodes at once, before rows are packed or split."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from imagination.learning.advantages import turn_bounds, with_process_rewards
from imagination.learning.algorithms import Algorithm, Episodes
from policy.lm.batch import RowBatch
from real_envs.trajectory import Source

_SOURCES = tuple(Source)


def sampled_rows(batch: RowBatch) -> list[int]:
    """Which rows are to be judged: those with tokens that the policy sampled and may learn from."""
    return _where((batch.rl_weight != 0).any(1))


def trained_rows(batch: RowBatch) -> list[int]:
    """Which rows anything is learned from."""
    return _where(batch.trained_mask.any(1))


@torch.no_grad()
def assign_credit(
    batch: RowBatch,
    algorithm: Algorithm,
    shaped: Tensor | None = None,
    *,
    loss_mask: bool = True,
    advantage_mask: bool = True,
    process_coef: float = 0.0,
) -> None:
    """Fills in ``advantages``, ``returns`` and ``learned`` of the rows that the policy sampled, by the algorithm.

    ``rl_weight`` becomes 0 where the algorithm trains nothing; where it trains, it stays what it was. Episodes of
    experts that are members of a group (LUFFY) move its mean and deviation, and get their advantages, too.

    Args:
        batch: with ``values`` and ``bootstrap`` for an algorithm with a critic, and ``kl`` where that is a reward.
        shaped: ``[sampled rows, turns]``, what each turn is judged by in place of what it earned.
        loss_mask, advantage_mask: false lets the loss, or the estimate of advantages, read all tokens but the first,
            which nothing predicts; for ablation.
        process_coef: of ``process``, in units of reward.

    Raises:
        ValueError: as ``Algorithm.judge``, a row has no turns, a reward on a token of none, or no ``process`` where
            that is asked for.
    """
    own = sampled_rows(batch)
    if not own:
        return
    judged = [*own, *_where((batch.ce_weight != 0).any(1) & (batch.turns >= 0).any(1))]
    rows = batch[judged]
    episodes = _episodes(rows, algorithm, shaped, process_coef)
    if not (loss_mask and advantage_mask):
        everything = rows.attention_mask.clone()
        everything[:, 0] = False
        episodes = replace(
            episodes,
            loss_mask=None if loss_mask else everything,
            advantage_mask=None if advantage_mask else everything,
        )
    found = algorithm.judge(episodes)
    n, width = len(own), rows.input_ids.shape[1]
    batch.advantages[judged, :width] = found.advantages
    weight = rows.rl_weight[:n]
    if not loss_mask:  # what the world said has no weight of its own, and counts fully where it is trained on
        weight = torch.where(weight != 0, weight, 1.0)
    batch.rl_weight[own, :width] = torch.where(found.trained[:n], weight, 0.0)
    if found.returns is not None:
        batch.returns[own, :width] = found.returns[:n]
    if found.learned is not None:
        batch.learned[own, :width] = found.learned[:n]


def _episodes(rows: RowBatch, algorithm: Algorithm, shaped: Tensor | None, process_coef: float) -> Episodes:
    index, rewards, n = rows.turns, rows.rewards, len(rows)
    acts = (index >= 0).any(1)
    if not acts.all():
        raise ValueError(f"played row {int((~acts).nonzero()[0])} has no turns")
    if ((rewards != 0) & (index < 0)).any():
        raise ValueError("a reward stands on a token of no action, where it would be lost: put it on the turn's last")
    turns = max(int(index.max()) + 1, 1)
    # a reward stands on one token of its turn, so this moves it and adds nothing to it
    per_turn = rewards.new_zeros(n, turns).scatter_add(1, index.clamp(min=0), rewards)
    if shaped is not None:  # of experts, which no model was asked about, zero
        shaped = torch.nn.functional.pad(shaped, (0, turns - shaped.shape[1], 0, n - len(shaped)))
    if process_coef:
        process = of_turns(rows.process, turns, math.nan)
        exists = turn_bounds(index, turns)[0] >= 0
        shaped = with_process_rewards(per_turn if shaped is None else shaped, process, exists, process_coef)
        # judgements that cost something cost it for the turns that a doubt gave up as well: the worst of the update
        worst = torch.where(exists & process.isfinite(), process_coef * process, 0.0).amin().clamp(max=0.0)
        shaped[torch.arange(n), index.amax(1).clamp(min=0)] += worst * rows.given_up
    group, critic = rows.group.tolist(), algorithm.critic is not None
    of_group = {g: source for g, source in zip(group, rows.source, strict=True) if source is not Source.EXPERT}
    return Episodes(
        turn_rewards=per_turn,
        action_turn_index=index,
        group_ids=rows.group,
        valid=torch.ones(n, dtype=torch.bool),
        anchors=of_turns(rows.anchors, turns, -1),
        values=rows.values if critic else None,
        bootstrap_value=rows.bootstrap if critic else None,
        kl=rows.kl,
        shaped=shaped,
        # an expert belongs to the world of the group that it is compared with
        sources=torch.tensor(
            [_SOURCES.index(of_group.get(g, source)) for g, source in zip(group, rows.source, strict=True)]
        ),
    )


def of_turns(column: Tensor, turns: int, missing: float) -> Tensor:
    """``[row, turns]``: a column of turns without what lies beyond, and with ``missing`` where it has nothing."""
    return torch.nn.functional.pad(column[:, :turns], (0, max(turns - column.shape[1], 0)), value=missing)


def _where(chosen: Tensor) -> list[int]:
    rows: list[int] = chosen.nonzero()[:, 0].tolist()
    return rows
