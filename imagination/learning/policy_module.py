"""The LightningModule of policy updates: it wires model, algorithm and optimiser.

It holds nothing that an algorithm should know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from imagination.learning.advantages.shaping import ProgressEstimator, attribution_error, progress_rewards
from imagination.learning.advantages.turns import turn_bounds
from imagination.learning.algorithms import Algorithm
from imagination.learning.critic import critic_values
from imagination.learning.experience import after_unsure_actions, assign_credit, sampled_rows, trained_rows
from imagination.learning.losses.auxiliary import EntropyHistory
from imagination.learning.losses.terms import LossTerms
from imagination.learning.metrics import means, realised_shares
from imagination.learning.micro_batch import Losses, Step, logprobs_under, reference_kl
from imagination.learning.optimizers import clip_gradients
from imagination.learning.process_reward_model import ProcessRewardModel
from imagination.learning.sharding import Compute, unsharded
from imagination.learning.supervised import BETAS, Record
from imagination.runs.processes import count, dealt, gathered, missing_passes, rank, sum_gradients
from imagination.settings import ProgressSettings, TrainSettings
from imagination.settings.algorithm_parts import ImplicitSteps
from policy.lm.batch import Row, RowBatch, collate
from policy.lm.forward import ValueHead, encode, micro_batches, split
from real_envs.seeding import derive_seed

# Exact engines whose log-probs are within 1 % of the trainer's need no correction: rounding, far inside any clip.
_EXACT = 1.01
_MOST_HALVINGS = 6


@dataclass(slots=True)
class Update:
    """The experience of one policy update: rows to learn from and what the rollouts measured.

    Attributes:
        exact: log-probs came from an engine that computes what the trainer does, up to the rounding of fp32, so a first
            minibatch tells whether that is so. Those of any other engine can be off at any token, so the trainer
            computes its own of all rows before the first step.
    """

    index: int
    rows: list[Row]
    metrics: dict[str, float] = field(default_factory=dict)
    exact: bool = False


class PolicyModule(L.LightningModule):
    """Any algorithm of the registry, with imitation of expert rows in the same optimiser step.

    Args:
        seed: of the order of rows within an update.
        reference: a frozen copy of the starting policy, needed where ``kl_coef > 0``.
        value: the critic to begin with, where the algorithm has one; by default all its values are 0.

    Raises:
        ValueError: there is a KL and no reference.
    """

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        train: TrainSettings,
        record: Record,
        seed: int = 0,
        reference: Any = None,
        value: ValueHead | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # several minibatches an update, several micro-batches a minibatch
        if algorithm.kl.kl_coef and reference is None:
            raise ValueError("kl_coef needs the reference: a frozen copy of the starting policy")
        self.model, self.algorithm, self.settings = model, algorithm, train
        critic = algorithm.critic is not None
        self.value = (value or ValueHead(model.config.hidden_size)) if critic else None
        self.record, self.seed = record, seed
        self.compute: Compute = unsharded
        self.passed: Callable[[], float] = lambda: 0.0  # the share of the training's time that is over
        self._reference = [reference]  # in a list: no submodule, so neither trained nor saved
        self.losses = Losses(model, self.value, reference, algorithm, train)
        self.entropies = EntropyHistory()
        self.progress = Progress(model, algorithm.progress, seed) if algorithm.progress.enabled else None
        steps = algorithm.advantage
        self.prm = ProcessRewardModel(model, steps, train) if isinstance(steps, ImplicitSteps) else None
        self.updates_done, self.temperature = 0, 1.0

    def configure_model(self) -> None:
        """Sharded before, where it is."""

    def done(self) -> int:
        """Updates so far, those before a resume included."""
        return self.updates_done

    def on_fit_start(self) -> None:
        if self._reference[0] is not None:
            self._reference[0].to(self.device)

    def transfer_batch_to_device(self, batch: Update, device: torch.device, dataloader_idx: int) -> Update:
        """Rows stay where they are until they are split: an update may be larger than the device."""
        return batch

    def training_step(self, update: Update, _: int) -> None:
        self.model.eval()  # rollouts are sampled without dropout; with it, ratios of an unchanged policy are not 1
        settings = self.settings
        optimizer = self.optimizers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        if settings.lr_end < 1:
            past = max(self.passed(), update.index / max(1, settings.updates - 1))
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * (1 - (1 - settings.lr_end) * past)
        metrics, terms, all_norms = dict(update.metrics), list[LossTerms](), list[float]()
        if update.rows:
            batch = collate(update.rows, pad=0)
            self.temperature = temperature_of(batch)
            metrics |= self._assign_credit(batch)
            batch.observed = after_unsure_actions(batch, settings.observation_share)
            batch = batch[trained_rows(batch, settings.observation_coef > 0)]
            before = self._weights() if settings.max_kl else []
            terms, all_norms = self._optimise(batch, update, optimizer)
            if before and all_norms:
                metrics |= self._within(settings.max_kl, batch, before)
            metrics |= realised_shares(batch)
        self.updates_done = update.index + 1
        measured = means(terms)
        if math.isfinite(measured.get("entropy", math.nan)):
            self.entropies = self.entropies.add(measured["entropy"])
        metrics |= measured
        if norms := [norm for norm in all_norms if not math.isnan(norm)]:
            metrics["grad_norm"] = sum(norms) / len(norms)
        if len(norms) < len(all_norms):
            metrics["skipped_steps"] = len(all_norms) - len(norms)
        self.log_dict({k: v for k, v in metrics.items() if "success" in k or k == "entropy"}, prog_bar=True)
        self.record(update.index, metrics)

    def _assign_credit(self, batch: RowBatch) -> dict[str, float]:
        """Advantages of the whole update, with what critic, reference and progress estimator say of it before any step;
        returns what is to be logged."""
        own, limit, kl = sampled_rows(batch), self.settings.micro_tokens, self.algorithm.kl
        shaped, metrics = None, dict[str, float]()
        if self.value is not None:
            self.compute(partial(critic_values, batch, self.model, self.value, limit, own))
        if own and kl.kl_coef and kl.kl_in == "reward":
            sampled = batch[own]
            penalties = reference_kl(sampled, self._reference[0], kl.kl_estimator, self.temperature, limit)
            batch.kl[own, : penalties.shape[1]] = penalties
        if own and self.progress is not None:
            shaped, metrics = self.compute(partial(self.progress.turn_rewards, batch[own], limit))
        step_rewards = None
        if own and self.prm is not None:
            self._remember_logprobs(batch, own)
            step_rewards, metrics = self.prm.step_rewards(batch[own], self.temperature)
        assign_credit(batch, self.algorithm, shaped, self.settings.process_coef, step_rewards)
        return metrics

    def _optimise(self, batch: RowBatch, update: Update, optimizer: Any) -> tuple[list[LossTerms], list[float]]:
        """The optimiser steps of an update: terms of all micro-batches, and the norm of the gradient at each step. That
        is NaN where the gradient was not finite, and nothing was learned from it.
        """
        settings, n = self.settings, len(batch)
        collected, norms = list[LossTerms](), list[float]()
        if not n:
            return collected, norms
        rng = torch.Generator().manual_seed(derive_seed("minibatches", self.seed, update.index))
        size = math.ceil(n / settings.minibatches)
        # the only step of an update reads all rows under the policy that acted, and needs no memory of it, unless the
        # length of the step is measured: by the engine's log-probs that would be its distance from the trainer
        exact = update.exact and (self.algorithm.loss_mask or not settings.max_kl)  # none came with what the world said
        remembered = not exact and (settings.epochs > 1 or size < n or settings.max_kl > 0)
        if remembered:
            self.compute(partial(self._remember_logprobs, batch, range(n)))
        for _epoch in range(settings.epochs):
            order = torch.randperm(n, generator=rng).tolist()
            for start in range(0, n, size):
                optimizer.zero_grad()
                unchanged = not norms
                terms = self._minibatch(batch[order[start : start + size]], unchanged, remembered)
                collected.extend(terms)
                if unchanged and not remembered and self._differs_from_engine(terms):
                    rest = range(n) if settings.epochs > 1 else order[size:]
                    self.compute(partial(self._remember_logprobs, batch, rest))
                norm = clip_gradients(self.parameters(), settings.grad_clip)
                if not math.isfinite(norm):
                    optimizer.zero_grad()  # without gradients a step changes nothing
                norms.append(norm if math.isfinite(norm) else math.nan)
                optimizer.step()
        return collected, norms

    def _weights(self) -> list[Tensor]:
        """A copy of the trained weights of the policy."""
        return [p.detach().clone() for p in self.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def _within(self, most: float, batch: RowBatch, before: Sequence[Tensor]) -> dict[str, float]:
        """Goes back half of the way, and again, until the policy is at most ``most`` nats a token from the one that
        acted: the backtracking line search of TRPO (Schulman et al. 2015, arXiv 1502.05477, appendix C).

        Few episodes with a signal make a step as long as many do, by a gradient that is mostly noise; one such
        step has unlearned everything.
        """
        acted = batch[sampled_rows(batch)]
        acted.behavior_logprobs = torch.where(acted.old_logprobs.isnan(), acted.behavior_logprobs, acted.old_logprobs)
        tokens = int((acted.rl_weight != 0).sum())
        halved = 0
        while tokens:
            limit = self.settings.micro_tokens
            kl = float(self.compute(partial(reference_kl, acted, self.model, "k3", self.temperature, limit)).sum())
            if kl / tokens <= most or halved == _MOST_HALVINGS:
                return {"update_kl": kl / tokens, "halved": float(halved)}
            halved += 1
            for p, old in zip((p for p in self.model.parameters() if p.requires_grad), before, strict=True):
                p.copy_((p + old) / 2)
        return {}

    def _minibatch(self, batch: RowBatch, unchanged: bool, remembered: bool) -> list[LossTerms]:
        """Backward through micro-batches. Each component divides by its own count over the whole minibatch."""
        weights, denominator = self.algorithm.weigh(batch.rl_weight != 0)
        step = Step(
            rl_tokens=int((batch.rl_weight != 0).sum()),
            denominator=denominator,
            value_tokens=int(batch.learned.sum()),
            ce_tokens=int((batch.ce_weight != 0).sum()),
            replay_tokens=int((batch.replay_weight != 0).sum()),
            observed_tokens=int(batch.observed.sum()) if self.settings.observation_coef else 0,
            temperature=self.temperature,
            unchanged=unchanged,
            remembered=remembered,
            entropy_history=self.entropies.mean,
        )
        # the algorithm's weight times the row's own, which is less than 1 where a dream is uncertain
        batch.rl_weight = batch.rl_weight * weights
        limit = self.settings.micro_tokens
        if count() > 1:  # at least a part for each process
            limit = min(limit, math.ceil(int(batch.attention_mask.sum()) / count()))
        ids, device = batch.token_ids(), next(self.model.parameters()).device
        parts = micro_batches(self.model, ids, limit)
        tokens = [sum(len(ids[i]) for i in part) for part in parts]
        shares = dealt(tokens)
        terms = [
            self.losses.backward(batch[parts[n]].to(device), step, self.manual_backward, self.compute)
            for n in shares[rank()]
        ]
        if self.compute is not unsharded:
            shortest = batch[parts[tokens.index(min(tokens))]].to(device)
            for _ in range(missing_passes(shares)):
                self.losses.backward(shortest, step, lambda loss: self.manual_backward(0.0 * loss), self.compute)
        sum_gradients(self.parameters())
        return gathered(terms)

    def _differs_from_engine(self, terms: Sequence[LossTerms]) -> bool:
        """Whether the log-probs that came with the tokens may be too far from the trainer's to stand for them."""
        if not self.algorithm.loss_mask:
            return True  # what the world said came without any
        ratios = [float(t.maxima["mismatch_ratio_max"]) for t in terms if "mismatch_ratio_max" in t.maxima]
        unknown = math.inf  # a first minibatch of experts alone
        return self.algorithm.tis_cap > 0 and max(ratios, default=unknown) > _EXACT

    @torch.no_grad()
    def _remember_logprobs(self, batch: RowBatch, rows: Sequence[int]) -> None:
        """Fills in ``old_logprobs`` of some rows: the trainer's, of the policy as it is now."""
        sampled = set(sampled_rows(batch))
        for picked, micro in split(self.model, batch, self.settings.micro_tokens, [i for i in rows if i in sampled]):
            mask = micro.rl_weight != 0
            old = torch.full_like(micro.old_logprobs, math.nan)
            old[mask] = logprobs_under(self.model, micro, mask, self.temperature).to(old.dtype)
            batch.old_logprobs[picked, : old.shape[1]] = old.cpu()

    def configure_optimizers(self) -> Any:
        trained, settings = [p for p in self.parameters() if p.requires_grad], self.settings
        return torch.optim.AdamW(trained, lr=settings.lr, weight_decay=settings.weight_decay, betas=BETAS)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["updates_done"] = self.updates_done
        checkpoint["entropies"] = (self.entropies.total, self.entropies.updates)
        if self.progress is not None:
            checkpoint["progress"] = self.progress.state_dict()
        if self.prm is not None:
            checkpoint["prm"] = self.prm.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.updates_done = int(checkpoint["updates_done"])
        self.entropies = EntropyHistory(*checkpoint["entropies"])
        if self.progress is not None:
            self.progress.load_state_dict(checkpoint["progress"])
        if self.prm is not None:
            self.prm.load_state_dict(checkpoint["prm"])


def temperature_of(batch: RowBatch) -> float:
    """At which the rows were sampled that RL or replays read; 1.0 where there are none.

    Raises:
        ValueError: they were sampled at several temperatures: one denominator cannot serve them all.
    """
    sampled = ((batch.rl_weight != 0) | (batch.replay_weight != 0)).any(1)
    temperatures = batch.temperature[sampled].unique().tolist()
    if len(temperatures) > 1:
        raise ValueError(f"episodes of one update were sampled at the temperatures {temperatures}: ratios need one")
    return float(temperatures[0]) if temperatures else 1.0


# --- progress attribution (SPA-RL): an estimator learns, update by update, which turns bring about what is earned ---


@torch.no_grad()
def turn_states(batch: RowBatch, model: Any, max_tokens: int) -> tuple[Tensor, Tensor]:
    """The policy's hidden state after each turn's last action token: it has read the action, not yet the answer.

    Returns:
        ``(states [rows, turns, hidden], exists [rows, turns])``, without gradient, fp32; zero where no turn is.
    """
    device = next(model.parameters()).device
    turns = max(int(batch.turns.max()) + 1, 1) if batch.turns.numel() else 1
    last = turn_bounds(batch.turns, turns)[1].to(device)
    exists = last >= 0
    states: Tensor | None = None
    for picked, part in split(model, batch, max_tokens):
        encoded = encode(model, part.ids, part.attention_mask)
        if states is None:
            states = torch.zeros(len(batch), turns, encoded.states.shape[-1], device=device)
        for r, i in enumerate(picked):
            states[i, exists[i]] = encoded.states[encoded.which[r, last[i, exists[i]]]].float()
    return (torch.zeros(0, turns, 1, device=device) if states is None else states), exists


class Progress:
    """The estimator with its own optimiser, apart from the policy's: neither clips or weighs the other."""

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
        """Learns from what the episodes of an update earned, then says what each turn is to be judged by.

        Returns:
            ``[row, turns]``, zero for turns that the policy did not play; and the mean squared error of
            an episode's sum before (on episodes that the estimator had not seen) and after it learned from them.
        """
        states, exists = turn_states(batch, self._model, max_tokens)
        earned = torch.tensor([sum(rewards) for rewards in batch.rewards.tolist()], device=states.device)
        errors = self._learn(states, exists, earned)
        grounded = torch.zeros_like(exists)
        if self._settings.carried_out:
            grounded = batch.per_turn("carried_out", exists.shape[1]).to(exists.device) & exists
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
