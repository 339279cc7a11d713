"""SPA-RL at work: an estimator that learns, update by update, which turns bring about what episodes earn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from imagination.learning.advantages import ProgressEstimator, attribution_error, progress_rewards, turn_bounds
from imagination.learning.credit import of_turns
from imagination.settings import ProgressSettings
from policy.lm.batch import RowBatch
from policy.lm.forward import encode, split
from real_envs.seeding import derive_seed


@torch.no_grad()
def turn_states(batch: RowBatch, model: Any, max_tokens: int) -> tuple[Tensor, Tensor]:
    """The policy's hidden state after each turn's last action token: it has read the action, not yet the answer.

    Args:
        batch: played rows, with ``turns``.
        max_tokens: bound of a forward pass.

    Returns:
        ``(states [rows, turns, hidden], exists [rows, turns])``, without gradient, fp32; zero where no turn is.
    """
    device = next(model.parameters()).device
    turns = max(int(batch.turns.max()) + 1, 1) if batch.turns.numel() else 1
    last = turn_bounds(batch.turns, turns)[1].to(device)
    exists = last >= 0
    states: Tensor | None = None
    for picked, part in split(model, batch, max_tokens):
        encoded = encode(model, part.input_ids, part.attention_mask)
        if states is None:
            states = torch.zeros(len(batch), turns, encoded.states.shape[-1], device=device)
        for r, i in enumerate(picked):
            states[i, exists[i]] = encoded.states[encoded.index[r, last[i, exists[i]]]].float()
    return (torch.zeros(0, turns, 1, device=device) if states is None else states), exists


class Progress:
    """The estimator with its own optimiser, apart from the policy's: neither clips or weighs the other.

    Args:
        model: the policy, whose hidden states describe turns.
        seed: of the estimator's first weights.
    """

    def __init__(self, model: Any, settings: ProgressSettings, seed: int) -> None:
        self._model, self._settings = model, settings
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed("progress", seed))
            estimator = ProgressEstimator(model.config.hidden_size, settings.hidden)
        for parameter in estimator.layers[-1].parameters():
            nn.init.zeros_(parameter)  # at first no turn contributes anything, instead of anything at random
        self.estimator = estimator.to(next(model.parameters()).device)
        self._optimizer = torch.optim.AdamW(self.estimator.parameters(), lr=settings.lr)

    def turn_rewards(self, batch: RowBatch, max_tokens: int) -> tuple[Tensor, dict[str, float]]:
        """Learns from what the episodes earned, then says what each turn is to be judged by.

        Args:
            batch: all played rows of an update.

        Returns:
            ``[row, turns]``, zero for turns that the policy did not play; and the mean squared error of
            an episode's sum before (on episodes that the estimator had not seen) and after it learned from them.
        """
        states, exists = turn_states(batch, self._model, max_tokens)
        earned = torch.tensor([sum(rewards) for rewards in batch.rewards.tolist()], device=states.device)
        errors = self._learn(states, exists, earned)
        grounded = torch.zeros_like(exists)
        if self._settings.carried_out:
            grounded = of_turns(batch.carried_out, exists.shape[1], False).to(exists.device) & exists
        with torch.no_grad():
            contributions = self.estimator(states, exists)
        rewards = progress_rewards(contributions, grounded, exists, self._settings.carried_out)
        return rewards.cpu(), errors

    def _learn(self, states: Tensor, exists: Tensor, earned: Tensor) -> dict[str, float]:
        valid, n = torch.ones(len(states), dtype=torch.bool, device=states.device), len(states)
        errors: list[float] = []
        with torch.enable_grad():
            for step in range(self._settings.steps + 1):
                error = attribution_error(self.estimator(states, exists), earned, valid, denominator=n)
                errors.append(float(error.detach()))
                if step == self._settings.steps:
                    break
                self._optimizer.zero_grad()
                error.backward()
                self._optimizer.step()
        return {"progress_error": errors[0], "progress_error_fitted": errors[-1]}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"estimator": self.estimator.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimator.load_state_dict(state["estimator"])
        self._optimizer.load_state_dict(state["optimizer"])
