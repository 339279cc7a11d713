"""Transitions between hidden states, as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transitions:
    """What happened between one state and the next.

    Attributes:
        states, next_states: float ``[n, hidden]``. The next state of the last transition of an episode is what stands
            after all of it.
        rewards: ``[n]``, earned in between.
        dones: bool ``[n]``, the world ended there.
        returns: ``[n]``, discounted, of all that was earned from the state on.

    Raises:
        ValueError: shapes disagree, or ``dones`` is not bool.
    """

    states: Tensor
    next_states: Tensor
    rewards: Tensor
    dones: Tensor
    returns: Tensor

    def __post_init__(self) -> None:
        n = len(self.states)
        if self.states.ndim != 2 or self.next_states.shape != self.states.shape:
            raise ValueError(
                f"states and next_states must be [n, hidden], got {tuple(self.states.shape)} and "
                f"{tuple(self.next_states.shape)}"
            )
        for name in ("rewards", "dones", "returns"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"{name} must be [{n}], got {tuple(getattr(self, name).shape)}")
        if self.dones.dtype != torch.bool:
            raise ValueError(f"dones must be bool, got {self.dones.dtype}")

    def __len__(self) -> int:
        return len(self.states)

    def rows(self, which: Tensor) -> Transitions:
        """Those at these places, or where a mask is true."""
        return Transitions(*(getattr(self, f.name)[which] for f in fields(self)))

    def columns(self) -> Tensor:
        """All of it side by side, float ``[n, 2 hidden + 3]``: state, next state, reward, done, return."""
        numbers = (self.rewards, self.dones.float(), self.returns)
        return torch.cat([self.states, self.next_states, *(x[:, None] for x in numbers)], 1)
