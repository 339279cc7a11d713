"""Lightning trainers that resume: a training state every few steps, kept checkpoints, a progress bar."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from imagination.runs.run_folder import RunFolder


class _SaveState(Callback):
    """Saves the training state every few steps, atomically: a killed run goes on from the last one."""

    def __init__(self, path: Path, every: int, settings: str, done: Callable[[], int]) -> None:
        self._path, self._every, self._settings, self._done = path, every, settings, done

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings"] = self._settings
        checkpoint["steps_done"] = self._done()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._done() % self._every == 0:  # not batch_idx, which Lightning counts anew after a resume
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".tmp")
            trainer.save_checkpoint(partial)
            os.replace(partial, self._path)


class KeepCheckpoints(Callback):
    """Saves the model as a policy of its own every few steps, the last one excepted, which the stage itself saves.

    Args:
        folder: gets ``<stage>-00050`` and so on; those of an earlier run of the stage are removed.
        every: steps between two; 0 keeps none.
        total: steps of the stage.
        done: how many of them are done, those before a resume included.
        save: writes the model into a folder.
    """

    def __init__(
        self, folder: Path, stage: str, every: int, total: int, done: Callable[[], int], save: Callable[[Path], None]
    ) -> None:
        self._folder, self._stage, self._every, self._total, self._done, self._save = (
            folder, stage, every, total, done, save,
        )  # fmt: skip

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for old in self._folder.glob(f"{self._stage}-*"):
            if not self._done() or int(old.name.rpartition("-")[2]) > self._done():
                shutil.rmtree(old)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._every and self._done() % self._every == 0 and self._done() < self._total:
            self._save(self._folder / f"{self._stage}-{self._done():05d}")


class _Bar(TQDMProgressBar):
    """Lightning's bar without the version of its logger, which says nothing here."""

    def get_metrics(self, *args: Any, **kwargs: Any) -> Any:
        items = super().get_metrics(*args, **kwargs)
        items.pop("v_num", None)
        return items


def make_trainer(
    run: RunFolder,
    stage: str,
    every: int,
    precision: str,
    done: Callable[[], int],
    more: Sequence[Callback] = (),
) -> L.Trainer:
    """A trainer with TensorBoard logs, a progress bar, and a training state saved after every ``every`` steps.

    ``done`` tells how many steps of the whole stage are done, those before a resume included.
    """
    callbacks: list[Callback] = [
        _SaveState(run.training_state(stage), every, run.settings, done),
        _Bar(refresh_rate=5),
        *more,
    ]
    half = precision == "bf16" or (precision == "auto" and torch.cuda.is_available())
    return L.Trainer(
        max_epochs=1,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",  # not MPS, which has no float64 to sample with
        devices=1,
        precision="bf16-mixed" if half else "32-true",
        logger=TensorBoardLogger(run.path, name="tensorboard", version=stage),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
