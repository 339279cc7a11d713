"""Models that vLLM can run, and what they should say: transformers is the oracle.

One forward pass without any cache for log-probs, ``generate`` for greedy text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import worldmodel.formats.retrieval  # noqa: F401 - brings numba in, which vLLM must not stumble over (see undisturbed)
from policy.lm.backbone import build_model
from policy.lm.engine import Completion
from policy.lm.settings import ModelSettings
from tests.support import engines
from tests.support.asking import TOKENIZER
from tests.support.engines import NEVER

CONTEXT = 192
# vLLM's kernels add up in another order than torch's; log-probs of float32 models differ by no more than this
TOLERANCE = 2e-3


def make_model(seed: int = 0, tied: bool = True) -> PreTrainedModel:
    """Weights large enough that every earlier token matters for what comes next: a wrong cache entry shows."""
    settings = ModelSettings(hidden=64, layers=2, heads=2, kv_heads=1, mlp=96, context=CONTEXT)
    model = build_model(settings, TOKENIZER, seed)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.config.tie_word_embeddings = False
    randomise(model, seed)
    return model.eval()


def randomise(model: Any, seed: int) -> None:
    """Other weights in the same module, as after an optimiser step."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.12)
        model.model.embed_tokens.weight.mul_(3)


def processed(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs ``[vocab]`` of the distribution sampled from."""
    return (logits / temperature).softmax(-1).log()


def teacher_forced(model: Any, ids: Sequence[int], completion: Completion, temperature: float) -> list[float]:
    """Log-probs of the completion from one forward pass of the trainer's module."""
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *completion.ids]]), use_cache=False).logits[0].double()
    return [float(processed(logits[len(ids) + i - 1], temperature)[token]) for i, token in enumerate(completion.ids)]


def assert_scored(model: Any, ids: Sequence[int], completion: Completion, temperature: float = 1.0) -> None:
    expected = teacher_forced(model, ids, completion, temperature)
    assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


generate = partial(engines.generate, stop=NEVER)
