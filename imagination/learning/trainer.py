"""Lightning trainers that resume: their steps, training states, averaged weights, kept checkpoints, a progress bar.

Lightning's ``ModelCheckpoint`` would count optimiser steps, of which an update of a policy has several, and keeps no
checkpoint of Hugging Face; its ``WeightAveraging`` (2.6) averages in the dtype of the weights and copies frozen ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from imagination.learning.sharding import ShardedStrategy, own_part, part_of, whole
from imagination.rollout.dream_env import Start
from imagination.rollout.play import Episode
from imagination.runs.processes import count, from_first, gathered
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.settings import LoggerName, UserError
from real_envs.env import Task
from real_envs.grouping import grouped
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory


class _Steps(IterableDataset):
    """Items ``first() .. steps - 1``. It has a length, or Lightning would fetch (and play) one item ahead."""

    def __init__(
        self, steps: int, first: Callable[[], int], item: Callable[[int], object], over: Callable[[], bool]
    ) -> None:
        self._steps, self._first, self._item, self._over = steps, first, item, over

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[object]:
        for step in range(self._first(), self._steps):
            if self._over():
                return
            yield self._item(step)


class TimeLimit(Callback):
    """Of a training, from its first step on; ``minutes=0`` is none. Several processes go by the clock of the first.

    A resumed training has the time that was left when its state was saved.
    """

    def __init__(self, minutes: float) -> None:
        self._seconds, self._begin, self._share, self._before = 60 * minutes, 0.0, 0.0, 0.0

    def over(self) -> bool:
        """To be asked before each step."""
        if not self._seconds:
            return False
        now = from_first(time.monotonic)()
        self._begin = self._begin or now
        self._share = min(1.0, self._before + (now - self._begin) / self._seconds)
        return self._share == 1

    def passed(self) -> float:
        """The share of the time that was over before this step, in [0, 1]."""
        return self._share

    def state_dict(self) -> dict[str, float]:
        return {"share": self._share}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._before = self._share = state_dict["share"]


def step_loader(
    steps: int, first: Callable[[], int], item: Callable[[int], object], over: Callable[[], bool] = lambda: False
) -> DataLoader:
    """Serves ``item(step)`` for the steps that are left of ``steps``.

    Args:
        first: the step to start at; asked when training starts, as after a resume only the trainer knows.
        over: whether there is no time for another one.
    """
    return DataLoader(_Steps(steps, first, item, over), batch_size=None, num_workers=0)


class WeightAverage(Callback):
    """Exponential moving average of the trained weights, in fp32, which the model has at the end (Polyak and Juditsky
    1992; Tarvainen and Valpola 2017, arXiv 1703.01780, section 2). It predicts better than the last weights do.

    The weight of the past begins small, ``min(decay, (1 + t) / (10 + t))`` at step ``t``, so that the random start is
    soon forgotten (as in TensorFlow's ``ExponentialMovingAverage``). A ``decay`` of 0 keeps the last weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad} if decay else {}
        self._trained, self._decay, self._steps = trained, decay, 0
        self._mean = {name: p.detach().float().clone() for name, p in trained.items()}

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if not self._trained:
            return
        self._steps += 1
        past = min(self._decay, (1 + self._steps) / (10 + self._steps))
        self._mean = {name: self._mean[name].to(p.device) for name, p in self._trained.items()}
        means = [own_part(mean) for mean in self._mean.values()]
        torch._foreach_lerp_(means, [own_part(p).float() for p in self._trained.values()], 1 - past)

    @torch.no_grad()
    def on_train_end(self, *_: Any) -> None:
        for name, p in self._trained.items():
            p.copy_(self._mean[name])

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self._decay:
            checkpoint["average"] = {
                "steps": self._steps,
                "mean": {name: whole(mean) for name, mean in self._mean.items()},
            }

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if not self._decay:
            return
        self._steps, mean = checkpoint["average"]["steps"], checkpoint["average"]["mean"]
        if mean.keys() != self._mean.keys():
            raise ValueError("this average is not one of the weights of this model")
        self._mean = {name: part_of(tensor.clone(), self._mean[name]) for name, tensor in mean.items()}


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
            try:
                trainer.save_checkpoint(partial)
            except (OSError, RuntimeError):  # of a full disk
                partial.unlink(missing_ok=True)
                raise
            if trainer.is_global_zero:
                os.replace(partial, self._path)
                for old in self._path.parent.glob(f"{self._path.stem}.*.shards"):
                    if old.name != f"{self._path.stem}.{self._done()}.shards":
                        shutil.rmtree(old)


class KeepCheckpoints(Callback):
    """Saves the model as a policy of its own every few steps, the last one excepted, which the stage itself saves.

    Args:
        folder: gets ``<stage>-00050`` and so on; those of an earlier run of the stage are removed.
        every: steps between two; 0 keeps none.
        total: steps of the stage, of which ``done()`` are done, those before a resume included.
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


# --- the best policy, by dreams that training does not learn from ---


def split_starts(starts: Mapping[str, Start], tasks: int, seed: int) -> tuple[dict[str, Start], list[str]]:
    """Start states to learn from by name, and the names of one of each of ``tasks`` other tasks to validate by: the
    beginning of its task. Half of the tasks are learned from at least.
    """
    names = grouped(starts, lambda name: starts[name].task_id)
    ranked = sorted(names, key=lambda task: hashlib.sha256(f"{seed}/{task}".encode()).digest())
    kept = set(ranked[: min(tasks, len(ranked) // 2)])
    first = [min(names[task], key=lambda name: (len(starts[name].history), name)) for task in sorted(kept)]
    return {name: start for name, start in starts.items() if start.task_id not in kept}, first


class BestPolicy(Callback):
    """Keeps the policy that did best in validation dreams, which begin in tasks that no update dreams of.

    Args:
        starts: names of start states, see ``split_starts``.
        every: updates between two validations.
        seed: of the dreams, which are the same each time.

    Attributes:
        best: update and success of the best policy; ``None`` before the first validation.
    """

    def __init__(self, model: Any, starts: Sequence[str], tasks: Sequence[str], every: int, seed: int) -> None:
        self._model, self._every = model, every
        self.episodes = [
            Episode(
                f"validation/{k}", Task(task, {"start": name}), f"validation/{k}", derive_seed("validation", seed, k)
            )
            for k, (name, task) in enumerate(zip(starts, tasks, strict=True))
        ]
        self.best: tuple[int, float] | None = None
        self._weights: dict[str, torch.Tensor] = {}

    def due(self, update: int, last: bool = False) -> bool:
        return last or update % self._every == 0

    def consider(self, update: int, played: Sequence[Trajectory]) -> dict[str, float]:
        """Keeps the policy as it is now if it did at least as well as the best one; what is to be logged."""
        valid = [t for t in played if not t.stop.is_outage]
        if not valid:
            return {}
        success = sum(t.solved for t in valid) / len(valid)
        if self.best is None or success >= self.best[1]:
            self.best = update, success
            self._weights = {
                name: p.detach().to("cpu", copy=True) for name, p in self._model.named_parameters() if p.requires_grad
            }
        return {"validation_success": success, "validation_dreams": float(len(valid))}

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the best policy in place of the last one."""
        for name, p in self._model.named_parameters():
            if name in self._weights:
                p.copy_(self._weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "weights": self._weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best"]
        self.best = None if best is None else (int(best[0]), float(best[1]))
        self._weights = dict(state_dict["weights"])


# --- the trainer ---
class _StopTogether(Callback):
    """Several processes end a training when one of them does."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = any(gathered([trainer.should_stop]))


class _SumOfGradients(DDPStrategy):
    """Lightning's DDP without its wrapper, which takes a mean of gradients at each backward pass.

    Our steps are several passes, and their losses are divided by counts of all rows: ``processes.sum_gradients``.
    """

    def configure_ddp(self) -> None:
        """Leaves the module as it is."""


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Holds Ctrl-C back until the block is left."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:  # not ours to handle
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


class _TensorBoard(TensorBoardLogger):
    """A Ctrl-C amid a row would leave the lock of TensorBoard's queue taken, and its end would wait two minutes."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        with ctrl_c_later():
            super().log_metrics(metrics, step)

    def save(self) -> None:
        with ctrl_c_later():
            super().save()


def make_logger(name: LoggerName, run: RunFolder, stage: str) -> Logger | Literal[False]:
    """Where Lightning logs the metrics of a stage: ``<run>/tensorboard/<stage>``, ``<run>/csv/<stage>``, or wandb.

    Raises:
        UserError: wandb is not installed.
    """
    if name == "tensorboard":
        return _TensorBoard(run.path, name="tensorboard", version=stage)
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
    bar: Bar,
    done: Callable[[], int],
    every: int,
    precision: Literal["bf16", "fp32"] = "fp32",
    callbacks: Sequence[Callback] = (),
) -> L.Trainer:
    """A trainer with logs, a progress bar, and a training state saved after every ``every`` steps."""
    save = _SaveState(run.training_state(stage), every, run.settings, done)
    averages = [callback for callback in callbacks if isinstance(callback, WeightAverage)]  # they belong to the state
    others = [callback for callback in callbacks if not isinstance(callback, WeightAverage)]
    strategy = ShardedStrategy() if run.strategy == "fsdp2" else "auto" if count() == 1 else _SumOfGradients()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if count() > 1 else 1
    return L.Trainer(
        max_epochs=1,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",  # not MPS, which has no float64 to sample with
        devices=local,
        num_nodes=count() // local,
        strategy=strategy,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        logger=make_logger(run.logger, run, stage),
        callbacks=[*averages, save, _ShowBar(bar, done), *others, _StopTogether()],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
