"""Supervised training of either model of a run: the world model's fit, the policy's cloning, a base model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from imagination.learning.losses.auxiliary import cross_entropy_loss
from imagination.learning.losses.terms import token_logprobs
from imagination.learning.optimizers import MuonAdamW, drop_if_not_finite
from imagination.learning.sharding import Compute, gather, shard, unsharded
from imagination.learning.trainer import KeepCheckpoints, TimeLimit, WeightAverage, make_trainer, step_loader
from imagination.runs.lifecycle import resume_from
from imagination.runs.processes import dealt, from_first, gathered, missing_passes, rank, sum_gradients
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.settings import FitSettings, UserError
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import RowBatch
from policy.lm.forward import hidden_before, token_logits
from real_envs.seeding import derive_seed

Rows = slice | Sequence[int]
Record = Callable[[int, Mapping[str, float]], None]  # of a step and its metrics
BETAS = (0.9, 0.98)
LARGE = 30_000_000  # parameters; below, fp32 wins on CPUs, and a step is too short to measure well
_MOST_SKIPPED = 10
_MEASURED = 128  # tokens of the passes that are measured

# --- the objective ---


class StepLoss(Protocol):
    """The loss of one optimiser step, which may be computed a few rows at a time."""

    @property
    def width(self) -> int:
        """Tokens of a row in a forward pass, padding included."""
        ...

    @property
    def count(self) -> int:
        """How many tokens of all rows are trained."""
        ...

    def part(self, model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
        """The share of some rows in the loss, and how many of their trained tokens are the likeliest."""
        ...


class Objective(Protocol):
    def step(self, batch: RowBatch, seed: int) -> StepLoss:
        """The loss of a step on ``batch``; ``seed`` is its only source of randomness."""
        ...


@dataclass(frozen=True, slots=True)
class NextTokenStep:
    """Cross-entropy of the tokens with a ``ce_weight``, a weighted mean over all rows."""

    batch: RowBatch
    denominator: float

    @property
    def width(self) -> int:
        return self.batch.ids.shape[1]

    @property
    def count(self) -> int:
        return int((self.batch.ce_weight != 0).sum())

    def part(self, model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
        """See ``StepLoss``."""
        ids, present, weight = (x[rows] for x in (self.batch.ids, self.batch.attention_mask, self.batch.ce_weight))
        mask = weight != 0
        # rows of different tasks share little: on a GPU it takes longer to look for it than to compute it
        predictors = hidden_before(model, ids, present, mask, packed=ids.device.type == "cpu")
        logits = token_logits(model, predictors.states)
        logprobs = token_logprobs(logits, ids[mask], which=predictors.which)
        terms = cross_entropy_loss(logprobs[None], weight[mask][None], denominator=self.denominator)
        return terms.loss, (logits.detach().argmax(-1)[predictors.which] == ids[mask]).sum()


class NextToken:
    """What a causal model is trained by."""

    def step(self, batch: RowBatch, seed: int) -> NextTokenStep:
        return NextTokenStep(batch, float(batch.ce_weight.sum()))


# --- the steps ---


def schedule(step: int, steps: int, warmup: int, passed: float = 0.0) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine down to a tenth.

    Args:
        passed: share of the time that the training may take, where that ends it before the steps do.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = max(passed, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


class SupervisedModule(L.LightningModule):
    """Training on the tokens that the model should have made (``ce_weight``), by default as next tokens.

    Gradients that are not finite are not learned from and recorded as ``skipped_steps``; ten steps of them in a row are
    a ``UserError``.

    Args:
        settings: with an optimiser that is decided, see ``FitSettings.decided``.
        on_tokens: called after every pass with its number of tokens, and the share of its step that is done.
        passed: the share of the training's time that is over, see ``schedule``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: FitSettings,
        record: Record,
        seed: int = 0,
        objective: Objective | None = None,
        on_tokens: Callable[[int, float], None] = lambda tokens, share: None,
        passed: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # a step is several passes where it has many tokens
        self.model, self.settings, self.record, self.seed = model, settings, record, seed
        self.objective: Objective = objective or NextToken()
        self.on_tokens, self.passed = on_tokens, passed
        self.compute: Compute = unsharded
        self._skipped_in_a_row = 0

    def configure_model(self) -> None:
        """Sharded before, where it is."""

    def training_step(self, batch: RowBatch, _: int) -> None:
        # dropout of adapters, the same after a resume
        torch.manual_seed(derive_seed("dropout", self.seed, self.global_step))
        optimizer, scheduler, step = self.optimizers(), self.lr_schedulers(), self.global_step
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        optimizer.zero_grad()
        count = len(batch.ids)
        loss = self.objective.step(batch, derive_seed("objective", self.seed, step))
        size = max(1, min(self.settings.micro_tokens // loss.width, count))
        parts: list[tuple[Tensor, Tensor]] = []
        tokens = batch.attention_mask.sum(1).tolist()
        passes = [[rows[k : k + size] for k in range(0, len(rows), size)] for rows in dealt(tokens)]
        for number, rows in enumerate(own := passes[rank()], 1):
            parts.append(self._backward(loss, rows))
            self.on_tokens(sum(tokens[row] for row in rows), number / len(own))
        if self.compute is not unsharded:
            for _ in range(missing_passes(passes)):
                self._backward(loss, [tokens.index(min(tokens))], weight=0.0)
        sum_gradients(self.parameters())
        skipped = drop_if_not_finite(self.parameters())
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == _MOST_SKIPPED:
            raise UserError(
                f"the gradients of {_MOST_SKIPPED} steps in a row, up to step {step}, are not finite: lower the "
                "learning rate, or train in fp32"
            )
        optimizer.step()
        scheduler.step()
        if skipped:
            self.record(step, {"skipped_steps": 1})
        elif step % 10 == 0:
            total, right = (float(sum(column)) for column in zip(*gathered(parts), strict=True))
            metrics = {"loss": total, "token_accuracy": right / max(1, loss.count)}
            self.log_dict(metrics, prog_bar=True)
            self.record(step, metrics)

    def _backward(self, loss: StepLoss, rows: Sequence[int], weight: float = 1.0) -> tuple[Tensor, Tensor]:
        """Adds the gradient of some rows to that of their step; returns ``StepLoss.part``, detached."""
        share, right = self.compute(partial(loss.part, self.model, rows))
        self.manual_backward(weight * share)
        return share.detach(), right

    def configure_optimizers(self) -> Any:
        settings = self.settings
        optimizer: torch.optim.Optimizer
        if settings.optimizer == "muon":
            optimizer = MuonAdamW(self.model, settings.lr, settings.weight_decay, BETAS)
        else:
            trained = [p for p in self.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=settings.weight_decay, betas=BETAS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule(step, settings.steps, settings.warmup, self.passed())
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# --- a training, as a stage of a run ---


@dataclass(frozen=True, slots=True)
class SupervisedTrainer:
    """A supervised training of a run, which goes on from its saved training state if it was stopped.

    Attributes:
        settings: with an optimiser that is decided, see ``FitSettings.decided``.
        keep_every: steps between two checkpoints in ``models/kept/``; 0 keeps none.
        save_every: steps between two training states; 0 saves five.
    """

    run: RunFolder
    stage: str
    settings: FitSettings
    seed: int
    objective: Objective | None = None
    keep_every: int = 0
    save_every: int = 0

    def train(self, model: Any, tokenizer: PreTrainedTokenizerBase, batches: Callable[[int], RowBatch]) -> int:
        """Trains ``model`` in place on the batch of each step; how many are done, those before a stop included."""

        def move(tokens: int, share: float) -> None:
            bar.count(tokens)
            bar.within(share)

        def done() -> int:
            return module.global_step

        def save(folder: Path) -> None:
            gather(trained, model)
            save_checkpoint(model, tokenizer, folder)

        run, stage, settings, steps = self.run, self.stage, self.settings, self.settings.steps
        state, resumed = resume_from(run, stage)
        run.forget(stage, resumed)
        clock = TimeLimit(settings.minutes)
        bar = Bar(stage.replace("_", " "), steps, "tokens")
        record = partial(run.record, stage)
        precision = from_first(chosen_precision)(
            settings.precision, model, batches(min(resumed, steps - 1)), run, stage
        )
        trained, compute = shard(run, model)
        module = SupervisedModule(
            trained, settings, record, self.seed, self.objective, on_tokens=move, passed=clock.passed
        )
        module.compute = compute
        average = WeightAverage(trained, settings.average)
        keep = KeepCheckpoints(run.model("kept"), stage, self.keep_every, steps, done, save)
        save_every = self.save_every or max(1, steps // 5)
        trainer = make_trainer(run, stage, bar, done, save_every, precision, [average, clock, keep])
        stream = step_loader(steps, done, batches, clock.over)
        trainer.fit(module, stream, ckpt_path=state, weights_only=True)
        gather(trained, model)
        return done()


def chosen_precision(
    wanted: Literal["auto", "bf16", "fp32"], model: Any, batch: RowBatch, run: RunFolder, stage: str
) -> Literal["bf16", "fp32"]:
    """What ``auto`` means here: bf16 on GPUs; on CPUs fp32 for small models, and the faster of both for large ones, as
    only some CPUs have matrix units for bf16.

    What was measured is printed and kept in the run, so that a stopped stage goes on in the same precision.
    """
    if wanted != "auto":
        return wanted
    if torch.cuda.is_available():
        return "bf16"
    if sum(p.numel() for p in model.parameters()) < LARGE:
        return "fp32"
    known: dict[str, Literal["bf16", "fp32"]] = run.summary.get("precision", {})
    if stage not in known:
        work = _passes(model, batch)
        both = [work(False), work(True), work(False), work(True)]
        seconds = {"fp32": min(both[::2]), "bf16": min(both[1::2])}
        known = {**known, stage: "bf16" if seconds["bf16"] < seconds["fp32"] else "fp32"}
        measured = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        print(
            f"precision {known[stage]}: {_MEASURED} tokens take {measured} (fit.precision, clone.precision)", flush=True
        )
        run.update({"precision": known})
    return known[stage]


def _passes(model: Any, batch: RowBatch) -> Callable[[bool], float]:
    """Seconds of one forward and backward pass of a few tokens, in bf16 or not. The gradients are thrown away."""
    row = int((batch.ce_weight != 0).any(1).nonzero()[0])
    last = int((batch.ce_weight[row] != 0).nonzero()[-1]) + 1
    cut = slice(max(0, last - _MEASURED), last)
    ids, weight = batch.ids[row : row + 1, cut], batch.ce_weight[row : row + 1, cut].clone()
    weight[:, 0] = 0.0  # nothing stands before it that could predict it
    mask = weight != 0

    def work(half: bool) -> float:
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            predictors = hidden_before(model, ids, torch.ones_like(ids, dtype=torch.bool), mask)
            logprobs = token_logprobs(token_logits(model, predictors.states), ids[mask], which=predictors.which)
            terms = cross_entropy_loss(logprobs[None], weight[mask][None], denominator=float(weight.sum()))
        terms.loss.backward()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - begin

    return work
