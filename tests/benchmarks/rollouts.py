"""How fast episodes are dreamed: 64 episodes of 10 turns, 8 tokens an action, 48 an observation, both models sampled.

Models have random weights and never stop by themselves, so every competitor writes exactly the same number of tokens:
transformers' ``generate`` on left-padded batches that re-send the whole history each turn, vLLM (in its own virtual
environment), and the in-process engine. The engine's drafts from a log are measured apart, with a world model that was
trained on real TextWorld episodes, because random text cannot be guessed.

    python -m tests.benchmarks.rollouts --out outputs/bench [--quick] [--vllm-python .venv-vllm/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from policy.lm.engine import Completion, Engine, Sampling
from policy.lm.inprocess import InProcessEngine, Turnstile
from tests.benchmarks.machine import best_seconds, copy_rate, hardware, products_seconds

NEVER = -1


@dataclass(frozen=True)
class Shape:
    """Of one model and of the dreams; the defaults are those of the table in the README."""

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


def make_model(shape: Shape, seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
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
    ).eval()


def linear_shapes(model: Any) -> list[tuple[int, int]]:
    """``(out, in)`` of every matrix product that decoding one token needs, the output head included."""
    layers = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return [(int(out), int(into)) for out, into in layers]


class GenerateEngine:
    """The ``Engine`` that open trainers have: whole histories, left-padded, through ``generate``, turn by turn."""

    def __init__(self, model: Any, context: int, expected: int) -> None:
        self.model, self.context, self.version, self.expected = model, context, 0, expected
        self._waiting: list[tuple[Sequence[int], Sampling, asyncio.Future[Completion]]] = []

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
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
                tokens, attention_mask=mask, max_new_tokens=waiting[0][1].max_tokens, do_sample=True, top_k=0,
                pad_token_id=0,
            )  # fmt: skip
        for (_, _, future), row in zip(waiting, out[:, width:].tolist(), strict=True):
            future.set_result(Completion(tuple(row), (0.0,) * len(row), False))

    def release(self, session: Hashable) -> None: ...

    def update_weights(self) -> None: ...


async def dream(policy: Engine, world: Engine, shape: Shape, seed: int) -> list[float]:
    """Plays all episodes; returns when each turn was over for all. Both views of an episode grow as in a real run."""
    ends = [0.0] * shape.turns
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, shape.vocab, (shape.episodes, shape.start), generator=chance).tolist()
    ask, answer = Sampling(shape.action, NEVER), Sampling(shape.observation, NEVER)

    async def episode(k: int) -> None:
        mine, theirs = list(starts[k]), list(starts[k])
        for turn in range(shape.turns):
            action = await policy.complete(mine, ask, (seed * 1009 + k) * 101 + turn, k)
            mine += action.ids
            theirs += action.ids
            seen = await world.complete(theirs, answer, (seed * 1013 + k) * 103 + turn, k)
            mine += seen.ids
            theirs += seen.ids
            ends[turn] = time.perf_counter()
        policy.release(k)
        world.release(k)

    await asyncio.gather(*(episode(k) for k in range(shape.episodes)))
    return ends


def turns_per_second(make: Callable[[], tuple[Engine, Engine]], shape: Shape, repeats: int) -> list[float]:
    """Of ``repeats`` runs after one short run to warm up."""
    policy, world = make()
    warm = replace(shape, turns=1)
    asyncio.run(dream(policy, world, warm, seed=99))
    rates = []
    for seed in range(repeats):
        policy.update_weights()
        world.update_weights()
        begin = time.perf_counter()
        asyncio.run(dream(policy, world, shape, seed))
        rates.append(shape.episodes * shape.turns / (time.perf_counter() - begin))
    return rates


def in_process(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> tuple[Engine, Engine]:
    turnstile = Turnstile()
    policy, world = (
        InProcessEngine(
            make_model(shape, seed).to(device), shape.context, shape.episodes, 16.0, dtype, turnstile=turnstile
        )
        for seed in (0, 1)
    )
    return policy, world


def later_turns(shape: Shape, dtype: torch.dtype) -> float:
    """Time of turn 30 over time of turn 3, each the median of three neighbours."""
    long = replace(shape, turns=31)
    policy, world = in_process(long, dtype)
    asyncio.run(dream(policy, world, replace(shape, turns=2), seed=9))
    ends = asyncio.run(dream(policy, world, long, seed=0))
    taken = [b - a for a, b in pairwise(ends)]  # taken[k] is turn k + 2, counted from 1
    return statistics.median(taken[27:30]) / statistics.median(taken[0:3])


def decode_rates(shape: Shape, dtype: torch.dtype) -> tuple[float, float]:
    """Tokens per second of decoding all episodes at once, and of the same matrix products alone."""
    engine = InProcessEngine(make_model(shape, 0), shape.context, shape.episodes, 16.0, dtype)
    prompts = torch.randint(0, shape.vocab, (shape.episodes, 200)).tolist()
    length = 64

    async def run(tokens: int) -> None:
        engine.update_weights()
        sampling = Sampling(tokens, NEVER)
        await asyncio.gather(*(engine.complete(ids, sampling, k, k) for k, ids in enumerate(prompts)))

    reading = best_seconds(lambda: asyncio.run(run(1)))
    both = best_seconds(lambda: asyncio.run(run(1 + length)), seconds=5.0)
    decoded = shape.episodes * length / (both - reading)
    alone = shape.episodes / products_seconds(linear_shapes(engine.model), shape.episodes, dtype)
    return decoded, alone


def limit_turns_per_second(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> float:
    """If every token of both models cost only its matrix products, at the rate of a large batch.

    A turn adds ``action + observation`` tokens to both sequences, and each token passes through each model once.
    """
    tokens = 4096
    model = make_model(shape, 0)
    body = [s for s in linear_shapes(model) if s[0] != shape.vocab]
    head = [(shape.vocab, shape.hidden)]
    per_token = products_seconds(body, tokens, dtype, device) / tokens
    per_logit = products_seconds(head, tokens, dtype, device) / tokens
    return 1 / ((shape.action + shape.observation) * (2 * per_token + per_logit))


def with_vllm(python: str, shape: Shape, repeats: int) -> list[float]:
    """The same dreams through ``VllmEngine``, in the environment that has vLLM."""
    command = [python, "-m", "tests.benchmarks.rollouts", "--vllm-side", json.dumps([asdict(shape), repeats])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the vLLM side failed:\n{done.stderr[-3000:]}")
    rates: list[float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def _vllm_side(shape: dict[str, Any], repeats: int) -> None:
    raise NotImplementedError


def row(what: str, target: str, ours: Sequence[float], theirs: Sequence[float], **more: Any) -> dict[str, Any]:
    """One line of the table: the ratio of medians, and its range over all pairs of repetitions."""
    pairs = [a / b for a in ours for b in theirs]
    return {
        "what": what,
        "target": target,
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "ratio_range": [min(pairs), max(pairs)],
        "ours": list(ours),
        "theirs": list(theirs),
        **more,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder for rollouts.json")
    parser.add_argument("--quick", action="store_true", help="8 episodes of 2 turns: does it run?")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM; without it that row is left out")
    parser.add_argument("--vllm-side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.vllm_side:
        return _vllm_side(*json.loads(arguments.vllm_side))
    shape = Shape(episodes=8, turns=2) if arguments.quick else Shape()
    repeats = 1 if arguments.quick else 5
    dtype = torch.float32

    def generated() -> tuple[Engine, Engine]:
        policy, world = (GenerateEngine(make_model(shape, s), shape.context, shape.episodes) for s in (0, 1))
        return policy, world

    rows = []
    ours = turns_per_second(lambda: in_process(shape, dtype), shape, repeats)
    theirs = turns_per_second(generated, shape, 1 if arguments.quick else 2)
    best = limit_turns_per_second(shape, dtype)
    limit = f"{best:.0f} turns/s if all tokens cost only their matrix products at the rate of a batch of 4096"
    rows.append(row("dreamed turns/s against generate, whole history each turn", ">= 10", ours, theirs, limit=limit))
    if arguments.vllm_python:
        theirs = with_vllm(arguments.vllm_python, shape, repeats)
        rows.append(row("dreamed turns/s against vLLM", ">= 1.5", ours, theirs, limit=limit))
    if not arguments.quick:
        ratio = later_turns(shape, dtype)
        rows.append(row("time of turn 30 over time of turn 3", "<= 1.5", [ratio], [1.0]))
        decoded, alone = decode_rates(shape, dtype)
        rows.append(row("decode rate over that of its matrix products alone", ">= 0.5", [decoded], [alone]))
    report = {
        "rows": rows,
        "shape": asdict(shape),
        "parameters": sum(p.numel() for p in make_model(shape, 0).parameters()),
        "dtype": str(dtype),
        "hardware": hardware(),
        "copy_rate_gb_s": copy_rate() / 1e9,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "command": " ".join(["python", "-m", "tests.benchmarks.rollouts", *sys.argv[1:]]),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "rollouts.json").write_text(json.dumps(report, indent=1))
    for one in rows:
        print(f"{one['what']}: {one['ratio']:.2f} (target {one['target']})")


if __name__ == "__main__":
    main()
