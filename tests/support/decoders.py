"""Small decoders of many architectures, and rows that share prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from policy.lm.backbone import with_lora
from policy.lm.settings import LoraSettings

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-wide": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": 64})),  # its attention is compiled
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, bos_token_id=1, eos_token_id=2)),
    "llama-lora": lambda: with_lora(LlamaForCausalLM(LlamaConfig(**SIZES)), LoraSettings(rank=2)),
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Weights large enough for every token of the past to matter, adapters among them.

    transformers' RMSNorm computes in fp32 whatever comes in; in fp64 torch's own stands in, or 1e-10 means nothing.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in list(model.modules()) if dtype == torch.float64 else ():
        for key, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, key, torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(0.2 * torch.randn(weight.shape))
    return model.to(dtype).eval()


def random_rows(*shape: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed)).tolist()


A, B, C = random_rows(3, 12)


ROWS: dict[str, list[list[int]]] = {
    "a group": [[*A, *B[:7]], [*A, *B[:3], *C[:5]], [*A, *B[:3], *C[:2]], A, [*B, *C]],
    "identical": [A, A, A],
    "prefixes": [A, A[:1], A[:5], [*A, *B], A[:2]],
    "nothing shared": [A, B, C[:4]],
    "one row": [A],
    "length one": [A[:1], B[:1], A[:2], A[:1]],
}


def batch_of(rows: Sequence[Sequence[int]], width: int | None = None) -> tuple[Tensor, Tensor]:
    width = width or max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    real = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    return ids, real
