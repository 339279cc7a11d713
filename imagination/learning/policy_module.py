"""The LightningModule of policy updates: it wires model, algorithm and optimiser.

It holds nothing that an algorithm should know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch

from imagination.learning.algorithms import build_algorithm
from imagination.learning.credit import ModelOutputs, assign_credit, played, trained
from imagination.learning.critic import critic_values
from imagination.learning.losses import EntropyHistory, LossTerms
from imagination.learning.metrics_by_source import means
from imagination.learning.micro_batch import Losses, Step
from imagination.learning.progress_attribution import Progress
from imagination.learning.reference_policy import logprobs_under, reference_kl
from imagination.learning.supervised import Record
from imagination.rollout.schedules import realised_shares
from imagination.settings import AlgorithmSettings, TrainSettings
from policy.lm.batch import Row, collate, padded
from policy.lm.forward import micro_batches
from policy.value import ValueHead
from real_envs.streams import stream_seed

# Exact engines whose log-probs are within 1 % of the trainer's need no correction: rounding, far inside any clip.
_EXACT = 1.01
_MOST_HALVINGS = 6


@dataclass(slots=True)
class Update:
    """The experience of one policy update: rows to learn from and what the rollouts measured.

    Attributes:
        judged: rows have their advantages; others are judged by the module's algorithm.
        exact: log-probs came from an engine that computes what the trainer does, up to the rounding of fp32, so a first
            minibatch tells whether that is so. Those of any other engine can be off at any token, so the trainer
            computes its own of all rows before the first step.
    """

    index: int
    rows: list[Row]
    metrics: dict[str, float] = field(default_factory=dict)
    has_credit: bool = False
    exact: bool = False


class PolicyModule(L.LightningModule):
    """Any algorithm of the registry, with imitation of expert rows in the same optimiser step.

    Args:
        model: the policy.
        algorithm, train: settings.
        temperature: what the rollouts were sampled at; ratios need the same.
        seed: of the order of rows within an update.
        reference: a frozen copy of the starting policy, needed where ``kl_coef > 0``.
        max_tokens: most agent tokens of an episode, for algorithms that divide by it or punish length.
        value: the critic to begin with, where the algorithm has one; by default all its values are 0.

    Raises:
        UserError: the settings contradict each other.
        ValueError: there is a KL and no reference.
    """

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmSettings,
        train: TrainSettings,
        record: Record,
        seed: int = 0,
        reference: Any = None,
        max_tokens: int | None = None,
        *,
        temperature: float = 1.0,
        value: ValueHead | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # several minibatches an update, several micro-batches a minibatch
        self.algorithm = build_algorithm(algorithm, max_tokens)
        if self.algorithm.kl.kl_coef and reference is None:
            raise ValueError("kl_coef needs the reference: a frozen copy of the starting policy")
        self.model = model
        critic = self.algorithm.critic is not None
        self.value = (value or ValueHead(model.config.hidden_size)) if critic else None
        self.algorithm_settings = algorithm
        self.settings = train
        self.record, self.temperature, self.seed = record, temperature, seed
        self._reference = [reference]  # in a list: no submodule, so neither trained nor saved
        self.entropies = EntropyHistory()
        self.progress = Progress(model, algorithm.progress, seed) if algorithm.progress.enabled else None
        self.updates_done = 0

    def done(self) -> int:
        """Updates so far, those before a resume included."""
        return self.updates_done

    def on_fit_start(self) -> None:
        if self._reference[0] is not None:
            self._reference[0].to(self.device)

    def transfer_batch_to_device(self, batch: Update, device: torch.device, dataloader_idx: int) -> Update:
        """Rows are lists until they are collated; Lightning would look at each number for a tensor to move."""
        return batch

    def training_step(self, update: Update, _: int) -> None:
        self.model.eval()  # rollouts are sampled without dropout; with it, ratios of an unchanged policy are not 1
        settings = self.settings
        for row in update.rows:
            if any(row.rl_weight) and row.temperature != self.temperature:
                raise ValueError(
                    f"an episode of update {update.index} was sampled at temperature {row.temperature:g}, and the "
                    f"trainer's ratios are of temperature {self.temperature:g}: they would be biased"
                )
        optimizer = self.optimizers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        if settings.lr_end < 1:
            past = update.index / max(1, settings.updates - 1)
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * (1 - (1 - settings.lr_end) * past)
        judged_rows, told = (update.rows, {}) if update.has_credit else self._judge(update.rows)
        rows = trained(judged_rows)
        before = self._weights() if settings.max_kl else []
        rng = torch.Generator().manual_seed(stream_seed("minibatches", self.seed, update.index))
        collected: list[LossTerms] = []
        norms: list[float] = []
        size = math.ceil(len(rows) / settings.minibatches)
        # the only step of an update reads all rows under the policy that acted, and needs no memory of it
        remembered = not update.exact and (settings.epochs > 1 or size < len(rows))
        if remembered:
            rows = self._with_old_logprobs(rows, range(len(rows)))
        for _epoch in range(settings.epochs if rows else 0):
            order = torch.randperm(len(rows), generator=rng).tolist()
            for start in range(0, len(rows), size):
                optimizer.zero_grad()
                unchanged = not norms
                terms = self._minibatch([rows[i] for i in order[start : start + size]], unchanged, remembered)
                collected.extend(terms)
                if unchanged and not remembered and self._differs_from_engine(terms):
                    rows = self._with_old_logprobs(rows, range(len(rows)) if settings.epochs > 1 else order[size:])
                norm = torch.nn.utils.clip_grad_norm_(self.parameters(), settings.grad_clip)
                norms.append(float(norm))
                optimizer.step()
        if before and norms:
            told |= self._within(settings.max_kl, rows, before)
        self.updates_done = update.index + 1
        found = means(collected)
        if "entropy" in found:
            self.entropies = self.entropies.add(found["entropy"])
        metrics = {**update.metrics, **told, **realised_shares(rows), **found}
        if norms:
            metrics["grad_norm"] = sum(norms) / len(norms)
        self.log_dict({k: v for k, v in metrics.items() if "success" in k or k == "entropy"}, prog_bar=True)
        self.record(update.index, metrics)

    def _judge(self, rows: Sequence[Row]) -> tuple[list[Row], dict[str, float]]:
        """Advantages of the whole update, with what critic, reference and progress estimator say of it before any step.

        Returns:
            the rows, and what is to be logged.
        """
        mine, limit = [rows[i] for i in played(rows)], self.settings.micro_tokens
        said, kl, told = ModelOutputs(), self.algorithm.kl, dict[str, float]()
        if self.value is not None:
            said = ModelOutputs(*critic_values(mine, self.model, self.value, limit))
        if kl.kl_coef and kl.kl_in == "reward":
            away = reference_kl(mine, self._reference[0], kl.kl_estimator, self.temperature, limit)
            said = replace(said, kl=away)
        if self.progress is not None and mine:
            contributed, told = self.progress.turn_rewards(mine, limit)
            said = replace(said, turn_rewards=contributed)
        found = assign_credit(
            rows,
            self.algorithm,
            said,
            loss_mask=self.algorithm_settings.loss_mask,
            advantage_mask=self.algorithm_settings.advantage_mask,
            process_coef=self.settings.process_coef,
        )
        return found, told

    def _weights(self) -> list[torch.Tensor]:
        """A copy of the trained weights of the policy."""
        return [p.detach().clone() for p in self.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def _within(self, most: float, rows: Sequence[Row], before: Sequence[torch.Tensor]) -> dict[str, float]:
        """Goes back half of the way, and again, until the policy is at most ``most`` nats a token from the one that
        acted: the backtracking line search of TRPO (Schulman et al. 2015, arXiv 1502.05477, appendix C).

        Few episodes with a signal make a step as long as many do, by a gradient that is mostly noise; one such
        step has unlearned everything.
        """
        acted = [replace(row, behavior_logprobs=row.old_logprobs or row.behavior_logprobs) for row in rows]
        acted = [row for row in acted if any(row.rl_weight)]
        tokens = sum(sum(w != 0 for w in row.rl_weight) for row in acted)
        halved = 0
        while tokens:
            kl = float(reference_kl(acted, self.model, "k3", self.temperature, self.settings.micro_tokens).sum())
            if kl / tokens <= most or halved == _MOST_HALVINGS:
                return {"update_kl": kl / tokens, "halved": float(halved)}
            halved += 1
            for p, old in zip((p for p in self.model.parameters() if p.requires_grad), before, strict=True):
                p.copy_((p + old) / 2)
        return {}

    def _minibatch(self, rows: Sequence[Row], unchanged: bool, remembered: bool) -> list[LossTerms]:
        """Backward through micro-batches. Each component divides by its own count over the whole minibatch."""
        width = max(len(row.ids) for row in rows)
        weights, denominator = self.algorithm.weigh(padded([r.rl_weight for r in rows], 0.0, torch.float32, width) != 0)
        step = Step(
            rl_tokens=sum(sum(w != 0 for w in row.rl_weight) for row in rows),
            denominator=denominator,
            value_tokens=sum(sum(row.learned) for row in rows),
            ce_tokens=sum(sum(w != 0 for w in row.ce_weight) for row in rows),
            replay_tokens=sum(sum(w != 0 for w in row.replay_weight) for row in rows),
            unchanged=unchanged,
            remembered=remembered,
            entropy_history=self.entropies.mean,
        )
        losses = Losses(
            self.model,
            self.value,
            self._reference[0],
            self.algorithm,
            self.algorithm_settings,
            self.settings,
            self.temperature,
        )
        found: list[LossTerms] = []
        for micro in micro_batches(self.model, [row.ids for row in rows], self.settings.micro_tokens):
            batch = collate([rows[i] for i in micro], pad=0)
            # the algorithm's weight times the row's own, which is less than 1 where a dream is doubted
            batch.rl_weight = batch.rl_weight * weights[micro, : batch.rl_weight.shape[1]]
            found.append(losses.backward(batch.to(self.device), step, self.manual_backward))
        return found

    def _differs_from_engine(self, terms: Sequence[LossTerms]) -> bool:
        """Whether the log-probs that came with the tokens may be too far from the trainer's to stand for them."""
        if not self.algorithm_settings.loss_mask:
            return True  # what the world said came without any
        found = [float(t.maxima["mismatch_ratio_max"]) for t in terms if "mismatch_ratio_max" in t.maxima]
        unknown = math.inf  # a first minibatch of experts alone
        return self.algorithm_settings.tis_cap > 0 and max(found, default=unknown) > _EXACT

    @torch.no_grad()
    def _with_old_logprobs(self, rows: Sequence[Row], wanted: Sequence[int]) -> list[Row]:
        """The rows, the wanted ones with the trainer's log-probs of the policy as it is now."""
        known = list(rows)
        mine = [i for i in wanted if any(rows[i].rl_weight)]
        for micro in micro_batches(self.model, [rows[i].ids for i in mine], self.settings.micro_tokens):
            picked = [mine[i] for i in micro]
            batch = collate([rows[i] for i in picked], pad=0).to(self.device)
            mask = batch.rl_weight != 0
            old = torch.full_like(batch.old_logprobs, math.nan)
            old[mask] = logprobs_under(self.model, batch, mask, self.temperature)
            for r, i in enumerate(picked):
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
        checkpoint["entropies"] = (self.entropies.total, self.entropies.updates)
        if self.progress is not None:
            checkpoint["progress"] = self.progress.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.updates_done = int(checkpoint["updates_done"])
        self.entropies = EntropyHistory(*checkpoint["entropies"])
        if self.progress is not None:
            self.progress.load_state_dict(checkpoint["progress"])
