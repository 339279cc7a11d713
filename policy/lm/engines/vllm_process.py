"""Living with vLLM in one process: it takes the process for its own, and here it is the trainer's. Needs no vllm."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

_LLVMLITE = "llvmlite.binding.ffi"


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Undoes what the start of vLLM does to its process, which here is the trainer's.

    It seeds every global generator (weights drawn later would be the same in every run), forbids
    ``torch.set_num_threads``, tells child processes to preload its allocator, and freezes the heap, so that an engine
    that is dropped later would never be collected. It also looks into every object of every module, and stumbles over
    one of llvmlite's that answers to any name, which is there where numba was imported before: bm25s does so.
    """
    stumbling_block = sys.modules.pop(_LLVMLITE, None)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    environment = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        if stumbling_block is not None:
            sys.modules[_LLVMLITE] = stumbling_block
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        gc.unfreeze()


@contextlib.contextmanager
def complaints() -> Iterator[list[str]]:
    """What vLLM warns of while it loads weights: it keeps the old ones and goes on, and so would a run, unnoticed."""
    found: list[str] = []

    class _Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            rotary = "RotaryEmbedding" in text  # a table that is computed: no checkpoint has it
            if ("Failed to load weights" in text and not rotary) or "not loaded" in text:
                found.append(text)

    logger, handler = logging.getLogger("vllm.model_executor.model_loader.reload"), _Collect(level=logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def describe(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """What vLLM reads before it has weights: a checkpoint folder without them."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.deepcopy(plain.config)
    config.architectures = [type(plain).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def stop(core: Any) -> None:
    """Gives back the memory of an engine that nobody holds any more."""
    with contextlib.suppress(Exception):  # half gone already
        core.model_executor.shutdown()
        core.scheduler.shutdown()
