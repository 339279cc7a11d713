"""The columns of a sequence on its way to its gradient, declared once: of one (``Row``) or of many (``RowBatch``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import torch
from torch import Tensor

from real_envs.trajectory import Source

NAN = float("nan")
SOURCES = tuple(Source)
_ABSENT = torch.empty(0)


class Column(NamedTuple):
    """Of a column: its dtype, what stands where a row says nothing, and what it has an entry for."""

    dtype: torch.dtype
    pad: float
    per: Literal["token", "turn", "row"] = "token"


@dataclass(slots=True, eq=False)
class Columns:
    """What a row may have.

    ``rl_weight``, ``ce_weight`` and ``replay_weight`` route a token to a loss component (0 = not at all).

    Attributes:
        ids: tokens.
        action_mask: tokens that the model made, or is to make.
        source: number in ``SOURCES``.
        observed: what the real world said after an action of the policy.
        behavior_logprobs: nats, of the policy that acted; NaN where it did not sample the token: absent, not zero.
        advantages: given for what is replayed, otherwise the algorithm's.
        replay_weight: of an episode of an earlier update.
        turns: the turn that a token acts in, -1 for tokens of no action.
        rewards: of each turn, 0.0 where the policy did not play it.
        anchors: of each turn, a number for the observation that was answered, equal where the observations are.
        process: of each turn, a judgement of it apart from what it earned; NaN where the policy did not play it.
        carried_out: of each turn, whether the world did what the action said.
        group: episodes of one number share a start and are compared with each other.
        parent: number of the update's row whose episode this one goes on from, -1 for none.
        episode: rows of one number, from 0 on, are the contexts of one episode in order; a row of -1 is one by itself.
        truncated: a limit of ours cut the episode, and the state after the last token has a value.
        turns_lost: that the episode could still have had when the world model's uncertainty ended it.
        temperature: at which it was sampled.
    """

    ids: Annotated[Tensor, Column(torch.long, 0)]
    action_mask: Annotated[Tensor, Column(torch.bool, False)]
    source: Annotated[Tensor, Column(torch.long, 0, "row")]
    observed: Annotated[Tensor, Column(torch.bool, False)]
    behavior_logprobs: Annotated[Tensor, Column(torch.float32, NAN)]
    advantages: Annotated[Tensor, Column(torch.float32, 0.0)]
    rl_weight: Annotated[Tensor, Column(torch.float32, 0.0)]
    ce_weight: Annotated[Tensor, Column(torch.float32, 0.0)]
    replay_weight: Annotated[Tensor, Column(torch.float32, 0.0)]
    turns: Annotated[Tensor, Column(torch.long, -1)]
    rewards: Annotated[Tensor, Column(torch.float32, 0.0, "turn")]
    anchors: Annotated[Tensor, Column(torch.long, -1, "turn")]
    process: Annotated[Tensor, Column(torch.float32, NAN, "turn")]
    carried_out: Annotated[Tensor, Column(torch.bool, False, "turn")]
    group: Annotated[Tensor, Column(torch.long, 0, "row")]
    parent: Annotated[Tensor, Column(torch.long, -1, "row")]
    episode: Annotated[Tensor, Column(torch.long, -1, "row")]
    truncated: Annotated[Tensor, Column(torch.bool, False, "row")]
    turns_lost: Annotated[Tensor, Column(torch.float32, 0.0, "row")]
    temperature: Annotated[Tensor, Column(torch.float64, 1.0, "row")]


@dataclass(slots=True, eq=False, init=False)
class Row(Columns):
    """One sequence: columns are ``[time]``, ``[turns]`` or scalars; a column that is left out is empty.

    Example::

        Row([5, 6, 7], [False, True, True], Source.EXPERT, ce_weight=[0.0, 1.0, 1.0])
    """

    def __init__(self, ids: Any, action_mask: Any, source: Any, **columns: Any) -> None:
        """
        Raises:
            ValueError: a column of tokens has another length than ``ids``, or there is no such column.
        """
        number = SOURCES.index(source) if isinstance(source, Source) else source
        given = {"ids": ids, "action_mask": action_mask, "source": number, **columns}
        for name, column in _OF_ROWS.items():
            value = given.pop(name, column.pad if column.per == "row" else _ABSENT)
            value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=column.dtype)
            if column.per == "token" and len(value) not in (0, len(ids)):
                raise ValueError(f"{name} has {len(value)} entries for {len(ids)} tokens")
            setattr(self, name, value)
        if given:
            raise ValueError(f"a row has no column {', '.join(given)}")

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, begin: int, end: int, **changes: Any) -> Row:
        """Its tokens from ``begin`` to before ``end``; what is of turns or of the row stays, but for ``changes``."""
        columns = {name: getattr(self, name) for name in _OF_ROWS}
        cut = {name: columns[name][begin:end] for name, column in _OF_ROWS.items() if column.per == "token"}
        return Row(**{**columns, **cut, **changes})


@dataclass(slots=True, eq=False)
class RowBatch(Columns):
    """Rows side by side, padded on the right: columns are ``[batch, time]``, ``[batch, turns]`` or ``[batch]``.

    The trainer fills in what rows lack; log-probs and values are of the policy and the critic before the update.

    Attributes:
        attention_mask: true on real tokens.
        old_logprobs: of the trainer; NaN where ``behavior_logprobs`` serve as such.
        values: of the critic before each token; NaN without one.
        returns: targets of the critic; NaN without one.
        learned: where the critic has a target.
        kl: an estimate of the KL to the reference, where that is a reward.
        bootstrap: the critic's value of the state after the last token, 0.0 where the episode ended.
    """

    attention_mask: Annotated[Tensor, Column(torch.bool, False)]
    old_logprobs: Annotated[Tensor, Column(torch.float32, NAN)]
    values: Annotated[Tensor, Column(torch.float32, NAN)]
    returns: Annotated[Tensor, Column(torch.float32, NAN)]
    learned: Annotated[Tensor, Column(torch.bool, False)]
    kl: Annotated[Tensor, Column(torch.float32, 0.0)]
    bootstrap: Annotated[Tensor, Column(torch.float32, 0.0, "row")]

    def __post_init__(self) -> None:
        for name, column in _OF_BATCHES.items():
            shape = getattr(self, name).shape
            if column.per == "token" and shape != self.ids.shape:
                raise ValueError(f"{name} is {tuple(shape)} but ids is {tuple(self.ids.shape)}")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Sequence[int]) -> RowBatch:
        """A copy of some rows, in this order and no wider than the longest of them."""
        chosen = torch.tensor(rows, dtype=torch.long, device=self.ids.device)
        width = int(self.attention_mask[chosen].sum(1).amax()) if len(rows) else 0
        cut = {"token": (chosen, slice(width)), "turn": (chosen,), "row": (chosen,)}
        return RowBatch(**{name: getattr(self, name)[cut[column.per]] for name, column in _OF_BATCHES.items()})

    def joined(self) -> tuple[RowBatch, Tensor]:
        """Whole episodes: the contexts of each, one after the other in one row; the batch itself where all have one.

        What is of turns is that of an episode's first context; so is what is of the row, but for ``truncated`` and
        ``bootstrap``, which are those of its last.

        Returns:
            ``(episodes, index)``; ``index`` is ``[batch, time]``, the place of each token in a flattened column
            ``[episodes, longest]``, and -1 for padding.

        Example::

            contexts 5 6 7 and 8 9 of one episode: a row 5 6 7 8 9, index [[0, 1, 2], [3, 4, -1]]
        """
        rows, time = torch.arange(len(self), device=self.ids.device), self.ids.shape[1]
        alone = rows + 1 + max([0, *self.episode.tolist()])
        which = torch.where(self.episode >= 0, self.episode, alone).unique(return_inverse=True)[1]
        n, mask = max([-1, *which.tolist()]) + 1, self.attention_mask
        if n == len(self):
            return self, torch.arange(mask.numel(), device=mask.device).view_as(mask)
        earlier = (which == which[:, None]) & (rows < rows[:, None])
        begin = (earlier * mask.sum(1)).sum(1)
        width = int((begin + mask.sum(1)).amax())
        index = ((which * width + begin)[:, None] + torch.arange(time, device=mask.device)).masked_fill(~mask, -1)
        first = rows.new_full((n,), len(self)).scatter_reduce(0, which, rows, "amin")
        last = rows.new_zeros(n).scatter_reduce(0, which, rows, "amax")
        columns: dict[str, Tensor] = {}
        for name, column in _OF_BATCHES.items():
            given: Tensor = getattr(self, name)
            if column.per == "token":
                columns[name] = given.new_full((n * width,), column.pad)
                columns[name][index[mask]] = given[mask]
                columns[name] = columns[name].view(n, width)
            else:
                columns[name] = given[last if name in ("truncated", "bootstrap") else first]
        return RowBatch(**columns), index

    def to(self, device: torch.device) -> RowBatch:
        """The same batch with its tensors on ``device``."""
        return RowBatch(**{name: getattr(self, name).to(device) for name in _OF_BATCHES})

    def token_ids(self) -> list[list[int]]:
        """Each row's tokens, without padding."""
        lengths = self.attention_mask.sum(1).tolist()
        return [ids[:n] for ids, n in zip(self.ids.tolist(), lengths, strict=True)]

    def per_turn(self, name: str, turns: int) -> Tensor:
        """``[batch, turns]``: a column of turns without what lies beyond, padded where it is narrower."""
        column: Tensor = getattr(self, name)[:, :turns]
        return torch.nn.functional.pad(column, (0, turns - column.shape[1]), value=_OF_BATCHES[name].pad)

    @property
    def trained_mask(self) -> Tensor:
        """Tokens that any loss component reads."""
        return (self.rl_weight != 0) | (self.ce_weight != 0) | (self.replay_weight != 0) | self.learned


def _declared(cls: type) -> dict[str, Column]:
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(cls, include_extras=True).items()}


_OF_ROWS, _OF_BATCHES = _declared(Columns), _declared(RowBatch)


def collate(rows: Sequence[Row], pad: int) -> RowBatch:
    """Pads on the right to the longest row.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("cannot make a batch of no rows")
    width = max(map(len, rows))
    columns: dict[str, Tensor] = {}
    for name, column in _OF_BATCHES.items():
        missing = pad if name == "ids" else column.pad
        if name not in _OF_ROWS:
            shape = (len(rows),) if column.per == "row" else (len(rows), width)
            columns[name] = torch.full(shape, missing, dtype=column.dtype)
        elif column.per == "row":
            columns[name] = torch.stack([getattr(row, name) for row in rows])
        else:
            values = [getattr(row, name) for row in rows]
            columns[name] = padded(values, missing, column.dtype, width if column.per == "token" else 0)
    columns["attention_mask"] = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return RowBatch(**columns)


def padded(lists: Sequence[Sequence[float] | Tensor], missing: float, dtype: torch.dtype, width: int = 0) -> Tensor:
    """``[len(lists), longest]``, or wider if ``width`` is; what a list does not reach is ``missing``."""
    out = torch.full((len(lists), max([width, *map(len, lists)])), missing, dtype=dtype)
    for row, values in enumerate(lists):
        if len(values):
            out[row, : len(values)] = torch.as_tensor(values, dtype=dtype)
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
