"""A real pretrained chat model through vLLM, in this process and behind a server: tokens and log-probs of the trainer.

Skipped where the model cannot be fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from policy.lm.backbone import load_checkpoint, save_checkpoint, with_lora
from policy.lm.engine import Sampling
from policy.lm.engines.openai import OpenAIEngine
from policy.lm.engines.vllm import VllmEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import EngineSettings, LoraSettings
from tests.support.asking import together
from tests.support.serving import serving
from tests.support.smollm2 import NotFetched, fetched
from tests.support.vllm_oracle import NEVER, assert_scored, generate

CONTEXT = 256
MEMORY = 2**28


@pytest.fixture(scope="module")
def adapted() -> tuple[Any, PreTrainedTokenizerBase]:
    """The model with adapters that have moved, as after some training."""
    try:
        model, tokenizer = load_checkpoint(str(fetched()))
    except NotFetched as error:
        pytest.skip(str(error))
    model = with_lora(model, LoraSettings(rank=4)).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.02)
    return model, tokenizer


def asked(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_in_this_process(adapted: tuple[Any, PreTrainedTokenizerBase]) -> None:
    """Adapters merged on the way: greedy tokens are those of `generate`, log-probs those of the trainer's module."""
    model, tokenizer = adapted
    ids = asked(tokenizer)
    engine = VllmEngine(model, tokenizer, CONTEXT, EngineSettings(name="vllm", memory_gib=MEMORY / 2**30))
    (greedy,) = together(engine.complete(ids, Sampling(12, NEVER, 0.0), 0))
    assert greedy.ids == generate(model, ids, 12)
    sampled = together(*(engine.complete(ids, Sampling(12, ChatFormat(tokenizer).stop), seed) for seed in range(3)))
    for answer in sampled:
        assert_scored(model, ids, answer)


def test_behind_a_server(adapted: tuple[Any, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    """`vllm serve` of the saved folder, asked by `engine=openai`: the same tokens, the same log-probs."""
    model, tokenizer = adapted
    ids = asked(tokenizer)
    save_checkpoint(model, tokenizer, tmp_path / "model")
    with serving(tmp_path / "model", "smollm2", tmp_path, MEMORY) as url:
        engine = OpenAIEngine(CONTEXT, EngineSettings(name="openai", url=url, served_model="smollm2"))
        (greedy,) = together(engine.complete(ids, Sampling(12, NEVER, 0.0), 0))
        sampled = together(*(engine.complete(ids, Sampling(12, ChatFormat(tokenizer).stop), k) for k in range(3)))
    assert greedy.ids == generate(model, ids, 12)
    for answer in sampled:
        assert_scored(model, ids, answer)
