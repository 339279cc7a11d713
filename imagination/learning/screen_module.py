"""Training of the world model of pictures: flow matching with shortcut forcing, batch by batch from logged turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from imagination.learning.supervised import BETAS, Record, schedule
from imagination.settings import FitSettings, UserError
from real_envs.screens import Place
from real_envs.seeding import derive_seed
from worldmodel.extras.screen.data import Frames, ScreenTransition
from worldmodel.extras.screen.model import Conditions, Noise, ScreenModel, draw_noise, shortcut_forcing_loss
from worldmodel.extras.screen.settings import ScreenSettings

Window = tuple[int, int, int, int]  # top, left, height, width
NEAR = 0.75  # share of the windows that are drawn around an action's element


@dataclass(frozen=True, slots=True)
class ScreenBatch:
    """Some turns: what their next screens depend on, the next screens, and what is random about the batch."""

    conditions: Conditions
    after: Tensor
    noise: Noise

    def to(self, device: torch.device) -> ScreenBatch:
        """The same batch with its tensors on ``device``."""
        return ScreenBatch(self.conditions.to(device), self.after.to(device), self.noise.to(device))


class ScreenBatches:
    """Batches of logged turns, drawn with replacement; each is a function of seed and step.

    Args:
        unchanged_share: of the turns that are drawn, those that change nothing; ``None`` as the log has them.

    Raises:
        UserError: the log has no turn of a kind that should get a share.
    """

    def __init__(
        self,
        turns: Sequence[ScreenTransition],
        frames: Frames,
        model: ScreenModel,
        *,
        settings: ScreenSettings,
        steps: int,
        unchanged_share: float | None,
        seed: int,
    ) -> None:
        self._turns, self._frames, self._model = turns, frames, model
        self._settings, self._seed = settings, seed
        self._windows = round(steps * (1 - settings.whole_share)) if settings.crop else steps  # steps of them
        changes = torch.tensor([turn.changes for turn in turns])
        self._weights = torch.ones(len(turns), dtype=torch.float64)
        if unchanged_share is not None:
            for kind, share in ((changes, 1 - unchanged_share), (~changes, unchanged_share)):
                if share and not kind.any():
                    raise UserError(
                        f"worldmodel.unchanged_share={unchanged_share:g}: no logged turn of one of both kinds has "
                        "screenshots; set it to null"
                    )
                self._weights[kind] = share / max(1, int(kind.sum()))

    def __call__(self, step: int) -> ScreenBatch:
        rng = torch.Generator().manual_seed(derive_seed("screens", self._seed, step))
        settings, whole = self._settings, step >= self._windows
        size = settings.whole_batch if whole else settings.batch
        drawn = torch.multinomial(self._weights, size, replacement=True, generator=rng)
        turns = [self._turns[k] for k in drawn.tolist()]
        after = self._model.to_data([self._frames[turn.after] for turn in turns])
        conditions = self._model.conditions([self._frames[turn.before] for turn in turns], turns)
        if settings.crop and not whole:
            windows = [self._window(turn.place, rng) for turn in turns]
            after, before, maps = (cut(pictures, windows) for pictures in (after, conditions.before, conditions.maps))
            conditions = replace(conditions, before=before, maps=maps)
        return ScreenBatch(
            conditions,
            after,
            draw_noise(after, self._model.shape.finest, settings.bootstrap, rng),
        )

    def _window(self, place: Place | None, rng: torch.Generator) -> Window:
        """Mostly one that the centre of the action's element is in, anywhere in it; otherwise any.

        It depends on what the model reads, never on what changes: that would give away where something does.
        """
        near, *chance = torch.rand(3, generator=rng).tolist()
        window = []
        for axis, whole in enumerate(self._model.shape.inside):
            size = min(self._settings.crop, whole)
            start = chance[axis] * (whole - size)
            if place is not None and near < NEAR:
                centre = (place[1 - axis] + place[3 - axis] / 2) / self._model.shape.shrink
                start = centre - chance[axis] * size
            window.append((round(min(max(start, 0.0), whole - size)), size))
        (y, height), (x, width) = window
        return y, x, height, width


def cut(pictures: Tensor, windows: Sequence[Window]) -> Tensor:
    """A window of each picture: ``[batch, channels, height, width]``."""
    return torch.stack(
        [
            picture[:, y : y + height, x : x + width]
            for picture, (y, x, height, width) in zip(pictures, windows, strict=True)
        ]
    )


class ScreenModule(L.LightningModule):
    """Trains a ``ScreenModel`` in place, by AdamW."""

    def __init__(self, model: ScreenModel, settings: FitSettings, record: Record) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.settings, self.record = model, settings, record

    def training_step(self, batch: ScreenBatch, _: int) -> None:
        optimizer, scheduler, step = self.optimizers(), self.lr_schedulers(), self.global_step
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)

        def predict(rows: Tensor, x_t: Tensor, t: Tensor, d: Tensor) -> Tensor:
            return self.model.predict(batch.conditions.rows(rows), x_t, t, d)

        optimizer.zero_grad()
        loss, errors = shortcut_forcing_loss(predict, batch.after, batch.noise)
        self.manual_backward(loss)
        finite = bool(torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0).isfinite())
        if not finite:
            optimizer.zero_grad()  # without gradients a step changes nothing
            self.record(step, {"skipped_steps": 1})
        optimizer.step()
        scheduler.step()
        if finite and step % 10 == 0:
            metrics = {"loss": float(loss.detach()), **errors}
            self.log_dict(metrics, prog_bar=True)
            self.record(step, metrics)

    def configure_optimizers(self) -> Any:
        settings = self.settings
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, betas=BETAS
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule(step, settings.steps, settings.warmup)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
