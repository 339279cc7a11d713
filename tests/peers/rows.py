"""Random multi-turn rows that both sides read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Rows:
    """``[rows, time]`` in fp64; turns of two tokens, two observation tokens after each, and padding on the right."""

    logprobs: Tensor
    old: Tensor
    reference: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    rewards: Tensor
    mask: Tensor

    @property
    def ids(self) -> Tensor:
        return torch.arange(len(self.mask))[:, None].expand_as(self.mask)


def make_rows(seed: int, rows: int = 8, turns: int = 4, spread: float = 0.6) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    time = turns * 4

    def normal() -> Tensor:
        return torch.randn(rows, time, generator=rng, dtype=torch.float64)

    played = torch.randint(1, turns + 1, (rows, 1), generator=rng)
    place = torch.arange(time)
    mask = (place % 4 < 2) & (place // 4 < played)
    logprobs = -torch.rand(rows, time, generator=rng, dtype=torch.float64) - 0.2
    last = place == 4 * (played - 1) + 1
    return Rows(
        logprobs=logprobs,
        old=logprobs + spread * normal(),
        reference=logprobs + 0.3 * normal(),
        advantages=normal(),
        values=normal(),
        old_values=normal(),
        returns=normal(),
        rewards=torch.where(last, torch.randint(0, 3, (rows, 1), generator=rng).double(), 0.0),
        mask=mask,
    )


def with_gradient(loss: Any, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Value of ``loss(leaf)`` and its gradient."""
    leaf = logprobs.clone().requires_grad_()
    found = loss(leaf)
    found.backward()
    assert leaf.grad is not None
    return found.detach().double(), leaf.grad


def assert_agree(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE, check_dtype=False)
