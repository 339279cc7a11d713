"""A value head for PPO: the expected return before each token the policy makes."""

from __future__ import annotations

import torch
from torch import nn


class ValueHead(nn.Module):
    """A linear map from the hidden state that predicts a token to the value of the state before it.

    Starts at zero, so that the first advantages are plain returns.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> values ``[n]`` in fp32."""
        value: torch.Tensor = self.linear(hidden.float())[:, 0]
        return value
