"""What several stages need: the run folder, models with their engines, Lightning trainers that resume."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from transformers.utils.logging import disable_progress_bar

from imagination.machine import cores
from imagination.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.stages.engines import Engines
from policy.agent import LanguageModelAgent
from policy.lm.backbone import load_checkpoint, with_lora
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings

# Names of folders, how many processes work, and what only looks at a run or starts others from it, decide nothing that
# is made.
_ASIDE = ("run", "output", "jobs", "audit", "compare", "ablation")
_WHOLE = tuple(f.name for f in fields(Config) if f.name not in _ASIDE)
_LOG = ("seed", "games", "collect")
_WORLD = (*_LOG, "vocab_size", "worldmodel", "fit", "engine", "dream.max_tokens", "dream.temperature")
# What a stage's result depends on, the settings of the stages before it included; other stages depend on all.
READS = {
    "collect": _LOG,
    "fit_world_model": _WORLD,
    "clone": (*_WORLD, "policy", "max_action_tokens", "clone"),
    "train": tuple(name for name in _WHOLE if name != "evaluate"),
}


def fingerprint(config: Config, stage: str = "") -> str:
    """A short hash of all settings that decide what ``stage`` makes; by default, what a whole run does.

    The same work has the same one.
    """
    chosen = {}
    for name in READS.get(stage, _WHOLE):
        value = reduce(getattr, name.split("."), config)
        chosen[name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]


def open_run(config: Config, folder: Path, stage: str = "") -> RunFolder:
    """The folder of this run, and torch set up for ``stage``."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores())
    L.seed_everything(config.seed, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    disable_progress_bar()  # of transformers, for models that load in a moment
    return RunFolder(folder, config.seed, fingerprint(config, stage))


def give_back_memory() -> None:
    """Returns freed memory to the system; glibc would keep what a stage's many differently shaped tensors left."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def need(path: Path, stage: str) -> Path:
    """
    Raises:
        UserError: an earlier stage has not written ``path`` yet.
    """
    if not path.exists():
        raise UserError(f"{path} is not there yet; run `imagine {stage}` with the same run= first")
    return path


def weights_version(model: torch.nn.Module) -> str:
    """A short hash of all weights, the provenance of what the model makes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def load_model(folder: Path, stage: str, settings: ModelSettings) -> tuple[Any, ChatFormat]:
    """A model of this run with its chat format; adapters are put on where the settings ask for them."""
    model: Any
    model, tokenizer = load_checkpoint(str(need(folder, stage)), settings.dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), ChatFormat(tokenizer)


def adapted(model: Any, settings: ModelSettings) -> Any:
    """The model as it is trained: with LoRA where ``lora.rank`` is not 0."""
    return with_lora(model, settings.lora) if settings.lora.rank else model


def context_of(model: Any, settings: ModelSettings) -> int:
    """The longest sequence to use: what the settings say, within what the model can."""
    return min(settings.context, int(model.config.max_position_embeddings))


def make_agent(
    engines: Engines, model: Any, chat: ChatFormat, config: Config, temperature: float, name: str
) -> LanguageModelAgent:
    """A policy that plays, sampling from ``model`` as it was when its engine's weights were last updated."""
    engine = engines.make(model, chat, context_of(model, config.policy))
    return LanguageModelAgent(engine, chat, config.max_action_tokens, temperature, name)


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


def resume_from(run: RunFolder, stage: str) -> tuple[str | None, int]:
    """Path of the saved training state and the number of steps it has done; ``(None, 0)`` for a fresh start.

    A state that was saved under other settings is not gone on from.
    """
    path = run.training_state(stage)
    if not path.exists():
        return None, 0
    state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if state.get("settings") != run.settings:
        return None, 0
    return str(path), int(state["steps_done"])


def finish(run: RunFolder, stage: str) -> None:
    """Marks a stage as done. Its training state is not needed any more, and those of later stages are out of date."""
    order = ("collect", "fit_world_model", "refine_world_model", "clone", "train", "evaluate")
    for outdated in order[order.index(stage) :]:
        for state in run.training_states(outdated):
            state.unlink(missing_ok=True)
    run.update({"done": {stage: run.settings}})
