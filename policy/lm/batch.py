"""``TokenBatch``: what the losses see. Every tensor is ``[batch, time]``, each value at its token's own position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from real_envs.trajectory import Source

_PER_TOKEN = (
    "attention_mask",
    "action_mask",
    "behavior_logprobs",
    "advantages",
    "rl_weight",
    "ce_weight",
    "replay_weight",
    "rewards",
    "old_logprobs",
    "values",
    "returns",
    "turns",
    "learned",
)


@dataclass(slots=True)
class Row:
    """One sequence on its way into a batch, as plain lists with one entry per token.

    ``rl_weight``, ``ce_weight`` and ``replay_weight`` route a token to a loss component (0 = not at all);
    ``behavior_logprobs`` is NaN where the policy did not sample the token: absent, not zero. ``old_logprobs``,
    ``values`` and ``returns`` are what policy and critic said before the update; the trainer fills them in.

    Attributes:
        turns: per token, the turn that it acts in, -1 for tokens of no action. Empty where nothing is judged.
        anchors: per turn, a number for the observation that was answered, equal where the observations are.
        group: episodes of one number share a start and are compared with each other.
        process: per turn, a judgement of it apart from what it earned, NaN for turns that the policy did not play.
        carried_out: per turn, whether the world did what the action said.
        replay_weight: per token, of an episode of an earlier update; ``behavior_logprobs`` are those of the policy that
            acted then, and ``advantages`` are given.
        learned: per token, whether the critic has a target there.
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
    rewards: Sequence[float] = ()
    old_logprobs: Sequence[float] = ()
    values: Sequence[float] = ()
    returns: Sequence[float] = ()
    truncated: bool = False
    turns: Sequence[int] = ()
    anchors: Sequence[int] = ()
    group: int = 0
    process: Sequence[float] = ()
    carried_out: Sequence[bool] = ()
    replay_weight: Sequence[float] = ()
    learned: Sequence[bool] = ()
    given_up: int = 0
    temperature: float = 1.0


@dataclass(slots=True)
class TokenBatch:
    """A padded batch.

    ``rewards`` stand on the last token of the action that earned them. ``truncated`` episodes bootstrap from the state
    after their last token. ``old_logprobs``, ``values`` and ``returns`` are NaN until the trainer has filled them in.
    """

    input_ids: torch.Tensor  # long
    attention_mask: torch.Tensor  # bool, true on real tokens
    action_mask: torch.Tensor  # bool, true on the tokens that the trained model made
    behavior_logprobs: torch.Tensor  # float, NaN where absent
    advantages: torch.Tensor  # float
    rl_weight: torch.Tensor  # float
    ce_weight: torch.Tensor  # float
    replay_weight: torch.Tensor  # float
    rewards: torch.Tensor  # float
    old_logprobs: torch.Tensor  # float, of the policy before the update; NaN where behavior_logprobs serve as such
    values: torch.Tensor  # float, NaN without a critic
    returns: torch.Tensor  # float, NaN without a critic
    turns: torch.Tensor  # long, -1 for tokens of no action
    learned: torch.Tensor  # bool, where the critic has a target
    truncated: torch.Tensor  # bool, [batch]
    source: list[Source] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        for name in _PER_TOKEN:
            found = getattr(self, name).shape
            if found != shape:
                raise ValueError(f"{name} is {tuple(found)} but input_ids is {tuple(shape)}")
        if len(self.source) != shape[0]:
            raise ValueError(f"{len(self.source)} sources for {shape[0]} rows")

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch with its tensors on ``device``."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "source"}
        return TokenBatch(**moved, source=self.source)

    @property
    def trained_mask(self) -> torch.Tensor:
        """Tokens that any loss component reads."""
        return (self.rl_weight != 0) | (self.ce_weight != 0) | (self.replay_weight != 0) | self.learned


def collate(rows: Sequence[Row], pad: int) -> TokenBatch:
    """Pads on the right to the longest row.

    Raises:
        ValueError: no rows, or a row whose lists differ in length.
    """
    if not rows:
        raise ValueError("cannot make a batch of no rows")
    width = max(len(row.ids) for row in rows)

    def fill(values: Sequence[Sequence[float]], missing: float, dtype: torch.dtype) -> torch.Tensor:
        for i, (row, value) in enumerate(zip(rows, values, strict=True)):
            if len(value) not in (0, len(row.ids)):
                raise ValueError(f"row {i}: {len(value)} values for {len(row.ids)} tokens")
        return padded(values, missing, dtype, width)

    return TokenBatch(
        input_ids=fill([r.ids for r in rows], pad, torch.long),
        attention_mask=fill([[True] * len(r.ids) for r in rows], False, torch.bool),
        action_mask=fill([r.action_mask for r in rows], False, torch.bool),
        behavior_logprobs=fill([r.behavior_logprobs for r in rows], float("nan"), torch.float32),
        advantages=fill([r.advantages for r in rows], 0.0, torch.float32),
        rl_weight=fill([r.rl_weight for r in rows], 0.0, torch.float32),
        ce_weight=fill([r.ce_weight for r in rows], 0.0, torch.float32),
        replay_weight=fill([r.replay_weight for r in rows], 0.0, torch.float32),
        rewards=fill([r.rewards for r in rows], 0.0, torch.float32),
        old_logprobs=fill([r.old_logprobs for r in rows], float("nan"), torch.float32),
        values=fill([r.values for r in rows], float("nan"), torch.float32),
        returns=fill([r.returns for r in rows], float("nan"), torch.float32),
        turns=fill([r.turns for r in rows], -1, torch.long),
        learned=fill([r.learned for r in rows], False, torch.bool),
        truncated=torch.tensor([r.truncated for r in rows]),
        source=[r.source for r in rows],
    )


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
