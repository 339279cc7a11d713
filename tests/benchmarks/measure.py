"""What the benchmarks share: options, workers in processes of their own, and how much work a batch of rows is."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from tests.benchmarks.machine import MUCH_STOLEN, StolenTime, cores

disable_progress_bar()  # models load in a moment
ROOT = Path(__file__).resolve().parents[2]


def arguments(description: str | None, opponent: str = "") -> argparse.ArgumentParser:
    """The options that the benchmarks share; an opponent, such as ``trl``, lives in a Python of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder for the result")
    parser.add_argument("--threads", type=int, default=cores(), help="of torch, for all sides")
    parser.add_argument("--quick", action="store_true", help="everything once and small, to see that it works")
    if opponent:
        default = Path(f".venv-{opponent}/bin/python")
        parser.add_argument(f"--{opponent}-python", type=Path, default=default, help=f"a Python that has {opponent}")
    return parser


def run_worker(
    python: Path | str, module: str, spec: Mapping[str, Any], folder: Path, threads: int, device: str = "cpu"
) -> dict[str, Any]:
    """Runs ``python -m tests.benchmarks.<module> SPEC OUT`` and returns what it wrote.

    Raises:
        RuntimeError: it failed; the message ends with what it said last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec_path, out = folder / f"{module}.spec.json", folder / f"{module}.out.json"
    spec_path.write_text(json.dumps(spec))
    out.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
    }
    command = [os.path.abspath(python), "-m", f"tests.benchmarks.{module}", str(spec_path), str(out)]
    clock = StolenTime()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    stolen = clock.share()
    if stolen > MUCH_STOLEN:
        print(f"note: other virtual machines took {stolen:.0%} of this one's time during {module}", flush=True)
    if done.returncode or not out.exists():
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def worker_files() -> tuple[dict[str, Any], Path]:
    """A worker's side of ``run_worker``: what to do, and where to write what came of it."""
    return json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])


def forward_operations(config: Any, rows: Sequence[Sequence[int]], predicted: int) -> float:
    """Multiplications and additions of one forward pass over distinct tokens, each prefix computed once.

    Args:
        config: of a Llama or Qwen2 of transformers.
        rows: token ids; what two rows have in common from their start on counts once.
        predicted: for how many tokens logits are needed.
    """
    hidden, dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    projections = 2 * hidden * hidden + 2 * hidden * config.num_key_value_heads * dim
    weights = config.num_hidden_layers * (projections + 3 * hidden * config.intermediate_size)
    tokens, pairs = 0, 0
    before: Sequence[int] = ()
    for row in sorted(map(list, rows)):
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
    ordered = sorted(map(list, rows))
    return sum(len(b) - shared_prefix(a, b) for a, b in zip([(), *ordered], ordered, strict=False))
