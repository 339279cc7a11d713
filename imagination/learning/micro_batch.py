"""The losses of one micro-batch: everything that an optimiser step adds up, and what is logged of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from imagination.learning.algorithms import Algorithm, total
from imagination.learning.losses.auxiliary import KL, cross_entropy_loss, expert_policy_loss
from imagination.learning.losses.policy import (
    engine_mismatch,
    replay_loss,
    row_segments,
    truncated_importance,
    turn_segments,
)
from imagination.learning.losses.terms import LossInputs, LossTerms, token_entropy, token_logprobs
from imagination.learning.metrics import by_source, logprob_grad_by_source, of_source
from imagination.learning.sharding import Compute, unsharded
from imagination.settings import TrainSettings
from imagination.settings.algorithm_parts import Estimator
from policy.lm.batch import SOURCES, RowBatch
from policy.lm.forward import Hidden, ValueHead, hidden_before, split, token_logits
from real_envs.trajectory import Source


@dataclass(frozen=True, slots=True)
class Step:
    """What the micro-batches of an optimiser step share; counts are of all its rows, however they are split.

    Attributes:
        rl_tokens: trained by RL.
        denominator: of their losses, by the algorithm's aggregation.
        value_tokens: with a target of the critic.
        ce_tokens: of experts.
        replay_tokens: of the policy's own earlier episodes.
        observed_tokens: of the real world, to predict.
        temperature: at which the rollouts were sampled; ratios need the same.
        unchanged: no optimiser step was made since the rows were sampled.
        remembered: all rows have the trainer's log-probs of the policy before any step.
        entropy_history: mean entropy of earlier updates; ``None`` before there are any.
    """

    rl_tokens: int
    denominator: float
    value_tokens: int
    ce_tokens: int
    replay_tokens: int
    observed_tokens: int
    temperature: float
    unchanged: bool
    remembered: bool
    entropy_history: float | None


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of micro-batches under one model and one choice of algorithm.

    Attributes:
        value: the critic's head; ``None`` without a critic.
        reference: the frozen starting policy; ``None`` without a KL.
    """

    model: Any
    value: ValueHead | None
    reference: Any
    algorithm: Algorithm
    train: TrainSettings

    def backward(
        self, batch: RowBatch, step: Step, backward: Callable[[Tensor], None], compute: Compute = unsharded
    ) -> LossTerms:
        """Adds the gradient of a micro-batch to that of its optimiser step; what it returns has none.

        Args:
            batch: rows whose ``rl_weight`` is the algorithm's weight times their own.
            backward: what a trainer calls instead of ``loss.backward()``.
            compute: what the forward pass is computed by, see ``sharding``.
        """
        loss, source, pulled, terms = compute(partial(self._forward, batch, step))
        for x in pulled:
            x.retain_grad()
        backward(loss)
        return replace(terms, sums=terms.sums | logprob_grad_by_source(source, pulled))

    def _forward(self, batch: RowBatch, step: Step) -> tuple[Tensor, Tensor, list[Tensor], LossTerms]:
        """The loss, what is logged of it, and whose log-probs ``[n]`` a gradient reaches: by source, and themselves."""
        mask = batch.trained_mask | batch.observed if step.observed_tokens else batch.trained_mask
        predictors = hidden_before(self.model, batch.ids, batch.attention_mask, mask)
        logits = token_logits(self.model, predictors.states)  # [m, vocab], what predicts trained tokens, each once
        ids, ce = batch.ids[mask], batch.ce_weight[mask]  # [n]
        source = batch.source[:, None].expand_as(mask)[mask]
        loss = predictors.states.new_zeros((), dtype=torch.float32)
        real = batch.attention_mask.sum().float()
        sums = {"real_tokens": real, "packing": torch.full_like(real, predictors.computed)}
        maxima: dict[str, Tensor] = {}
        logprobs = token_logprobs(logits, ids, step.temperature, which=predictors.which)
        pulled = [logprobs]
        rewarded = self.algorithm.entropy.entropy_coef > 0
        entropy = token_entropy(logits if rewarded else logits.detach(), step.temperature)[predictors.which]
        if step.rl_tokens:
            inputs, sums_of_engine, maxima = self._inputs(batch, mask, predictors, logprobs, entropy, step)
            terms = self.algorithm.losses(
                inputs,
                step.denominator,
                critic_denominator=step.value_tokens or None,
                entropy_history=step.entropy_history,
            )
            loss = loss + total(terms)
            sums |= sums_of_engine | self._logged_sums(terms, inputs, step)
            sums |= by_source(source, self.algorithm, inputs, terms["policy"], step.denominator, step.rl_tokens)
            maxima |= {f"{name}_max": value for name, value in terms["policy"].maxima.items()}
        entropy = entropy.detach()
        if step.replay_tokens:
            recorded, gains, again = (x[mask] for x in (batch.behavior_logprobs, batch.advantages, batch.replay_weight))
            settings, n = self.train.self_imitation, step.replay_tokens
            inputs = LossInputs(logprobs, recorded, gains, again)
            replayed = replay_loss(inputs, settings.clip_high, n)
            loss = loss + settings.coef * replayed.loss
            read = inputs.active
            sums |= of_source(SOURCES.index(Source.REPLAY), replayed, gains[read], entropy[read], n)
        if (step.ce_tokens or step.observed_tokens) and step.temperature != 1.0:
            logprobs = token_logprobs(logits, ids, which=predictors.which)
            pulled.append(logprobs)
        if step.observed_tokens:  # ECHO (Shrivastava et al. 2026, arXiv 2605.24517): a mean over tokens of observations
            predicted = cross_entropy_loss(logprobs, batch.observed[mask].float(), denominator=step.observed_tokens)
            loss = loss + self.train.observation_coef * predicted.loss
            sums["observed_tokens"] = predicted.tokens
            sums["observation_loss"] = predicted.loss.detach() * step.observed_tokens
        if step.ce_tokens:
            expert = self._imitation(logprobs, batch.advantages[mask], ce, step.ce_tokens)
            loss = loss + self.train.expert_coef * expert.loss
            sums |= {"ce_tokens": expert.tokens, "expert_loss": expert.loss.detach() * step.ce_tokens}
            sums["expert_entropy"] = (entropy * (ce != 0)).sum()
        return loss, source, pulled, LossTerms(loss.detach(), mask.sum().float(), sums, maxima)

    def _imitation(self, logprobs: Tensor, advantages: Tensor, weight: Tensor, denominator: int) -> LossTerms:
        """Experts have no log-probs of their own, so there is no ratio: cross-entropy, or LUFFY's off-policy form."""
        if self.train.expert_form != "cross_entropy":
            if self.train.expert_form == "luffy_constant":
                advantages = torch.ones_like(logprobs)
            return expert_policy_loss(logprobs, advantages, weight, denominator=denominator)
        return cross_entropy_loss(logprobs, weight, denominator=denominator)

    def _logged_sums(self, terms: Mapping[str, LossTerms], inputs: LossInputs, step: Step) -> dict[str, Tensor]:
        """What is logged of the terms, as sums over tokens."""
        policy = terms["policy"]
        assert inputs.entropy is not None
        sums = {"rl_tokens": policy.tokens, "policy_loss": policy.loss.detach() * step.rl_tokens, **policy.sums}
        sums["entropy"] = (inputs.entropy.detach() * inputs.active).sum()
        if "kl" in terms:
            sums["kl_reference"] = terms["kl"].sums["kl"]
        if "entropy" in terms:
            sums |= {name: value for name, value in terms["entropy"].sums.items() if name != "entropy"}
        if self.algorithm.critic is not None:
            unscaled = terms["critic"].loss.detach() / self.algorithm.critic.value_coef
            sums |= {"value_tokens": terms["critic"].tokens, "value_loss": unscaled * step.value_tokens}
        return sums

    def _inputs(
        self, batch: RowBatch, mask: Tensor, predictors: Hidden, logprobs: Tensor, entropy: Tensor, step: Step
    ) -> tuple[LossInputs, dict[str, Tensor], dict[str, Tensor]]:
        """What the algorithm reads of the masked tokens, and, as sums and maxima, how far engine and trainer differ."""
        engine, rl, remembered = (x[mask] for x in (batch.behavior_logprobs, batch.rl_weight, batch.old_logprobs))
        own = logprobs.detach() if step.unchanged else torch.where(remembered.isnan(), engine, remembered)
        if not self.algorithm.loss_mask:  # what the world said was not sampled: no engine has log-probs of it
            engine = torch.where(engine.isnan(), own, engine)
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        if step.unchanged or step.remembered:
            sums["mismatch_k3"], maxima["mismatch_ratio_max"] = engine_mismatch(own, engine, rl)
        old, importance = engine, None
        if self.algorithm.tis_cap:
            old = own
            importance = truncated_importance(old, engine, rl, self.algorithm.tis_cap)
            sums["tis_weight"] = (importance * (rl != 0)).sum()
        kl, critic = self.algorithm.kl, self.value is not None
        refer = kl.kl_coef > 0 and kl.kl_in == "loss"
        inputs = LossInputs(
            logprobs=logprobs,
            behavior_logprobs=old,
            advantages=batch.advantages[mask],
            weight=rl,
            sequences=row_segments(mask)[mask],
            turns=turn_segments(batch.turns)[mask],
            importance=importance,
            ref_logprobs=logprobs_under(self.reference, batch, mask, step.temperature) if refer else None,
            entropy=entropy,
            values=self.value(predictors.states)[predictors.which] if self.value is not None else None,
            old_values=batch.values[mask] if critic else None,
            returns=batch.returns[mask] if critic else None,
            learned=batch.learned[mask] if critic else None,
        )
        return inputs, sums, maxima


@torch.no_grad()
def logprobs_under(model: Any, batch: RowBatch, mask: Tensor, temperature: float) -> Tensor:
    """``[n]``, nats, of the masked tokens under ``model`` at the sampling temperature."""
    return masked_logprobs(model, batch, mask, temperature)


def masked_logprobs(model: Any, batch: RowBatch, mask: Tensor, temperature: float) -> Tensor:
    """``logprobs_under`` with a gradient."""
    predictors = hidden_before(model, batch.ids, batch.attention_mask, mask)
    return token_logprobs(token_logits(model, predictors.states), batch.ids[mask], temperature, which=predictors.which)


@torch.no_grad()
def reference_kl(batch: RowBatch, reference: Any, estimator: Estimator, temperature: float, max_tokens: int) -> Tensor:
    """An estimate of KL(policy || reference) for each token that RL trains, 0.0 for all others: ``[batch, time]``.

    The policy is the one that acted, by the log-probs that came with its tokens. ``max_tokens`` bounds a forward pass.
    """
    estimates = torch.zeros_like(batch.behavior_logprobs)
    for picked, part in split(reference, batch, max_tokens):
        mask = part.rl_weight != 0
        kl = torch.zeros_like(part.behavior_logprobs)
        kl[mask] = KL[estimator](part.behavior_logprobs[mask], logprobs_under(reference, part, mask, temperature))
        estimates[picked, : kl.shape[1]] = kl.cpu()
    return estimates
