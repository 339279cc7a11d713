"""The dreams that ``rollouts`` and ``gpu`` time: random models, and the loop that each side runs in its own process.

The models never stop by themselves, so every competitor samples exactly the same number of tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from policy.lm.engine import Completion, ContextFull, Engine, EngineCounts, Sampling
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler
from policy.lm.engines.vllm import VllmEngine
from policy.lm.settings import EngineSettings
from policy.lm.tokenizer import train_tokenizer
from tests.benchmarks.measure import main_or_worker

NEVER = -1  # a stop token that is never sampled


@dataclass(frozen=True)
class Shape:
    """Of both models (Llamas with heads of 64) and of the dreams; lengths are in tokens."""

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


def model_config(shape: Shape) -> LlamaConfig:
    """Of transformers, with tied embeddings and no token that ends a text."""
    return LlamaConfig(
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
        model: Any = LlamaForCausalLM(model_config(shape))
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


def make_engines(
    name: str, shape: Shape, dtype: torch.dtype, eager: bool = True, device: str = "cpu"
) -> tuple[Engine, Engine]:
    """Policy and world model: two models of one shape with their own weights, in one process."""
    models = [make_model(shape, seed, dtype, device) for seed in (0, 1)]
    scheduler = DeviceScheduler()
    if name == "generate":
        made: list[Engine] = [GenerateEngine(model, shape.context) for model in models]
    elif name == "vllm":
        settings = EngineSettings(name="vllm", slots=shape.episodes, eager=eager, memory_gib=1.0)
        tokenizer = train_tokenizer(["no text is read"], 270)  # it wants one, but sees token ids only
        made = [VllmEngine(model, tokenizer, shape.context, settings, scheduler) for model in models]
    else:
        settings = EngineSettings(slots=shape.episodes, memory_gib=16.0)
        made = [InProcessEngine(m, shape.context, settings, scheduler=scheduler) for m in models]
    return made[0], made[1]


def turns_per_second(policy: Engine, world: Engine, shape: Shape, seeds: range, warm_turns: int) -> list[float]:
    """Of one play of all episodes per seed, after one that is not timed."""
    asyncio.run(dream(policy, world, replace(shape, turns=warm_turns), seed=99))
    rates = []
    for seed in seeds:
        policy.update_weights()
        world.update_weights()
        begin = time.perf_counter()
        asyncio.run(dream(policy, world, shape, seed))
        rates.append(shape.episodes * shape.turns / (time.perf_counter() - begin))
    return rates


def long_turn_seconds(policy: Engine, world: Engine, shape: Shape) -> tuple[float, float]:
    """Seconds of turn 30 and of turn 3, each the median of itself and its neighbours."""
    asyncio.run(dream(policy, world, replace(shape, turns=2), seed=9))
    ends = asyncio.run(dream(policy, world, replace(shape, turns=31), seed=0))
    taken = [b - a for a, b in pairwise(ends)]  # taken[k] is turn k + 2, counted from 1
    return statistics.median(taken[27:30]), statistics.median(taken[0:3])


def play(spec: dict[str, Any]) -> dict[str, Any]:
    """Plays as ``spec`` says.

    Args:
        spec: ``engine`` (inprocess, generate or vllm), ``shape``, ``dtype``, ``device``, ``eager``, ``seeds`` (the
            first, and one behind the last), and ``long``: whether to time the turns of a long dream instead.
    """
    shape = Shape(**spec["shape"])
    dtype = getattr(torch, spec["dtype"])
    policy, world = make_engines(spec["engine"], shape, dtype, spec["eager"], spec["device"])
    if spec["long"]:
        return {"seconds": long_turn_seconds(policy, world, shape)}
    warm = 1 if spec["engine"] == "generate" else shape.turns  # generate is slow, and keeps nothing that was warmed
    rates = turns_per_second(policy, world, shape, range(*spec["seeds"]), warm)
    return {"turns/s": rates}


if __name__ == "__main__":
    main_or_worker(lambda: None, play)
