"""What both benchmarks need: workers in processes of their own, the machine's matmul rate, and the form of a result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # models load in a moment
ROOT = Path(__file__).resolve().parents[2]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that both benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and for what the workers exchange")
    parser.add_argument("--trl-python", type=Path, default=Path(".venv-trl/bin/python"), help="a Python that has TRL")
    parser.add_argument("--threads", type=int, default=_cores(), help="of torch, in both")
    parser.add_argument("--quick", action="store_true", help="everything once and small, to see that it works")
    return parser


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_worker(python: Path | str, module: str, spec: Mapping[str, Any], folder: Path, threads: int) -> dict[str, Any]:
    """Runs ``python -m tests.benchmarks.<module> SPEC OUT`` and returns what it wrote.

    Raises:
        RuntimeError: it failed; the message ends with what it said last.
    """
    spec_path, out = folder / f"{module}.spec.json", folder / f"{module}.out.json"
    spec_path.write_text(json.dumps(spec))
    out.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [os.path.abspath(python), "-m", f"tests.benchmarks.{module}", str(spec_path), str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def worker_files() -> tuple[dict[str, Any], Path]:
    """A worker's side of ``run_worker``: what to do, and where to write what came of it."""
    return json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])


def matmul_rate(dtype: torch.dtype = torch.float32, size: int = 1536, seconds: float = 2.0) -> float:
    """Floating-point operations per second of a large matrix product, the best of many: what the machine can do."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - before)
    return 2 * size**3 / best


def forward_operations(config: Any, rows: Sequence[Sequence[int]], predicted: int) -> float:
    """Multiplications and additions of one forward pass over distinct tokens, each prefix computed once.

    Args:
        config: of a Llama of transformers.
        rows: token ids; what two rows have in common from their start on counts once.
        predicted: for how many tokens logits are needed.
    """
    hidden, dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    projections = 2 * hidden * hidden + 2 * hidden * config.num_key_value_heads * dim
    weights = config.num_hidden_layers * (projections + 3 * hidden * config.intermediate_size)
    tokens, pairs = 0, 0
    before: Sequence[int] = ()
    for row in sorted(rows):
        shared = shared_prefix(before, row)
        tokens += len(row) - shared
        pairs += (len(row) * (len(row) + 1) - shared * (shared + 1)) // 2  # a token attends to itself and its past
        before = row
    attention = 4 * config.num_hidden_layers * hidden * pairs
    return float(2 * weights * tokens + attention + 2 * predicted * hidden * config.vocab_size)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two rows have in common."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def distinct_tokens(rows: Sequence[Sequence[int]]) -> int:
    """Tokens that are left when every prefix is counted once."""
    ordered = sorted(rows)
    return sum(len(b) - shared_prefix(a, b) for a, b in zip([(), *ordered], ordered, strict=False))


def hardware(threads: int) -> dict[str, Any]:
    """What the numbers were taken on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line[:10] == "model name"]
        cpu = names[0] if names else cpu
    return {"cpu": cpu, "cores": _cores(), "threads": threads, "torch": torch.__version__, "os": platform.system()}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Rates of pairs of runs that followed each other: the median of their ratios, its range, and both medians."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ratio": statistics.median(each),
        "ratio_range": [min(each), max(each)],
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Writes the result and prints the one line that matters."""
    missing = _KEYS - result.keys()
    if missing:
        raise ValueError(f"a result needs {sorted(missing)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    low, high = result["ratio_range"]
    print(
        f"{result['name']}: {result['ratio']:.2f} [{low:.2f}, {high:.2f}] (target {result['target']}); "
        f"{result['ours']:.0f} against {result['theirs']:.0f} {result['unit']} -> {path}"
    )


_KEYS = {
    *("name", "what", "target", "ratio", "ratio_range", "ours", "theirs", "unit"),
    *("settings", "hardware", "command", "limit"),
}
