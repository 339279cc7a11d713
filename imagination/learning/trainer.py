"""Lightning trainers that resume: a training state every few steps, kept checkpoints, a progress bar."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.settings import LoggerName, UserError


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


class _ShowBar(Callback):
    """Moves the bar with the steps."""

    def __init__(self, bar: Bar, done: Callable[[], int]) -> None:
        self._bar, self._done = bar, done

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._bar.start(self._done())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._bar.advance(self._done(), {k: float(v) for k, v in trainer.progress_bar_metrics.items() if k != "v_num"})

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._bar.stop()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._bar.stop()


def make_logger(name: LoggerName, run: RunFolder, stage: str) -> Logger | Literal[False]:
    """Where Lightning logs the metrics of a stage: ``<run>/tensorboard/<stage>``, ``<run>/csv/<stage>``, or wandb.

    Raises:
        UserError: wandb is not installed.
    """
    if name == "tensorboard":
        return TensorBoardLogger(run.path, name="tensorboard", version=stage)
    if name == "csv":
        return CSVLogger(run.path, name="csv", version=stage)
    if name == "wandb":
        try:
            return WandbLogger(project="imagination", name=f"{run.path.name}/{stage}", save_dir=run.path)
        except ModuleNotFoundError as error:
            raise UserError("logger=wandb needs the package wandb: pip install 'imagination[wandb]'") from error
    return False  # None would be TensorBoard


def make_trainer(
    run: RunFolder,
    stage: str,
    every: int,
    precision: Literal["bf16", "fp32"],
    done: Callable[[], int],
    more: Sequence[Callback] = (),
    *,
    bar: Bar,
    logger: LoggerName,
) -> L.Trainer:
    """A trainer with logs, a progress bar, and a training state saved after every ``every`` steps.

    ``done`` tells how many steps of the whole stage are done, those before a resume included.
    """
    callbacks: list[Callback] = [
        _SaveState(run.training_state(stage), every, run.settings, done),
        _ShowBar(bar, done),
        *more,
    ]
    return L.Trainer(
        max_epochs=1,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",  # not MPS, which has no float64 to sample with
        devices=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        logger=make_logger(logger, run, stage),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
