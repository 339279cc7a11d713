"""iStar's implicit process reward model: a copy of the policy that learns which episodes of a group did better."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from imagination.learning.advantages.group import preferences
from imagination.learning.advantages.shaping import implicit_step_rewards
from imagination.learning.losses.auxiliary import trajectory_preference_loss
from imagination.learning.micro_batch import masked_logprobs
from imagination.learning.optimizers import clip_gradients
from imagination.learning.supervised import BETAS
from imagination.settings import TrainSettings
from imagination.settings.algorithm_parts import ImplicitSteps
from policy.lm.batch import RowBatch
from policy.lm.forward import split


class ProcessRewardModel:
    """The model with its own optimiser, beside the policy (Liu et al. 2025, arXiv 2509.19199).

    It begins as the policy. Weights that are not trained are the policy's own, so with LoRA it is a second adapter. It
    makes one optimiser step an update, on all pairs at once.
    """

    def __init__(self, policy: Any, settings: ImplicitSteps, train: TrainSettings) -> None:
        frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
        self.model = copy.deepcopy(policy, frozen)  # which does not copy what is in its memo
        self.model.eval()
        self._settings, self._train = settings, train
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=train.lr * settings.prm_lr, weight_decay=train.weight_decay, betas=BETAS
        )

    def step_rewards(self, batch: RowBatch, temperature: float) -> tuple[Tensor, dict[str, float]]:
        """Learns from the episodes of an update, then says what each of their turns is worth.

        Args:
            batch: rows that the policy sampled, at ``temperature``, with ``old_logprobs`` of the policy before the
                update, which is the reference; their ``rl_weight`` says which tokens.

        Returns:
            ``[rows, turns]``, NaN where no turn is, on the CPU; and what is to be logged: the loss, the share of pairs
            in the right order before the step, and their number. Nothing is logged where no two episodes differ.
        """
        earned = torch.tensor([sum(rewards) for rewards in batch.rewards.tolist()], dtype=torch.float64)
        better, worse = preferences(earned, batch.group)
        metrics: dict[str, float] = {}
        if len(better):
            scores = self._rewards(batch, temperature).nansum(1).requires_grad_()
            terms = trajectory_preference_loss(scores, better, worse)
            (slopes,) = torch.autograd.grad(terms.loss, scores)
            self._optimizer.zero_grad()
            # by the slope of the loss for each episode's score, as pairs need not share a micro-batch
            for picked, part in split(self.model, batch, self._train.micro_tokens, slopes.nonzero()[:, 0].tolist()):
                own = self._part(part, temperature).nansum(1)
                (own * slopes[picked].to(own.device)).sum().backward()
            if math.isfinite(clip_gradients(self._trained.values(), self._train.grad_clip)):
                self._optimizer.step()
            loss, right = float(terms.loss.detach()), float(terms.means()["preferred"])
            metrics = {"prm_loss": loss, "prm_preferred": right, "prm_pairs": float(len(better))}
        return self._rewards(batch, temperature), metrics

    @torch.no_grad()
    def _rewards(self, batch: RowBatch, temperature: float) -> Tensor:
        rewards = torch.empty(batch.rewards.shape)
        for picked, part in split(self.model, batch, self._train.micro_tokens):
            rewards[picked] = self._part(part, temperature).float().cpu()
        return rewards

    def _part(self, part: RowBatch, temperature: float) -> Tensor:
        """``[rows, turns]``, with a gradient."""
        mask = part.rl_weight != 0
        logprobs = masked_logprobs(self.model, part, mask, temperature)
        logprobs = logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs)
        index, turns = part.turns.masked_fill(~mask, -1), part.rewards.shape[1]
        return implicit_step_rewards(logprobs, part.old_logprobs, index, turns, self._settings.prm_beta)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the trained weights."""
        weights = {name: p.detach() for name, p in self._trained.items()}
        return {"weights": weights, "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, p in self._trained.items():
            p.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
