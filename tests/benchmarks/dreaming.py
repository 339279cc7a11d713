"""The dreams that ``rollouts`` and ``gpu`` time: random models, and the one loop that all competitors run.

The models never stop by themselves, so every competitor samples exactly the same number of tokens.

Limits of how fast dreams could be, from rates that this machine reaches in the same run:

*products*: every token passes each model once and every sampled token the output head once, as matrix products at the
best of several batch sizes. Nothing else costs time, not even that one token follows another.

*decoding*: sampled tokens come one after the other, so their products run at as many rows as there are episodes, and
each such step reads the keys and values of all episodes once, at the speed of copying memory. What the other model
wrote is read at the best batch size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from policy.lm.engine import Completion, ContextFull, Engine, EngineCounts, Sampling
from policy.lm.engines.inprocess.decode import kv_shape
from tests.benchmarks.machine import copy_rate, products_seconds
from tests.benchmarks.measure import forward_operations
from tests.benchmarks.table import Limit

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

    def __init__(self, model: Any, context: int) -> None:
        self.model, self.context, self.version = model, context, 0
        self.exact, self.counts = False, EngineCounts()
        self._waiting: list[tuple[Sequence[int], Sampling, asyncio.Future[Completion]]] = []

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """See ``Engine``; runs once every episode that can ask has asked."""
        if len(ids) + sampling.max_tokens > self.context:
            raise ContextFull(f"{len(ids)} + {sampling.max_tokens} tokens do not fit {self.context}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((ids, sampling, future))
        if len(self._waiting) == 1:
            self._gathering = loop.create_task(self._gather())
        return await future

    async def _gather(self) -> None:
        seen = -1
        while len(self._waiting) != seen:
            seen = len(self._waiting)
            for _ in range(8):
                await asyncio.sleep(0)
        waiting, self._waiting = self._waiting, []
        try:
            self._run(waiting)
        except Exception as error:
            for _, _, future in waiting:
                future.set_exception(error)

    def _run(self, waiting: Sequence[tuple[Sequence[int], Sampling, asyncio.Future[Completion]]]) -> None:
        width, sampling = max(len(ids) for ids, _, _ in waiting), waiting[0][1]
        tokens = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids, _, _ in waiting])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _, _ in waiting])
        with torch.inference_mode():
            out = self.model.generate(
                tokens.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=sampling.max_tokens,
                do_sample=True,
                top_k=0,
                temperature=sampling.temperature,
                pad_token_id=0,
                eos_token_id=sampling.stop if sampling.stop >= 0 else None,
            )
        for (_, _, future), row in zip(waiting, out[:, width:].tolist(), strict=True):
            stopped = sampling.stop in row
            made = row[: row.index(sampling.stop) + 1] if stopped else row
            future.set_result(Completion(tuple(made), (0.0,) * len(made), stopped))

    def release(self, session: Hashable) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
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


_BATCHES = (64, 256, 1024, 4096)


def linear_shapes(config: Any) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """``(out, in)`` of the products of all layers, joined where they share their input, and of the output head."""
    _, kv_heads, dim = kv_shape(config)
    hidden, mlp, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    layer = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * mlp, hidden), (hidden, mlp)]
    return config.num_hidden_layers * layer, (config.vocab_size, hidden)


def token_seconds(config: Any, dtype: torch.dtype, device: str = "cpu", seconds: float = 1.0) -> tuple[float, float]:
    """Seconds per token of all layers, and per logit row of the head, each at its best batch size."""
    body, head = linear_shapes(config)
    per_token = min(products_seconds(body, n, dtype, device, seconds) / n for n in _BATCHES)
    return per_token, min(products_seconds([head], n, dtype, device, seconds) / n for n in _BATCHES)


def dream_limits(shape: Shape, dtype: torch.dtype, device: str = "cpu", seconds: float = 1.0) -> dict[str, Limit]:
    """Turns per second of the dreams of ``shape``: ``limit`` and ``decode_limit`` of a row. See the module."""
    per_token, per_logit = token_seconds(model_config(shape), dtype, device, seconds)
    turn = (shape.action + shape.observation) * (2 * per_token + per_logit)
    return {
        "limit": Limit(1 / turn, "tokens cost only their matrix products, at the best batch size of this machine"),
        "decode_limit": Limit(
            decode_turns(shape, dtype, (shape.turns + 1) / 2, device, seconds),
            f"sampled tokens come one by one: products at {shape.episodes} rows, and keys and values of all "
            "episodes read once a token at the speed of copying memory",
        ),
    }


def decode_turns(shape: Shape, dtype: torch.dtype, turn: float, device: str = "cpu", seconds: float = 1.0) -> float:
    """Turns per second at the ``turn``-th turn, counted from 1, if only the second limit held."""
    config = model_config(shape)
    body, head = linear_shapes(config)
    per_token, per_logit = token_seconds(config, dtype, device, seconds)
    made = shape.action + shape.observation
    layers, heads, dim = kv_shape(config)
    length = shape.start + (turn - 0.5) * made
    cached = layers * 2 * heads * dim * dtype.itemsize * shape.episodes * length  # bytes, of one model
    step = products_seconds([*body, head], shape.episodes, dtype, device, seconds)
    step += cached / copy_rate(device, seconds)
    # the first token of a completion comes out of reading its prompt, the last one is read with the next prompt
    read_first = (made + 2) * per_token + 2 * per_logit
    return shape.episodes / ((made - 2) * step + shape.episodes * read_first)


def turn_operations(shape: Shape, turn: int) -> float:
    """Of the matrix products of both models for the ``turn``-th turn of an episode, counted from 1."""
    config = model_config(shape)
    made = shape.action + shape.observation
    before = range(shape.start + (turn - 1) * made)
    after = range(len(before) + made)
    return sum(
        forward_operations(config, [after], sampled) - forward_operations(config, [before], 0)
        for sampled in (shape.action, shape.observation)
    )
