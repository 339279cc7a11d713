"""Policy update: tokens per second of ``PolicyModule`` against TRL's ``GRPOTrainer`` on the same rows and weights.

A batch of groups of multi-turn episodes (see ``update_ours``), with log-probs of the policy itself, as on-policy
rollouts have them. One update is one pass and one optimiser step, AdamW with the same numbers, gradient clipping
included; the learning rate is so small that every repetition is the same on-policy update. A token counts once per row
that contains it, whatever a side computes for it. Both sides run in turns, several times.

Before that, both make two steps on the batch with a real learning rate and hand in their gradients, so that the result
can say how equal the work is: at the second step, ratios differ from 1 and some are clipped.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from policy.lm.backbone import build_model, save_checkpoint
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from tests.benchmarks.machine import matmul_rate
from tests.benchmarks.measure import arguments, distinct_tokens, forward_operations, run_worker, shared_prefix
from tests.benchmarks.table import Limit, table_row, write
from tests.benchmarks.update_ours import FIRST_ID, Shape, add_own_logprobs, make_rows

MODEL = ModelSettings(hidden=192, layers=6, heads=3, kv_heads=3, mlp=512, context=1024)
SAME_WORK = 1e-3  # largest relative difference of gradients; rounding is far below


def main() -> None:
    parser = arguments(__doc__, "trl")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--updates", type=int, default=2, help="timed in each run, after one that is not")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--minibatches", type=int, default=1, help="optimiser steps per update")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    what = "policy-update tokens/s against TRL's GRPOTrainer"
    if not options.trl_python.exists():
        missing = f"{options.trl_python} is not there; `make bench` makes it"
        write("trl_update", [table_row(what, ">= 2", "tokens/s", [], not_measured=missing)], options)
        return
    if options.quick:
        options.rounds, options.updates = 1, 1
    folder = options.out / "trl_update.work"
    folder.mkdir(parents=True, exist_ok=True)
    _make_model(folder / "model")
    cases = {what: (">= 2", Shape()), f"{what}, only the start shared": ("report", Shape(spread=0.97))}
    if options.quick:
        cases = {what: (">= 2", Shape(groups=1, size=6))}
    found: list[dict[str, Any]] = []
    best = 0
    tried: dict[int, float] = {}
    for name, (target, shape) in cases.items():
        data = _write_rows(folder, shape)
        agreement = _agreement(folder, shape, options)
        if not best:  # found once, for the main case
            best, tried = _fastest(folder, shape, len(data), options)
        ours, theirs = _race(folder, shape, data, best, options)
        limit = _limit(folder, data, options)
        batch = _describe(data, shape)
        found.append(table_row(name, target, "tokens/s", ours, theirs, limit=limit, agreement=agreement, batch=batch))
    write(
        "trl_update",
        found,
        options,
        model=asdict(MODEL),
        dtype=options.dtype,
        optimiser_steps_per_update=options.minibatches,
        updates_per_round=options.updates,
        trl_micro_batch=best,
        trl_seconds_by_micro_batch=tried,
    )


def _make_model(folder: Path) -> None:
    """A Llama with 2048 tokens; those beyond bytes and special tokens are fillers, as no text is ever read."""
    fillers = [f"<filler {i}>" for i in range(2048 - 256 - FIRST_ID)]
    tokenizer = train_tokenizer(["no text"], vocab_size=2048, phrases=fillers)
    if len(tokenizer) != Shape().vocabulary:
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} tokens, not {Shape().vocabulary}")
    save_checkpoint(build_model(MODEL, tokenizer, seed=0), tokenizer, folder)


def _write_rows(folder: Path, shape: Shape) -> list[dict[str, Any]]:
    """The rows with the policy's own log-probs of their tokens."""
    rows: list[dict[str, Any]] = make_rows(shape)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    add_own_logprobs(model, rows)
    (folder / "rows.json").write_text(json.dumps(rows))
    return rows


def _spec(folder: Path, shape: Shape, options: Any, **changed: Any) -> dict[str, Any]:
    return {
        "model": str((folder / "model").resolve()),
        "rows": str((folder / "rows.json").resolve()),
        "scratch": str((folder / "scratch").resolve()),
        "group_size": shape.size,
        "dtype": options.dtype,
        "epochs": 1,
        "minibatches": options.minibatches,
        "updates": options.updates + 1,
        "lr": 1e-9,
        **changed,
    }


def _agreement(folder: Path, shape: Shape, options: Any) -> dict[str, Any]:
    """How far the two sides' losses, advantages and gradients are apart, always in fp32.

    Raises:
        RuntimeError: so far that they do not do the same work.
    """
    common = {"dtype": "float32", "epochs": 2, "minibatches": 1, "updates": 1, "lr": 1e-3}
    found, gradients = {}, {}
    for side, python in (("ours", sys.executable), ("trl", options.trl_python)):
        path = folder / f"{side}.gradients.pt"
        spec = _spec(folder, shape, options, gradients=str(path.resolve()), per_device=[shape.size // 3], **common)
        found[side] = run_worker(python, f"update_{side}", spec, folder, options.threads)
        gradients[side] = [_flat(step) for step in torch.load(path)]
        path.unlink()
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(gradients["ours"], gradients["trl"], strict=True)]
    theirs = found["trl"]["runs"][str(shape.size // 3)]["losses"]
    worst = max(abs(a - b) for a, b in zip(found["ours"]["advantages"], found["trl"]["advantages"], strict=True))
    if max(apart) > SAME_WORK or worst > 1e-3:
        raise RuntimeError(f"the sides do not do the same work: gradients differ by {apart}, advantages by {worst}")
    return {
        "relative difference of the gradient at steps 1 and 2": apart,
        "largest difference of an advantage": worst,
        "mean loss of both steps, ours": found["ours"]["losses"][0],
        "mean loss of both steps, TRL": sum(theirs) / len(theirs),
    }


def _flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient[name].flatten().double() for name in sorted(gradient)])


def _fastest(folder: Path, shape: Shape, rows: int, options: Any) -> tuple[int, dict[int, float]]:
    """The size of micro-batches that TRL is fastest with here, and the seconds of all that were tried."""
    sizes = [s for s in (2, 4, 8, 12, 24) if rows % (s * options.minibatches) == 0]
    if options.quick:
        return sizes[0], {}
    spec = _spec(folder, shape, options, per_device=sizes, updates=2)
    runs = run_worker(options.trl_python, "update_trl", spec, folder, options.threads)["runs"]
    seconds = {int(size): run["seconds"][-1] for size, run in runs.items()}
    return min(seconds, key=lambda size: seconds[size]), seconds


def _race(
    folder: Path, shape: Shape, data: list[dict[str, Any]], best: int, options: Any
) -> tuple[list[float], list[float]]:
    """Tokens per second of both sides, in turns."""
    tokens = sum(len(row["ids"]) for row in data)
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.rounds):
        spec = _spec(folder, shape, options, per_device=[best])
        ours = run_worker(sys.executable, "update_ours", spec, folder, options.threads)
        theirs = run_worker(options.trl_python, "update_trl", spec, folder, options.threads)
        rates[0].append(tokens / statistics.median(ours["seconds"][1:]))
        rates[1].append(tokens / statistics.median(theirs["runs"][str(best)]["seconds"][1:]))
    return rates


def _limit(folder: Path, data: list[dict[str, Any]], options: Any) -> Limit:
    """What the update would run at if this machine did nothing but its matrix products, at full rate."""
    config = AutoModelForCausalLM.from_pretrained(folder / "model").config
    rate = matmul_rate(getattr(torch, options.dtype))
    made = sum(sum(row["made"]) for row in data)
    operations = 3 * forward_operations(config, [row["ids"] for row in data], made)
    return Limit(
        sum(len(row["ids"]) for row in data) / (operations / rate),
        f"{operations / 1e9:.0f} GFLOP an update (3 forward passes over distinct tokens, logits of trained tokens "
        f"only) at {rate / 1e9:.0f} GFLOP/s, the rate of a large matrix product",
    )


def _describe(rows: list[dict[str, Any]], shape: Shape) -> dict[str, Any]:
    ids = [row["ids"] for row in rows]
    tokens, padded = sum(map(len, ids)), len(ids) * max(map(len, ids))
    return {
        **asdict(shape),
        "rows": len(rows),
        "tokens": tokens,
        "tokens per row": tokens / len(rows),
        "trained tokens": sum(sum(row["made"]) for row in rows),
        "share of tokens that are distinct prefixes": distinct_tokens(ids) / tokens,
        "share of padding in one rectangle": 1 - tokens / padded,
        "turns that a row shares with another of its group": _shared_turns(rows),
    }


def _shared_turns(rows: list[dict[str, Any]]) -> float:
    """Mean over rows of the first turns, action included, that some other row of the group has as well."""
    counts = []
    for i, row in enumerate(rows):
        others = [other["ids"] for j, other in enumerate(rows) if j != i and other["group"] == row["group"]]
        shared = max(shared_prefix(row["ids"], other) for other in others)
        ends = [t + 1 for t, mine in enumerate(row["made"]) if mine and row["made"][t + 1 : t + 2] != [1]]
        counts.append(sum(end <= shared for end in ends))
    return sum(counts) / len(counts)


if __name__ == "__main__":
    main()
