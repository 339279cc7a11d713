"""One competitor of ``rollouts``, in a process of its own: makes both engines, warms them up and plays dreams."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from policy.lm.engine import Engine
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler
from policy.lm.engines.vllm import VllmEngine
from policy.lm.settings import EngineSettings
from policy.lm.tokenizer import train_tokenizer
from tests.benchmarks.dreaming import GenerateEngine, Shape, dream, make_model
from tests.benchmarks.machine import synchronize
from tests.benchmarks.measure import worker_files


def make_engines(name: str, shape: Shape, dtype: torch.dtype, device: str, eager: bool = True) -> tuple[Engine, Engine]:
    """Policy and world model: two models of one shape with their own weights, in one process."""
    models = [make_model(shape, seed, dtype, device) for seed in (0, 1)]
    scheduler = DeviceScheduler()
    if name == "generate":
        made: list[Engine] = [GenerateEngine(model, shape.context) for model in models]
    elif name == "vllm":
        # on a card, vLLM asks for nine tenths of it unless it is given a share, and there are two engines
        memory: dict[str, float] = {"gpu_memory_utilization": 0.35} if device == "cuda" else {"memory_gib": 1.0}
        settings = EngineSettings(name="vllm", slots=shape.episodes, eager=eager, **memory)  # type: ignore[arg-type]
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
        synchronize()
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


def work(spec: dict[str, Any]) -> dict[str, Any]:
    """Plays as ``spec`` says.

    Args:
        spec: ``engine`` (inprocess, generate or vllm), ``shape``, ``dtype``, ``device``, ``eager``, ``seeds`` (the
            first, and one behind the last), and ``long``: whether to time the turns of a long dream instead.
    """
    shape, began = Shape(**spec["shape"]), time.perf_counter()
    dtype = getattr(torch, spec["dtype"])
    policy, world = make_engines(spec["engine"], shape, dtype, spec["device"], spec["eager"])
    started = time.perf_counter() - began
    if spec["long"]:
        return {"seconds": long_turn_seconds(policy, world, shape)}
    warm = 1 if spec["engine"] == "generate" else shape.turns  # generate is slow, and keeps nothing that was warmed
    rates = turns_per_second(policy, world, shape, range(*spec["seeds"]), warm)
    return {"turns/s": rates, "start": started, "threads": torch.get_num_threads()}


def main() -> None:
    spec, out = worker_files()
    out.write_text(json.dumps(work(spec)))


if __name__ == "__main__":
    main()
