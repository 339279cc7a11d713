"""Supervised training of either model: the world model's fit and the policy's cloning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from imagination.learning.averaging import Averaging
from imagination.learning.objectives import NextToken, Objective, StepLoss
from imagination.learning.optimizers import MuonAdamW
from imagination.settings import FitSettings
from policy.lm.batch import TokenBatch
from real_envs.streams import stream_seed

Record = Callable[[int, Mapping[str, float]], None]
BETAS = (0.9, 0.98)


def schedule(step: int, steps: int, warmup: int, passed: float = 0.0) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine down to a tenth.

    Args:
        passed: share of the time that the training may take, where that ends it before the steps do.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = max(passed, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


class SupervisedModule(Averaging, L.LightningModule):
    """Training of either model on the tokens it should have made (``ce_weight``), by default to tell the next one.

    ``from_scratch`` says that the weights start at random; it decides what ``optimizer="auto"`` means. At the end the
    model has the average of its weights where ``settings.average`` asks for one. ``on_tokens`` is told after every
    forward and backward pass how many tokens it was of, and what share of its step is done; ``passed`` tells what share
    of its time is over, see ``schedule``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: FitSettings,
        record: Record,
        seed: int = 0,
        *,
        from_scratch: bool = False,
        objective: Objective | None = None,
        on_tokens: Callable[[int, float], None] = lambda tokens, share: None,
        passed: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # a step is several passes where it has many tokens
        self.on_tokens, self.passed = on_tokens, passed
        self.objective: Objective = objective or NextToken()
        self.settings = settings
        self.from_scratch = from_scratch
        self.record = record
        self.seed = seed
        self.model = model
        self.keep_average(model, settings.average)

    def training_step(self, batch: TokenBatch, _: int) -> None:
        # dropout of adapters, the same after a resume
        torch.manual_seed(stream_seed("dropout", self.seed, self.global_step))
        optimizer, scheduler, step = self.optimizers(), self.lr_schedulers(), self.global_step
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        optimizer.zero_grad()
        count = len(batch.input_ids)
        loss = self.objective.step(batch, stream_seed("objective", self.seed, step))
        size = max(1, self.settings.micro_tokens // loss.width)
        found: list[tuple[Tensor, Tensor]] = []
        for start in range(0, count, size):
            rows = slice(start, start + size)
            found.append(self._backward(loss, rows))
            self.on_tokens(int(batch.attention_mask[rows].sum()), min(1.0, (start + size) / count))
        optimizer.step()
        scheduler.step()
        self.average()
        if step % 10 == 0:
            total, right = (float(sum(column)) for column in zip(*found, strict=True))
            metrics = {"loss": total, "token_accuracy": right / max(1, loss.count)}
            self.log_dict(metrics, prog_bar=True)
            self.record(step, metrics)

    def _backward(self, loss: StepLoss, rows: slice) -> tuple[Tensor, Tensor]:
        """Adds the gradient of some rows to that of their step; returns what ``StepLoss.part`` says, detached."""
        share, right = loss.part(self.model, rows)
        self.manual_backward(share)
        return share.detach(), right

    def configure_optimizers(self) -> Any:
        settings = self.settings
        optimizer: torch.optim.Optimizer
        if settings.optimizer == "muon" or (settings.optimizer == "auto" and self.from_scratch):
            optimizer = MuonAdamW(self.model, settings.lr, settings.weight_decay, BETAS)
        else:
            trained = [p for p in self.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=settings.weight_decay, betas=BETAS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule(step, settings.steps, settings.warmup, self.passed())
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
