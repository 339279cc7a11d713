"""The dreams that ``rollouts`` and ``gpu`` time: random models, and the one loop that all competitors run.

The models never stop by themselves, so every competitor samples exactly the same number of tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from policy.lm.engine import Completion, Engine, Sampling

NEVER = -1  # a stop token that is never sampled
_FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


@dataclass(frozen=True)
class Shape:
    """Of both models (heads of 64) and of the dreams; lengths are in tokens. The defaults are those of ``rollouts``."""

    family: str = "llama"
    hidden: int = 192
    layers: int = 5
    heads: int = 3
    kv_heads: int = 1
    mlp: int = 512
    vocab: int = 2048
    context: int = 2048
    episodes: int = 64
    turns: int = 10
    start: int = 48
    action: int = 8
    observation: int = 48


def model_config(shape: Shape) -> Any:
    """Of transformers, with tied embeddings and no token that ends a text."""
    return _FAMILIES[shape.family][0](
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def make_model(shape: Shape, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Random weights: speed does not depend on what is written."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = _FAMILIES[shape.family][1](model_config(shape))
    return model.to(dtype).eval()


class GenerateEngine:
    """The ``Engine`` that open trainers have: whole histories, left-padded, through ``generate``, turn by turn."""

    def __init__(self, model: Any, context: int, expected: int) -> None:
        self.model, self.context, self.version, self.expected = model, context, 0, expected
        self._waiting: list[tuple[Sequence[int], Sampling, asyncio.Future[Completion]]] = []

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """See ``Engine``; runs once all ``expected`` episodes have asked."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, sampling, future))
        if len(self._waiting) == self.expected:
            self._run()
        return await future

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        width = max(len(ids) for ids, _, _ in waiting)
        tokens = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids, _, _ in waiting])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _, _ in waiting])
        with torch.inference_mode():
            out = self.model.generate(
                tokens.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=waiting[0][1].max_tokens,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
        for (_, _, future), row in zip(waiting, out[:, width:].tolist(), strict=True):
            future.set_result(Completion(tuple(row), (0.0,) * len(row), False))

    def release(self, session: Hashable) -> None:
        """Nothing is kept."""

    def update_weights(self) -> None:
        """The model is used as it is."""


async def dream(policy: Engine, world: Engine, shape: Shape, seed: int) -> list[float]:
    """Plays all episodes; returns when each turn was over for all. Both views of an episode grow as in a real run."""
    ends = [0.0] * shape.turns
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, shape.vocab, (shape.episodes, shape.start), generator=chance).tolist()
    ask, answer = Sampling(shape.action, NEVER), Sampling(shape.observation, NEVER)

    async def episode(k: int) -> None:
        text = list(starts[k])
        for turn in range(shape.turns):
            text += (await policy.complete(text, ask, (seed * 1009 + k) * 101 + turn, k)).ids
            text += (await world.complete(text, answer, (seed * 1013 + k) * 103 + turn, k)).ids
            ends[turn] = time.perf_counter()
        policy.release(k)
        world.release(k)

    await asyncio.gather(*(episode(k) for k in range(shape.episodes)))
    return ends
