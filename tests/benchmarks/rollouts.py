"""How fast episodes are dreamed: 64 episodes of 10 turns, 8 tokens an action, 48 an observation, both models sampled.

Models have random weights and never stop by themselves, so every competitor writes exactly the same number of tokens:
transformers' ``generate`` on left-padded batches that re-send the whole history each turn, vLLM (in its own virtual
environment), and the in-process engine. The engine's drafts from a log are measured apart, with a world model that was
trained on real TextWorld episodes (``dreams``), because random text cannot be guessed.

All compute in fp32, since ``generate`` does; bf16 has rows of its own. vLLM plays once eager and once compiled, and
then in the way that was faster. Each side plays in processes of its own, in turns; a first dream warms it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from policy.lm.engine import Sampling
from policy.lm.engines.inprocess.decode import kv_shape
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.settings import EngineSettings
from tests.benchmarks.dreaming import NEVER, Shape, dream_limits, linear_shapes, make_model
from tests.benchmarks.machine import attention_products, best_in_turns, copy_rate, products
from tests.benchmarks.measure import arguments
from tests.benchmarks.race import Race, Side
from tests.benchmarks.table import Limit, table_row, write


def decode_rows(
    shape: Shape, dtype: torch.dtype, device: str = "cpu", length: int = 64, seconds: float = 5.0
) -> list[dict[str, Any]]:
    """Tokens per second of decoding all episodes at once, against the same matrix products alone: those of the linear
    layers and of attention, and those of the linear layers only. All do ``length`` steps at a stretch, in turns."""
    model = make_model(shape, 0, dtype, device)
    engine = InProcessEngine(model, shape.context, EngineSettings(slots=shape.episodes, memory_gib=16.0))
    prompts = torch.randint(0, shape.vocab, (shape.episodes, min(200, shape.context - length - 1))).tolist()

    async def run(tokens: int) -> None:
        engine.update_weights()
        sampling = Sampling(tokens, NEVER)
        await asyncio.gather(*(engine.complete(ids, sampling, k, k) for k, ids in enumerate(prompts)))

    body, head = linear_shapes(model.config)
    layers, kv_heads, dim = kv_shape(model.config)
    heads, time = (shape.heads, kv_heads), len(prompts[0]) + length // 2
    linear = products([*body, head], shape.episodes, dtype, device)
    attention = attention_products(layers, shape.episodes, heads, time, dim, dtype, device, seconds / 5)

    def steps(*works: Callable[[], None]) -> None:
        for _ in range(length):
            for work in works:
                work()

    reading, both, all_products, only_linear = best_in_turns(
        [
            lambda: asyncio.run(run(1)),
            lambda: asyncio.run(run(1 + length)),
            lambda: steps(linear, attention),
            lambda: steps(linear),
        ],
        6 * seconds,
    )
    decoded = shape.episodes * length / (both - reading)
    rows = []
    for what, target, alone in (
        ("all its matrix products alone", ">= 0.5", all_products),
        ("its linear layers alone", "report", only_linear),
    ):
        rate = shape.episodes * length / alone
        limit = Limit(rate, f"matrix products at {shape.episodes} rows and nothing else")
        rows.append(table_row(f"decode rate over that of {what}", target, "tokens/s", [decoded], [rate], limit=limit))
    return rows


def main() -> None:
    parser = arguments(__doc__, "vllm")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = Shape(episodes=8, turns=2) if options.quick else Shape()
    seconds = 0.1 if options.quick else 1.0
    race = Race(shape, options.out / "rollouts.work", options.threads)
    ours, half, generate = "in process, fp32", "in process, bf16", "generate, fp32"
    race.enter(ours, Side("inprocess"))
    race.enter(generate, Side("generate"))
    race.enter(half, Side("inprocess", "bfloat16"))
    for name, dtype in (("vLLM, fp32", "float32"), ("vLLM, bf16", "bfloat16")):
        ways = [Side("vllm", dtype, options.vllm_python, eager) for eager in (True, False)]
        race.enter(name, *(ways[:1] if options.quick else ways))
    race.run(1 if options.quick else options.rounds)
    fp32, bf16 = (dream_limits(shape, dtype, seconds=seconds) for dtype in (torch.float32, torch.bfloat16))
    rows = [
        race.row("dreamed turns/s against generate, whole history each turn", ">= 10", ours, generate, fp32),
        race.row("dreamed turns/s against vLLM", ">= 1.5", ours, "vLLM, fp32", fp32),
        race.row("dreamed turns/s against vLLM, both in bf16", "report", half, "vLLM, bf16", bf16),
        race.row("dreamed turns/s in bf16 against fp32, in process", "report", half, ours, bf16),
    ]
    if not options.quick:
        rows += [race.long_row(name, "<= 1.5", seconds=seconds) for name in (ours, half)]
        rows += [race.long_row(name, "report", 8, seconds) for name in (ours, half)]
        rows += [race.long_row(generate, "report", 8, seconds, plays=1)]
        rows += decode_rows(shape, torch.float32)
    write(
        "rollouts",
        rows,
        options,
        shape=asdict(shape),
        parameters=sum(p.numel() for p in make_model(shape, 0).parameters()),
        vllm_compiled={name: not side.eager for name, side in race.sides.items() if side.engine == "vllm"},
        vllm_turns_per_second_by_way=race.tried,
        copy_rate_gb_s=copy_rate(seconds=seconds) / 1e9,
    )


if __name__ == "__main__":
    main()
