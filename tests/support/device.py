"""Where the tests of a CUDA card run: ``GPU_TESTS_DEVICE=cpu`` tries their code on a machine without one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from imagination.learning.losses.terms import token_logprobs
from policy.lm.batch import padded
from policy.lm.forward import hidden_before, token_logits
from tests.support import decoders

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
FOUND = DEVICE == "cpu" or torch.cuda.is_available()
needs_device = pytest.mark.skipif(not FOUND, reason="no CUDA card; GPU_TESTS_DEVICE=cpu tries the code without one")
needs_card = pytest.mark.skipif(DEVICE != "cuda", reason="CPUs have no memory of their own, and nothing to wait for")


def make_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of ``decoders.MODELS`` on the device; where it divides its logits, its head is as much larger."""
    model = decoders.make_model(name)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(getattr(model.config, "logits_scaling", 1.0))
    model.generation_config.eos_token_id = None  # so that ``generate`` goes on as long as it is told to
    return model.to(DEVICE, dtype)


def some_text(length: int, seed: int) -> list[int]:
    """Random ids without the special ones."""
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and which of them are real, ``[batch, time]`` each, on the device."""
    ids = padded(rows, 0, torch.long)
    real = padded([[1] * len(row) for row in rows], 0, torch.bool)
    return ids.to(DEVICE), real.to(DEVICE)


def trainer_logprobs(model: Any, rows: Sequence[Sequence[int]], mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Of the masked tokens in row-major order, as updates compute them."""
    ids, real = batch_of(rows)
    predictors = hidden_before(model, ids, real, mask)
    logits = token_logits(model, predictors.states)
    return token_logprobs(logits, ids[mask], temperature, which=predictors.which)
