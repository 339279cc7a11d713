"""How a stage begins and ends in its run folder: opened, resumed, finished."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from imagination.runs.fingerprint import fingerprint
from imagination.runs.lock import locked
from imagination.runs.machine import cores
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError


def open_run(config: Config, folder: Path, stage: str = "", models: bool = True) -> RunFolder:
    """The folder of this run, and torch set up for a ``stage`` that uses ``models``."""
    random.seed(config.seed)
    np.random.seed(config.seed)
    if models:
        _set_up_torch(config.seed)
    sharing = config.strategy, config.activation_checkpointing
    return RunFolder(folder, config.seed, fingerprint(config, stage), config.logger, *sharing)


@contextmanager
def run_stage(config: Config, folder: Path, stage: str, models: bool = True) -> Iterator[RunFolder]:
    """See ``open_run``. The block is timed, and the stage is done where it ends without an error. Raises ``UserError``:
    another process writes into the folder, or the disk is full.
    """
    with locked(folder, stage.replace("_", "-")):
        run = open_run(config, folder, stage, models)
        with run.timed(stage):
            yield run
        _finish(run, stage)


def _set_up_torch(seed: int) -> None:
    import torch  # here, because it takes seconds, and stages without models need none of it
    from transformers.utils.logging import disable_progress_bar

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores())
    _tell_threads(torch.get_num_threads(), cores())
    # cuDNN plans its attention for each shape it has not seen, ten milliseconds a layer; batches of text are all new
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(seed)  # lightning's seed_everything does no more, and costs three seconds of imports
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    disable_progress_bar()  # of transformers, for models that load in a moment


@lru_cache
def _tell_threads(threads: int, cores: int) -> None:
    """Once in a process."""
    print(f"threads {threads}, cores {cores}; OMP_NUM_THREADS takes another number", file=sys.stderr, flush=True)


def need(path: Path, stage: str) -> Path:
    """Raises ``UserError``: an earlier stage has not written ``path`` yet."""
    if not path.exists():
        which = "`imagine collect` or `imagine import`" if stage == "collect" else f"`imagine {stage}`"
        raise UserError(f"{path} is not there yet; run {which} with the same run= and output= first")
    return path


def find_run(name: str, output: str, key: str) -> RunFolder:
    """The run ``name``, a folder or one under ``output``. Raises ``UserError``: the setting ``key`` names none."""
    places = dict.fromkeys((Path(output) / name, Path(name)))  # one, where the name is a whole path
    existing = next((folder for folder in places if (folder / "summary.json").exists()), None)
    if existing is None:
        raise UserError(f"{key}={name} is no run: there is no summary.json in {' or '.join(map(str, places))}")
    return RunFolder(existing, 0)


def resume_from(run: RunFolder, stage: str) -> tuple[str | None, int]:
    """Path of the saved training state and the number of steps it has done; ``(None, 0)`` for a fresh start.

    A state that was saved under other settings is not gone on from.

    Raises:
        UserError: the state is of another strategy, damaged, or a pickle that holds more than numbers and texts.
    """
    import torch

    path = run.training_state(stage)
    if not path.exists():
        return None, 0
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()  # torch writes checksums, but reads without a look at them
        if broken is not None:
            raise zipfile.BadZipFile(broken)
        state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, OSError):
        raise  # the state itself may be whole
    except Exception as error:  # whatever its reader stumbles over
        raise UserError(f"{path} is no training state that can be read ({type(error).__name__}); delete it") from error
    if state.get("settings") != run.settings:
        print(f"{stage}: begins anew; {path} was saved under other settings", file=sys.stderr)
        return None, 0
    if ("shards" in state) != (run.strategy == "fsdp2"):
        other = "fsdp2" if "shards" in state else "ddp"
        raise UserError(f"{path} was saved by strategy={other}: go on with that, or delete it")
    return str(path), int(state["steps_done"])


def _finish(run: RunFolder, stage: str) -> None:
    """Marks a stage as done. Its training state is not needed any more, and those of later stages are out of date."""
    before = ("import", "collect", "fit_world_model", "refine_world_model", "reflect", "relabel")
    order = (*before, "clone", "rules", "fit_critic", "digi_q", "learn_experience", "train", "evaluate", "pretrain")
    for outdated in order[order.index(stage) :]:
        for state in run.training_states(outdated):
            state.unlink(missing_ok=True)
            for shards in state.parent.glob(f"{state.stem}.*.shards"):
                shutil.rmtree(shards)
    done = {**run.summary.get("done", {}), stage: run.settings}
    if stage in ("train", "digi_q") and done.keys() & {"digi_q", "loop"}:  # all three make models/policy
        done = with_old_evaluation(done)
    run.update({"done": done})


def with_old_evaluation(done: Mapping[str, str]) -> dict[str, str]:
    """What is done of a run whose policy is another now."""
    return {**done, **({"evaluate": "of the policy before"} if done.get("evaluate") else {})}
