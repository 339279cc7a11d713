"""Speed on a CUDA card: two Llamas in the shape of Qwen2.5-0.5B with random bf16 weights.

Policy update: tokens per second of ``PolicyModule`` under Lightning, at the fastest size of micro-batches, and the
fraction of the card's bf16 peak that this is (MFU). The peak is the best large matrix product of the same run; where
the vendor's number is known, the fraction of that is beside it. Operations are three times ``forward_operations``,
which counts distinct tokens and logits of trained ones; tokens per second count every token of every row.

Dreams: as in ``rollouts``, against ``generate`` and, in a Python that has it, vLLM with CUDA graphs. Decoding: with and
without CUDA graphs.

    python -m tests.benchmarks.gpu --parts decode       a part of it
    python -m tests.benchmarks.gpu --tiny               tries the code on a CPU, in a minute
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from imagination.settings import TrainSettings
from tests.benchmarks import trl_update
from tests.benchmarks.dreaming import Shape, make_model
from tests.benchmarks.machine import hardware, matmul_rate
from tests.benchmarks.measure import arguments, forward_operations
from tests.benchmarks.rollouts import Race, Side, decode_row, dream_limits
from tests.benchmarks.table import Limit, table_row, write

QWEN = Shape(hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864, vocab=151936)
TINY = Shape(128, 2, 2, 1, 128, vocab=512, context=256, episodes=2, turns=2, start=4, action=2, observation=3)
# FLOP/s of dense bf16 products as the vendor states them (SXM cards), by a part of the name that torch reports
NOMINAL_BF16 = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with a shape that takes seconds")
    parser.add_argument("--rounds", type=int, default=3, help="of dreams")
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), help="a Python that has vLLM")
    parts = {"decode": decode_rows, "update": update_rows, "dreams": dream_rows}
    parser.add_argument("--parts", nargs="+", choices=parts, default=[*parts])
    options = parser.parse_args()
    options.quick = options.quick or options.tiny
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("bench-gpu needs a CUDA card and torch finds none here; --tiny tries the code on a CPU")
    torch.set_num_threads(options.threads)
    shape, device = (TINY, "cpu") if options.tiny else (QWEN, "cuda")
    machine = hardware() if options.tiny else torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []
    for measure in (parts[name] for name in options.parts):
        size = "tiny" if options.tiny else "0.5B"
        rows += [{**row, "what": f"{size}, bf16: {row['what']}"} for row in measure(shape, device, options)]
        # after each, since a lent card may be taken back
        write("gpu", rows, options, hardware=machine, shape=asdict(shape))


def update_rows(shape: Shape, device: str, options: Any) -> list[dict[str, Any]]:
    """Policy-update tokens per second, and the fraction of the card's peak."""
    tiny = options.tiny
    batch = trl_update.Shape(groups=1, size=3) if tiny else trl_update.Shape()
    model = make_model(shape, 0, torch.bfloat16, device)
    data: list[dict[str, Any]] = trl_update.make_rows(replace(batch, vocabulary=shape.vocab))
    trl_update.add_own_logprobs(model, data)
    rows = trl_update.rows_to_learn_from(data)
    seconds: dict[int, float] = {}
    for micro in (4096,) if tiny else (4096, 8192, 16384):
        settings = TrainSettings(epochs=1, minibatches=1, lr=1e-9, micro_tokens=micro)
        try:
            clock, records = trl_update.learn(model.to(device), rows, settings, updates=2 if tiny else 6)
        except torch.cuda.OutOfMemoryError:
            break  # larger ones will not fit either
        seconds[micro] = statistics.median(clock.seconds[1:])
    torch.cuda.empty_cache()  # the dreams need the card, too
    tokens, best = sum(len(row["ids"]) for row in data), min(seconds.values())
    made = sum(sum(row["made"]) for row in data)
    operations = 3 * forward_operations(model.config, [row["ids"] for row in data], made)
    with torch.device(device):
        sizes, each = ((128, 256), 0.05) if tiny else ((4096, 8192, 16384), 1.0)
        peak = matmul_rate(sizes, each, torch.bfloat16)
    card = "" if tiny else torch.cuda.get_device_name()
    nominal = next((rate for part, rate in NOMINAL_BF16.items() if part in card), None)
    limit = Limit(
        tokens * peak / operations,
        f"{operations / 1e9:,.0f} GFLOP an update (3 forward passes over distinct tokens, logits of trained tokens "
        f"only) at {peak / 1e12:.4g} TFLOP/s, the bf16 rate of a large matrix product",
    )
    return [
        table_row(
            "policy-update tokens/s; of limit: MFU",
            "report",
            "tokens/s",
            [tokens / best],
            limit=limit,
            mfu_of_nominal_peak=nominal and operations / best / nominal,
            seconds_by_micro_tokens=seconds,
            computed_over_real_tokens=records[-1]["packing"],
            parameters=sum(p.numel() for p in model.parameters()),
        )
    ]


def dream_rows(shape: Shape, device: str, options: Any) -> list[dict[str, Any]]:
    """Dreamed turns per second of all sides, and what the engine's turns and tokens cost."""
    race = Race(shape, options.out / "gpu.work", options.threads, device)
    race.enter("in process", Side("inprocess", "bfloat16"))
    race.enter("generate", Side("generate", "bfloat16"))
    race.enter("vLLM", Side("vllm", "bfloat16", options.vllm_python, eager=options.tiny))
    race.run(1 if options.quick else options.rounds)
    seconds = 0.01 if options.tiny else 0.3
    with torch.device(device):
        limits = dream_limits(shape, torch.bfloat16, seconds)
        long = race.long_row("in process", "report", seconds=seconds, plays=1)
    against = "dreamed turns/s against"
    return [
        race.row(f"{against} generate, whole history each turn", "report", "in process", "generate", limits),
        race.row(f"{against} vLLM", "report", "in process", "vLLM", limits),
        long,
    ]


def decode_rows(shape: Shape, device: str, options: Any) -> list[dict[str, Any]]:
    """Decoded tokens per second."""
    length, seconds = (8, 0.1) if options.tiny else (64, 3.0)
    return [decode_row(shape, torch.bfloat16, length, seconds, device, graphs) for graphs in (True, False)]


if __name__ == "__main__":
    main()
