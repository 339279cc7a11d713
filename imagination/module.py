"""The LightningModule of policy updates: it wires model, pure losses and optimiser.

It holds nothing that a loss should know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from imagination.critic import with_critic
from imagination.losses import (
    LossTerms,
    cross_entropy_loss,
    kl_k3,
    ppo_clip_loss,
    token_entropy,
    token_logprobs,
    value_loss,
)
from imagination.mismatch import engine_mismatch, truncated_importance
from imagination.settings import AlgorithmSettings, TrainSettings
from imagination.supervised import Record
from policy.lm.batch import Row, TokenBatch, collate
from policy.lm.forward import Predictors, hidden_before, micro_batches, token_logits
from policy.value import ValueHead

# Engines whose log-probs are within 1 % of the trainer's need no correction: rounding, far inside any clip.
_EXACT = 1.01


@dataclass(slots=True)
class Update:
    """The experience of one policy update: rows to learn from and what the rollouts measured."""

    index: int
    rows: list[Row]
    metrics: dict[str, float] = field(default_factory=dict)


class PolicyModule(L.LightningModule):
    """Masked GRPO or PPO, with cross-entropy on expert rows in the same optimiser step.

    Args:
        model: the policy.
        algorithm, train: settings.
        temperature: what the rollouts were sampled at; ratios need the same.
        seed: of the order of rows within an update.
        reference: a frozen copy of the starting policy, needed where ``kl_coef > 0``.
    """

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmSettings,
        train: TrainSettings,
        record: Record,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        reference: Any = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # several minibatches an update, several micro-batches a minibatch
        self.model = model
        self.value = ValueHead(model.config.hidden_size) if algorithm.name == "ppo" else None
        self.algorithm, self.settings = algorithm, train
        self.record, self.temperature, self.seed = record, temperature, seed
        self._reference = [reference]  # in a list: no submodule, so neither trained nor saved
        self.updates_done = 0

    def on_fit_start(self) -> None:
        if self._reference[0] is not None:
            self._reference[0].to(self.device)

    def transfer_batch_to_device(self, batch: Update, device: torch.device, dataloader_idx: int) -> Update:
        """Rows are lists until they are collated; Lightning would look at each number for a tensor to move."""
        return batch

    def training_step(self, update: Update, _: int) -> None:
        self.model.eval()  # rollouts are sampled without dropout; with it, ratios of an unchanged policy are not 1
        settings, rows = self.settings, list(update.rows)
        optimizer = self.optimizers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        if self.value is not None:
            a = self.algorithm
            rows = with_critic(rows, self.model, self.value, a.gamma, a.lam, settings.micro_tokens)
        chance = torch.Generator().manual_seed(self.seed * 1_000_003 + update.index)
        collected: list[LossTerms] = []
        norms: list[float] = []
        for _epoch in range(settings.epochs if rows else 0):
            order = torch.randperm(len(rows), generator=chance).tolist()
            size = math.ceil(len(rows) / settings.minibatches)
            for start in range(0, len(rows), size):
                optimizer.zero_grad()
                unchanged = not norms
                terms = self._minibatch([rows[i] for i in order[start : start + size]], unchanged)
                collected.extend(terms)
                if unchanged and self._differs_from_engine(terms):
                    rows = self._with_old_logprobs(rows, range(len(rows)) if settings.epochs > 1 else order[size:])
                norm = torch.nn.utils.clip_grad_norm_(self.parameters(), settings.grad_clip)
                norms.append(float(norm))
                optimizer.step()
        self.updates_done = update.index + 1
        metrics = {**update.metrics, **_means(collected)}
        if norms:
            metrics["grad_norm"] = sum(norms) / len(norms)
        self.log_dict({k: v for k, v in metrics.items() if "success" in k or k == "entropy"}, prog_bar=True)
        self.record(update.index, metrics)

    def _minibatch(self, rows: Sequence[Row], unchanged: bool) -> list[LossTerms]:
        """Backward through micro-batches. Each component divides by its own count over the whole minibatch.

        ``unchanged``: no optimiser step was made since the rows were sampled.
        """
        rl_tokens = sum(sum(w != 0 for w in row.rl_weight) for row in rows)
        ce_tokens = sum(sum(w != 0 for w in row.ce_weight) for row in rows)
        found: list[LossTerms] = []
        for micro in micro_batches(self.model, [row.ids for row in rows], self.settings.micro_tokens):
            batch = collate([rows[i] for i in micro], pad=0).to(self.device)
            terms = self._loss(batch, rl_tokens, ce_tokens, unchanged)
            self.manual_backward(terms.loss)
            found.append(terms)
        return found

    def _loss(self, batch: TokenBatch, rl_tokens: int, ce_tokens: int, unchanged: bool) -> LossTerms:
        mask = batch.trained_mask
        found = hidden_before(self.model, batch.input_ids, batch.attention_mask, mask)
        logits = token_logits(self.model, found.states)  # [m, vocab], what predicts trained tokens, each once
        ids, rl, ce = (x[mask] for x in (batch.input_ids, batch.rl_weight, batch.ce_weight))  # [n]
        loss = found.states.new_zeros((), dtype=torch.float32)
        real = batch.attention_mask.sum().float()
        sums = {"real_tokens": real, "packing": torch.full_like(real, found.computed)}
        maxima: dict[str, Tensor] = {}
        logprobs = token_logprobs(logits, ids, self.temperature, which=found.which)
        if rl_tokens:
            ppo, mismatch_max = self._ppo(batch, mask, logprobs, rl_tokens, unchanged, sums)
            loss = loss + ppo.loss
            maxima = {"ratio_max": ppo.maxima["ratio"], **mismatch_max}
            entropy = token_entropy(logits.detach(), self.temperature)[found.which]
            sums["entropy"] = (entropy * (rl != 0)).sum()
            if self.algorithm.kl_coef > 0:
                per_token = kl_k3(logprobs, self._reference_logprobs(batch, mask), rl != 0)
                loss = loss + self.algorithm.kl_coef * per_token.sum() / rl_tokens
                sums["kl_reference"] = per_token.detach().sum()
            if self.value is not None:
                critic = self._critic(self.value, batch, mask, found, rl_tokens)
                loss = loss + self.algorithm.value_coef * critic.loss
                sums["value_loss"] = critic.loss.detach() * rl_tokens
        if ce_tokens:
            if self.temperature != 1.0:
                logprobs = token_logprobs(logits, ids, which=found.which)
            imitation = cross_entropy_loss(logprobs, ce, denominator=ce_tokens)
            loss = loss + self.settings.expert_coef * imitation.loss
            sums |= {"ce_tokens": imitation.tokens, "expert_loss": imitation.loss.detach() * ce_tokens}
        return LossTerms(loss=loss, tokens=mask.sum().float(), sums=sums, maxima=maxima)

    def _ppo(
        self,
        batch: TokenBatch,
        mask: Tensor,
        logprobs: Tensor,
        rl_tokens: int,
        unchanged: bool,
        sums: dict[str, Tensor],
    ) -> tuple[LossTerms, dict[str, Tensor]]:
        """The surrogate of the trained tokens; adds to ``sums`` and returns further maxima."""
        engine, rl = batch.behavior_logprobs[mask], batch.rl_weight[mask]
        old, importance, maxima = engine, None, {}
        if unchanged:
            sums["mismatch_k3"], maxima["mismatch_ratio_max"] = engine_mismatch(logprobs, engine, rl)
        if self.algorithm.tis_cap:
            remembered = batch.old_logprobs[mask]
            old = logprobs.detach() if unchanged else torch.where(remembered.isnan(), engine, remembered)
            importance = truncated_importance(old, engine, rl, self.algorithm.tis_cap)
            sums["tis_weight"] = (importance * (rl != 0)).sum()
        ppo = ppo_clip_loss(
            logprobs,
            old,
            batch.advantages[mask],
            rl,
            denominator=rl_tokens,
            importance=importance,
            eps_low=self.algorithm.clip_low,
            eps_high=self.algorithm.clip_high,
        )
        sums |= {"rl_tokens": ppo.tokens, "policy_loss": ppo.loss.detach() * rl_tokens, **ppo.sums}
        return ppo, maxima

    def _critic(
        self, value: ValueHead, batch: TokenBatch, mask: Tensor, found: Predictors, rl_tokens: int
    ) -> LossTerms:
        values = value(found.states)[found.which]
        old, returns, mine = batch.values[mask], batch.returns[mask], batch.rl_weight[mask] != 0
        return value_loss(values, old, returns, mine, denominator=rl_tokens, clip=self.algorithm.value_clip)

    @torch.no_grad()
    def _reference_logprobs(self, batch: TokenBatch, mask: Tensor) -> Tensor:
        return self._logprobs(self._reference[0], batch, mask)

    def _logprobs(self, model: Any, batch: TokenBatch, mask: Tensor) -> Tensor:
        """``[n]``, of the masked tokens under ``model`` at the sampling temperature."""
        found = hidden_before(model, batch.input_ids, batch.attention_mask, mask)
        return token_logprobs(
            token_logits(model, found.states), batch.input_ids[mask], self.temperature, which=found.which
        )

    def _differs_from_engine(self, terms: Sequence[LossTerms]) -> bool:
        """Whether the log-probs that came with the tokens may be too far from the trainer's to stand for them."""
        found = [float(t.maxima["mismatch_ratio_max"]) for t in terms if "mismatch_ratio_max" in t.maxima]
        unknown = math.inf  # a first minibatch of experts alone
        return self.algorithm.tis_cap > 0 and max(found, default=unknown) > _EXACT

    @torch.no_grad()
    def _with_old_logprobs(self, rows: Sequence[Row], wanted: Sequence[int]) -> list[Row]:
        """The rows, the wanted ones with the trainer's log-probs of the policy as it is now."""
        known = list(rows)
        played = [i for i in wanted if any(rows[i].rl_weight)]
        for micro in micro_batches(self.model, [rows[i].ids for i in played], self.settings.micro_tokens):
            chosen = [played[i] for i in micro]
            batch = collate([rows[i] for i in chosen], pad=0).to(self.device)
            mask = batch.rl_weight != 0
            old = torch.full_like(batch.old_logprobs, math.nan)
            old[mask] = self._logprobs(self.model, batch, mask)
            for r, i in enumerate(chosen):
                known[i] = replace(rows[i], old_logprobs=old[r, : len(rows[i].ids)].tolist())
        return known

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            lr=self.settings.lr,
            weight_decay=self.settings.weight_decay,
            betas=(0.9, 0.98),
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["updates_done"] = self.updates_done

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.updates_done = int(checkpoint["updates_done"])


# What the sum of a metric is divided by; the RL tokens where nothing is said.
_COUNTS = {"ce_tokens": "ce_tokens", "expert_loss": "ce_tokens", "real_tokens": "real_tokens", "packing": "real_tokens"}


def _means(terms: Sequence[LossTerms]) -> dict[str, float]:
    """Means over the tokens each metric is about, over all micro-batches of an update in which it was measured."""
    merged: dict[str, float] = {}
    for key in sorted({key for t in terms for key in t.sums}):
        count = _COUNTS.get(key, "rl_tokens")
        measured = [t for t in terms if key in t.sums]
        total = sum(float(t.sums[key]) for t in measured)
        merged[key] = total if key == count else total / max(sum(float(t.sums[count]) for t in measured), 1.0)
    for key in sorted({key for t in terms for key in t.maxima}):
        merged[key] = max(float(t.maxima[key]) for t in terms if key in t.maxima)
    return merged
