"""What the tests of engines share: small models whose every earlier token matters, and transformers as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from policy.lm.backbone import build_model
from policy.lm.engine import Completion
from policy.lm.settings import ModelSettings
from tests.support.asking import TOKENIZER

NEVER = -1  # a stop token that is never sampled, for completions of a known length
CONTEXT = 160


def shake(model: PreTrainedModel, seed: int = 0, std: float = 0.12) -> PreTrainedModel:
    """Large weights: a cache with one wrong entry shows."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * std)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=rng) * std)
        model.get_input_embeddings().weight.mul_(5)
        model.get_output_embeddings().weight.mul_(3)
    return model.eval()


def make_model(kv_heads: int = 2, seed: int = 0, std: float = 0.12) -> PreTrainedModel:
    settings = ModelSettings(hidden=32, layers=2, heads=4, kv_heads=kv_heads, mlp=64, context=CONTEXT)
    model = build_model(settings, TOKENIZER, seed)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # tied, greedy text would repeat itself
    return shake(model, seed, std)


MODEL = make_model()


def teacher_forced(model: Any, prompt: Sequence[int], completion: Completion, temperature: float) -> list[float]:
    """Log-probs of the sampled tokens from one pass over the whole sequence, as a trainer computes them."""
    ids = torch.tensor([[*prompt, *completion.ids]], device=model.device)
    with torch.no_grad():
        logprobs = (model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return logprobs[range(len(completion.ids)), list(completion.ids)].tolist()


def assert_scored(model: Any, prompt: Sequence[int], completion: Completion, temperature: float) -> None:
    """Within the tolerance that the engine states for fp32."""
    assert completion.logprobs == pytest.approx(teacher_forced(model, prompt, completion, temperature), abs=1e-4)


def generate(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int, stop: int) -> tuple[int, ...]:
    """Greedy text by transformers."""
    ids = torch.tensor([list(prompt)], device=model.device)
    ends = {"max_new_tokens": max_tokens, "eos_token_id": stop if stop >= 0 else None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **ends)
    return tuple(out[0, len(prompt) :].tolist())
