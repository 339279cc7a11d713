"""LightningModules: they wire models, pure losses and optimisers, and hold nothing that a loss should know."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor

from imagination.advantage import masked_gae
from imagination.losses import (
    LossTerms,
    cross_entropy_loss,
    kl_k3,
    ppo_clip_loss,
    token_entropy,
    token_logprobs,
    value_loss,
)
from imagination.settings import AlgorithmSettings, FitSettings, TrainSettings
from policy.lm.batch import Row, TokenBatch, by_length, collate
from policy.lm.forward import decoder, hidden_before, token_logits
from policy.value import ValueHead

Record = Callable[[int, Mapping[str, float]], None]


def schedule(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


class SupervisedModule(L.LightningModule):
    """Next-token training of either model on the tokens it should have made (``ce_weight``)."""

    def __init__(self, model: torch.nn.Module, settings: FitSettings, record: Record, seed: int = 0) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        self.record = record
        self.seed = seed

    def training_step(self, batch: TokenBatch, _: int) -> Tensor:
        torch.manual_seed(self.seed * 1_000_003 + self.global_step)  # dropout of adapters, the same after a resume
        mask = batch.ce_weight != 0
        logits = token_logits(self.model, hidden_before(self.model, batch.input_ids, batch.attention_mask, mask))
        weight = batch.ce_weight[mask]
        logprobs = token_logprobs(logits, batch.input_ids[mask])
        terms = cross_entropy_loss(logprobs[None], weight[None], denominator=float(weight.sum()))
        if self.global_step % 10 == 0:
            right = (logits.argmax(-1) == batch.input_ids[mask]).float()
            metrics = {"loss": terms.loss.item(), "token_accuracy": right.mean().item()}
            self.log_dict(metrics, prog_bar=True)
            self.record(self.global_step, metrics)
        return terms.loss

    def configure_optimizers(self) -> Any:
        settings = self.settings
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            betas=(0.9, 0.98),
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule(step, settings.steps, settings.warmup)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


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

    def training_step(self, update: Update, _: int) -> None:
        self.model.eval()  # rollouts are sampled without dropout; with it, ratios of an unchanged policy are not 1
        settings = self.settings
        optimizer = self.optimizers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        prepared = self._with_critic(update.rows) if self.value is not None else [(r, None) for r in update.rows]
        order = torch.Generator().manual_seed(self.seed * 1_000_003 + update.index)
        collected: list[LossTerms] = []
        norms: list[float] = []
        for _epoch in range(settings.epochs if prepared else 0):
            shuffled = [prepared[i] for i in torch.randperm(len(prepared), generator=order).tolist()]
            size = math.ceil(len(shuffled) / settings.minibatches)
            for start in range(0, len(shuffled), size):
                optimizer.zero_grad()
                for terms in self._minibatch(shuffled[start : start + size]):
                    collected.append(terms)
                norm = torch.nn.utils.clip_grad_norm_(self.parameters(), settings.grad_clip)
                norms.append(float(norm))
                optimizer.step()
        self.updates_done = update.index + 1
        metrics = {**update.metrics, **_means(collected)}
        if norms:
            metrics["grad_norm"] = sum(norms) / len(norms)
        self.log_dict({k: v for k, v in metrics.items() if "success" in k or k == "entropy"}, prog_bar=True)
        self.record(update.index, metrics)

    def _minibatch(self, rows: Sequence[tuple[Row, _Critique | None]]) -> list[LossTerms]:
        """Backward through micro-batches. Each component divides by its own count over the whole minibatch."""
        rl_tokens = sum(sum(w != 0 for w in row.rl_weight) for row, _ in rows)
        ce_tokens = sum(sum(w != 0 for w in row.ce_weight) for row, _ in rows)
        critiques = {id(row): critique for row, critique in rows}
        found: list[LossTerms] = []
        for micro in by_length([row for row, _ in rows], self.settings.micro_tokens):
            batch = collate(micro, pad=0)
            for i, row in enumerate(micro):
                if (critique := critiques[id(row)]) is not None:
                    critique.write(batch, i)
            terms = self._loss(_to(batch, self.device), rl_tokens, ce_tokens)
            self.manual_backward(terms.loss)
            found.append(terms)
        return found

    def _loss(self, batch: TokenBatch, rl_tokens: int, ce_tokens: int) -> LossTerms:
        mask = batch.trained_mask
        hidden = hidden_before(self.model, batch.input_ids, batch.attention_mask, mask)
        logits = token_logits(self.model, hidden)[None]  # [1, n, vocab] of the trained tokens only
        ids, rl, ce = (x[mask][None] for x in (batch.input_ids, batch.rl_weight, batch.ce_weight))
        loss = hidden.new_zeros((), dtype=torch.float32)
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        if rl_tokens:
            logprobs = token_logprobs(logits, ids, self.temperature)
            entropy = token_entropy(logits.detach(), self.temperature)
            ppo = ppo_clip_loss(
                logprobs,
                batch.behavior_logprobs[mask][None],
                batch.advantages[mask][None],
                rl,
                denominator=rl_tokens,
                eps_low=self.algorithm.clip_low,
                eps_high=self.algorithm.clip_high,
            )
            loss = loss + ppo.loss
            sums |= {"rl_tokens": ppo.tokens, "policy_loss": ppo.loss.detach() * rl_tokens, **ppo.sums}
            sums["entropy"] = (entropy * (rl != 0)).sum()
            maxima |= {"ratio": ppo.maxima["ratio"]}
            if self.algorithm.kl_coef > 0:
                per_token = kl_k3(logprobs, self._reference_logprobs(batch, mask), rl != 0)
                loss = loss + self.algorithm.kl_coef * per_token.sum() / rl_tokens
                sums["kl_reference"] = per_token.detach().sum()
            if self.value is not None:
                old, returns = batch.values[mask][None], batch.returns[mask][None]
                terms = value_loss(
                    self.value(hidden)[None],
                    old,
                    returns,
                    rl != 0,
                    denominator=rl_tokens,
                    clip=self.algorithm.value_clip,
                )
                loss = loss + self.algorithm.value_coef * terms.loss
                sums["value_loss"] = terms.loss.detach() * rl_tokens
        if ce_tokens:
            imitation = cross_entropy_loss(token_logprobs(logits, ids), ce, denominator=ce_tokens)
            loss = loss + self.settings.expert_coef * imitation.loss
            sums |= {"ce_tokens": imitation.tokens, "expert_loss": imitation.loss.detach() * ce_tokens}
        return LossTerms(loss=loss, tokens=mask.sum().float(), sums=sums, maxima=maxima)

    @torch.no_grad()
    def _reference_logprobs(self, batch: TokenBatch, mask: Tensor) -> Tensor:
        reference = self._reference[0]
        logits = token_logits(reference, hidden_before(reference, batch.input_ids, batch.attention_mask, mask))
        return token_logprobs(logits, batch.input_ids[mask], self.temperature)[None]

    @torch.no_grad()
    def _with_critic(self, rows: Sequence[Row]) -> list[tuple[Row, _Critique | None]]:
        """Values before the update, then GAE; advantages are whitened over all trained tokens of the update."""
        assert self.value is not None
        found: list[tuple[Row, _Critique | None]] = []
        played = [row for row in rows if any(row.rl_weight)]
        for micro in by_length(played, self.settings.micro_tokens):
            batch = _to(collate(micro, pad=0), self.device)
            hidden = decoder(self.model)(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            after = self.value(hidden.flatten(0, 1)).view(batch.input_ids.shape)  # value of the state after each token
            before = torch.cat([after.new_zeros(len(micro), 1), after[:, :-1]], 1)
            last = batch.attention_mask.sum(1, keepdim=True) - 1
            bootstrap = torch.where(batch.truncated, after.gather(1, last)[:, 0], 0.0)
            mask = batch.rl_weight != 0
            advantages, returns = masked_gae(
                batch.rewards, before, mask, self.algorithm.gamma, self.algorithm.lam, bootstrap
            )
            for i, row in enumerate(micro):
                n = len(row.ids)
                found.append((row, _Critique(before[i, :n].cpu(), returns[i, :n].cpu(), advantages[i, :n].cpu())))
        weights = [torch.tensor(row.rl_weight) != 0 for row, _ in found]
        critiques = [critique for _, critique in found if critique is not None]
        if critiques:
            # in fp64, or the rounding of equal advantages, divided by 1e-8, would look like an advantage
            flat = torch.cat([c.advantages[w] for c, w in zip(critiques, weights, strict=True)]).double()
            mean, std = flat.mean(), flat.std(correction=min(1, len(flat) - 1))
            for critique in critiques:
                critique.advantages = ((critique.advantages.double() - mean) / (std + 1e-8)).float()
        return [*found, *((row, None) for row in rows if not any(row.rl_weight))]

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


@dataclass(slots=True)
class _Critique:
    """What the critic said of one row before the update; one entry per token."""

    values: Tensor
    returns: Tensor
    advantages: Tensor

    def write(self, batch: TokenBatch, row: int) -> None:
        n = len(self.values)
        batch.values[row, :n], batch.returns[row, :n] = self.values, self.returns
        batch.advantages[row, :n] = self.advantages


def _to(batch: TokenBatch, device: torch.device) -> TokenBatch:
    tensors = {k: getattr(batch, k).to(device) for k in TokenBatch.__dataclass_fields__ if k != "source"}
    return TokenBatch(**tensors, source=batch.source)


def _means(terms: Sequence[LossTerms]) -> dict[str, float]:
    """Means over the tokens each metric is about, over all micro-batches of an update."""
    merged: dict[str, float] = {}
    with_rl = [t for t in terms if "rl_tokens" in t.sums]
    for key in sorted({key for t in terms for key in t.sums}):
        count = "ce_tokens" if key in ("ce_tokens", "expert_loss") else "rl_tokens"
        n = sum(float(t.sums[count]) for t in terms if count in t.sums)
        total = sum(float(t.sums[key]) for t in terms if key in t.sums)
        merged[key] = total if key == count else total / max(n, 1.0)
    if with_rl:
        merged["ratio_max"] = max(float(t.maxima["ratio"]) for t in with_rl)
    return merged


__all__ = ["PolicyModule", "Record", "SupervisedModule", "Update", "schedule"]
