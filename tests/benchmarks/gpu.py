"""The same rows on a CUDA card: two models in the shape of Qwen2 with 0.5 billion random bf16 weights.

Dreams: the in-process engine against ``generate`` and, where vLLM can be imported, against vLLM with CUDA graphs.

Policy update: tokens per second of ``PolicyModule`` under Lightning, at the fastest size of micro-batches, and the
fraction of the card's bf16 peak that this is (MFU). The peak is the best large matrix product measured in the same run;
where the vendor's number is known, the fraction of that is beside it. Operations are three times those of
``forward_operations``, which counts distinct tokens and the logits of trained ones; tokens per second count every token
of every row.

    python -m tests.benchmarks.gpu [--vllm-python .venv-gpu/bin/python]
    python -m tests.benchmarks.gpu --tiny       a shape that a CPU can do, in seconds, to see that the code works
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from imagination.settings import TrainSettings
from tests.benchmarks.dreaming import Shape, dream_limits, make_model
from tests.benchmarks.machine import hardware, matmul_rate, nominal_peak
from tests.benchmarks.measure import arguments, forward_operations
from tests.benchmarks.race import Race, Side
from tests.benchmarks.rollouts import decode_rows
from tests.benchmarks.table import Limit, table_row, write
from tests.benchmarks.update_ours import Shape as UpdateShape
from tests.benchmarks.update_ours import add_own_logprobs, learn, make_rows, rows_to_learn_from

QWEN = Shape("qwen2", hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864, vocab=151936)
TINY = Shape("qwen2", 128, 2, 2, 1, 128, vocab=512, context=256, episodes=2, turns=2, start=4, action=2, observation=3)
MICRO_TOKENS = (4096, 8192, 16384)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with a shape that takes seconds")
    parser.add_argument("--dreams", type=int, default=3, help="timed, of each side")
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), help="a Python that has vLLM")
    options = parser.parse_args(argv)
    options.quick = options.quick or options.tiny
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("bench-gpu needs a CUDA card and torch finds none here; --tiny tries the code on a CPU")
    shape, device = (TINY, "cpu") if options.tiny else (QWEN, "cuda")
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for measure in (update_rows, dream_rows):
        found = measure(shape, device, options)
        rows += [{**one, "what": f"{'tiny' if options.tiny else '0.5B'}, bf16: {one['what']}"} for one in found]
        write("gpu", rows, options, device=device, shape=asdict(shape))  # each time: a lent card may be taken back


def update_rows(shape: Shape, device: str, options: Any) -> list[dict[str, Any]]:
    """Policy-update tokens per second, and the fraction of the card's peak."""
    tiny = options.tiny
    model = make_model(shape, 0, torch.bfloat16, device)
    batch = UpdateShape(vocabulary=shape.vocab)
    data: list[dict[str, Any]] = make_rows(replace(batch, groups=1, size=3) if tiny else batch)
    add_own_logprobs(model, data)
    experience = rows_to_learn_from(data)
    seconds: dict[int, float] = {}
    for micro in MICRO_TOKENS[:1] if tiny else MICRO_TOKENS:
        settings = TrainSettings(epochs=1, minibatches=1, lr=1e-9, micro_tokens=micro)
        try:
            clock, records = learn(model.to(device), experience, settings, updates=2 if tiny else 6)
        except torch.cuda.OutOfMemoryError:
            break  # larger ones will not fit either
        seconds[micro] = statistics.median(clock.seconds[1:])
    ids = [row["ids"] for row in data]
    operations = 3 * forward_operations(model.config, ids, sum(sum(row["made"]) for row in data))
    sizes, each = ((128, 256), 0.05) if tiny else ((2048, 4096, 8192, 16384), 1.0)
    peak, nominal = matmul_rate(torch.bfloat16, device, sizes, each), nominal_peak(hardware(device))
    tokens, best = sum(map(len, ids)), min(seconds.values())
    row = table_row(
        "policy-update tokens/s; of limit: MFU",
        "report",
        "tokens/s",
        [tokens / best],
        limit=Limit(
            tokens * peak / operations,
            f"{operations / 1e9:,.0f} GFLOP an update (3 forward passes over distinct tokens, logits of trained tokens "
            f"only) at {peak / 1e12:.4g} TFLOP/s, the bf16 rate of a large matrix product",
        ),
        mfu=operations / best / peak,
        nominal_peak=nominal,
        mfu_of_nominal=None if nominal is None else operations / best / nominal,
        seconds_by_micro_tokens=seconds,
        computed_over_real_tokens=records[-1]["packing"],
        parameters=sum(p.numel() for p in model.parameters()),
    )
    return [row]


def dream_rows(shape: Shape, device: str, options: Any) -> list[dict[str, Any]]:
    """Dreamed turns per second of all sides, and what the engine's turns and tokens cost."""
    race = Race(shape, options.out / "gpu.work", options.threads, device, isolated=not options.tiny)
    ours, generate, vllm = "in process, bf16", "generate, bf16", "vLLM, bf16"
    race.enter(ours, Side("inprocess", "bfloat16"))
    race.enter(generate, Side("generate", "bfloat16"))
    race.enter(vllm, Side("vllm", "bfloat16", options.vllm_python, eager=options.tiny))
    race.run(rounds=1, dreams=1 if options.quick else options.dreams)
    seconds = 0.01 if options.tiny else 1.0
    limits = dream_limits(shape, torch.bfloat16, device, seconds)
    return [
        race.row("dreamed turns/s against generate, whole history each turn", "report", ours, generate, limits),
        race.row("dreamed turns/s against vLLM", "report", ours, vllm, limits),
        race.long_row(ours, "report", seconds=seconds),
        *decode_rows(shape, torch.bfloat16, device, length=8 if options.tiny else 64, seconds=5 * seconds),
    ]


if __name__ == "__main__":
    main()
