"""``Row``: one sequence as plain lists. ``RowBatch``: rows as padded tensors, what judges, models and losses read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from real_envs.trajectory import Source

NAN = float("nan")


@dataclass(slots=True)
class Row:
    """One sequence on its way into a batch; per token unless said otherwise.

    ``rl_weight``, ``ce_weight`` and ``replay_weight`` route a token to a loss component (0 = not at all);
    ``behavior_logprobs`` is NaN where the policy did not sample the token: absent, not zero.

    Attributes:
        rewards: on the last token of the action that earned them.
        turns: the turn that a token acts in, -1 for tokens of no action. Empty where nothing is judged.
        replay_weight: of an episode of an earlier update; ``behavior_logprobs`` are those of the policy that acted
            then, and ``advantages`` are given.
        anchors: per turn, a number for the observation that was answered, equal where the observations are.
        process: per turn, a judgement of it apart from what it earned, NaN for turns that the policy did not play.
        carried_out: per turn, whether the world did what the action said.
        group: of the row; episodes of one number share a start and are compared with each other.
        truncated: a limit of ours cut the episode, and the state after the last token has a value.
        given_up: turns that the episode could still have had when a doubt ended it.
        temperature: at which it was sampled.
    """

    ids: Sequence[int]
    action_mask: Sequence[bool]
    source: Source
    behavior_logprobs: Sequence[float] = ()
    advantages: Sequence[float] = ()
    rl_weight: Sequence[float] = ()
    ce_weight: Sequence[float] = ()
    replay_weight: Sequence[float] = ()
    rewards: Sequence[float] = ()
    turns: Sequence[int] = ()
    anchors: Sequence[int] = ()
    process: Sequence[float] = ()
    carried_out: Sequence[bool] = ()
    group: int = 0
    truncated: bool = False
    given_up: int = 0
    temperature: float = 1.0


def _column(dtype: torch.dtype, pad: float, per: Literal["token", "turn", "row"] = "token") -> dict[str, Any]:
    return {"dtype": dtype, "pad": pad, "per": per}


@dataclass(slots=True)
class RowBatch:
    """Rows side by side, padded on the right. Each column is declared once: its dtype, its padding, and what it is of.

    Columns are ``[batch, time]``, of turns ``[batch, turns]``, of rows ``[batch]``. Those that ``Row`` has are
    explained there; the trainer fills in the others: log-probs and values are of the policy and the critic before the
    update.

    Attributes:
        attention_mask: true on real tokens.
        old_logprobs: of the trainer; NaN where ``behavior_logprobs`` serve as such.
        values: of the critic before each token; NaN without one.
        returns: targets of the critic; NaN without one.
        learned: where the critic has a target.
        kl: an estimate of the KL to the reference, where that is a reward.
        bootstrap: the critic's value of the state after the last token, 0.0 where the episode ended.
        source: of each row.
    """

    input_ids: Tensor = field(metadata=_column(torch.long, 0))
    attention_mask: Tensor = field(metadata=_column(torch.bool, False))
    action_mask: Tensor = field(metadata=_column(torch.bool, False))
    behavior_logprobs: Tensor = field(metadata=_column(torch.float32, NAN))
    advantages: Tensor = field(metadata=_column(torch.float32, 0.0))
    rl_weight: Tensor = field(metadata=_column(torch.float32, 0.0))
    ce_weight: Tensor = field(metadata=_column(torch.float32, 0.0))
    replay_weight: Tensor = field(metadata=_column(torch.float32, 0.0))
    rewards: Tensor = field(metadata=_column(torch.float32, 0.0))
    turns: Tensor = field(metadata=_column(torch.long, -1))
    old_logprobs: Tensor = field(metadata=_column(torch.float32, NAN))
    values: Tensor = field(metadata=_column(torch.float32, NAN))
    returns: Tensor = field(metadata=_column(torch.float32, NAN))
    learned: Tensor = field(metadata=_column(torch.bool, False))
    kl: Tensor = field(metadata=_column(torch.float32, 0.0))
    anchors: Tensor = field(metadata=_column(torch.long, -1, per="turn"))
    process: Tensor = field(metadata=_column(torch.float32, NAN, per="turn"))
    carried_out: Tensor = field(metadata=_column(torch.bool, False, per="turn"))
    group: Tensor = field(metadata=_column(torch.long, 0, per="row"))
    truncated: Tensor = field(metadata=_column(torch.bool, False, per="row"))
    given_up: Tensor = field(metadata=_column(torch.float32, 0.0, per="row"))
    bootstrap: Tensor = field(metadata=_column(torch.float32, 0.0, per="row"))
    source: list[Source] = field(default_factory=list)

    def __post_init__(self) -> None:
        for column in _COLUMNS:
            if column.metadata["per"] == "token" and getattr(self, column.name).shape != self.input_ids.shape:
                shape = tuple(getattr(self, column.name).shape)
                raise ValueError(f"{column.name} is {shape} but input_ids is {tuple(self.input_ids.shape)}")
        if len(self.source) != len(self):
            raise ValueError(f"{len(self.source)} sources for {len(self)} rows")

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, rows: Sequence[int]) -> RowBatch:
        """A copy of some rows, in this order and no wider than the longest of them."""
        chosen = torch.tensor(rows, dtype=torch.long, device=self.input_ids.device)
        width = int(self.attention_mask[chosen].sum(1).amax()) if len(rows) else 0
        columns = {
            c.name: getattr(self, c.name)[chosen][:, :width] if c.metadata["per"] == "token"
            else getattr(self, c.name)[chosen]
            for c in _COLUMNS
        }  # fmt: skip
        return RowBatch(**columns, source=[self.source[i] for i in rows])

    def to(self, device: torch.device) -> RowBatch:
        """The same batch with its tensors on ``device``."""
        return RowBatch(**{c.name: getattr(self, c.name).to(device) for c in _COLUMNS}, source=self.source)

    def token_ids(self) -> list[list[int]]:
        """Each row's tokens, without padding."""
        lengths = self.attention_mask.sum(1).tolist()
        return [ids[:n] for ids, n in zip(self.input_ids.tolist(), lengths, strict=True)]

    @property
    def trained_mask(self) -> Tensor:
        """Tokens that any loss component reads."""
        return (self.rl_weight != 0) | (self.ce_weight != 0) | (self.replay_weight != 0) | self.learned


_COLUMNS = tuple(f for f in fields(RowBatch) if f.metadata)
_OF_ROWS = {"input_ids": "ids"}  # what ``Row`` calls it


def collate(rows: Sequence[Row], pad: int) -> RowBatch:
    """Pads on the right to the longest row.

    Raises:
        ValueError: no rows, or a row whose lists differ in length.
    """
    if not rows:
        raise ValueError("cannot make a batch of no rows")
    width = max(len(row.ids) for row in rows)
    columns: dict[str, Tensor] = {}
    for column in _COLUMNS:
        name, dtype, missing, per = column.name, *(column.metadata[key] for key in ("dtype", "pad", "per"))
        if name == "attention_mask":
            values: list[Any] = [[True] * len(row.ids) for row in rows]
        else:
            absent = missing if per == "row" else ()
            values = [getattr(row, _OF_ROWS.get(name, name), absent) for row in rows]
        if per == "row":
            columns[name] = torch.tensor(values, dtype=dtype)
            continue
        if per == "token":
            for i, (row, value) in enumerate(zip(rows, values, strict=True)):
                if len(value) not in (0, len(row.ids)):
                    raise ValueError(f"row {i}: {len(value)} values for {len(row.ids)} tokens")
        columns[name] = padded(values, pad if name == "input_ids" else missing, dtype, width if per == "token" else 0)
    return RowBatch(**columns, source=[row.source for row in rows])


def padded(lists: Sequence[Sequence[float]], missing: float, dtype: torch.dtype, width: int = 0) -> torch.Tensor:
    """``[len(lists), longest]``, or wider if ``width`` is; what a list does not reach is ``missing``."""
    out = torch.full((len(lists), max([width, *map(len, lists)])), missing, dtype=dtype)
    for row, values in enumerate(lists):
        if len(values):
            out[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return out


def by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Batches of rows of similar length with at most ``max_tokens`` padded tokens each (one row at least).

    Returns:
        Indices of rows; every row occurs once.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or lengths[i] * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches
