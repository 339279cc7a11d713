"""How fast trained models dream: 64 TextWorld episodes at a time, about 8 tokens an action and 48 an answer.

Real text, in contrast to ``rollouts``: what a trained world model answers often stands in its log, so drafts looked up
there save most steps of decoding, and change no word in fp32 (the result says how many answers were the same).
Opponents are transformers' ``generate`` on whole histories, vLLM (eager and compiled, the faster counts) and the same
engine without drafts. Everyone plays the same starts with the same models at temperature 1, in a process of its own, in
turns.

The log and both models are made in ``outputs/bench-dreams`` where they are missing (about ten minutes).
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from typing import Any

from imagination.cli import prepare
from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.fit_world_model import fit_world_model
from tests.benchmarks.measure import arguments, run_worker
from tests.benchmarks.table import Limit, table_row, write

_SHAPE = ("hidden=192", "layers=5", "heads=3", "kv_heads=1", "mlp=512", "context=2048")
# A small vocabulary makes TextWorld's answers as long in tokens as those of richer worlds.
FULL = [
    "run=bench-dreams",
    "vocab_size=400",
    "dream={max_turns: 10, max_tokens: 400}",
    "max_action_tokens=32",
    "collect.episodes=500",
    "fit.steps=800",
    *(f"{model}.{one}" for model in ("worldmodel", "policy") for one in _SHAPE),
]
QUICK = ["run=bench-quick", "preset=tiny"]


def main() -> None:
    parser = arguments(__doc__, "vllm")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    overrides = QUICK if options.quick else FULL
    _make_models(overrides)
    folder = options.out / "dreams.work"
    folder.mkdir(parents=True, exist_ok=True)

    def play(engine: str, seed: int, eager: bool = True, limit: float = 0.0) -> dict[str, Any]:
        episodes = 16 if options.quick else 64
        spec = {"overrides": overrides, "engine": engine, "eager": eager, "episodes": episodes, "seed": seed}
        python = options.vllm_python if engine == "vllm" else sys.executable
        return run_worker(python, "dreams_worker", spec | {"limit": limit}, folder, options.threads)

    missing, eager = "", True
    sides = ["drafts", "inprocess", "generate"]
    if not options.vllm_python.exists():
        missing = f"{options.vllm_python} is not there; the Makefile makes it"
    else:
        sides.append("vllm")
        if not options.quick:
            eager = play("vllm", 0)["turns/s"] > play("vllm", 0, eager=False)["turns/s"]
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed in range(1 if options.quick else options.rounds):
        for side in sides[:: 1 if seed % 2 == 0 else -1]:
            found[side].append(play(side, seed, eager))
            print(f"{side}: {found[side][-1]['turns/s']:.1f} turns/s", flush=True)
    rates = {side: [one["turns/s"] for one in runs] for side, runs in found.items()}
    plain = play("inprocess", 0, limit=0.1 if options.quick else 1.0)
    limit = Limit(plain["limit"], "what both models read and wrote without drafts costs only its matrix products")
    pairs = [
        (a, b)
        for x, y in zip(found["drafts"], found["inprocess"], strict=True)
        for a, b in zip(x["digests"], y["digests"], strict=False)
    ]

    def row(opponent: str, target: str, side: str) -> dict[str, Any]:
        what = f"dreamed turns/s of trained models, drafts from the log, against {opponent}"
        why = missing if side == "vllm" else ""
        return table_row(what, target, "turns/s", rates["drafts"], rates.get(side, []), limit=limit, not_measured=why)

    rows = [
        row("generate, whole history each turn", ">= 10", "generate"),
        row("vLLM", ">= 1.5", "vllm"),
        row("the same engine without drafts", "report", "inprocess"),
    ]
    kept = ("tokens of an action", "tokens of an answer", "acceptance", "steps", "reused share of prompts")
    write(
        "dreams",
        rows,
        options,
        run=overrides,
        parameters=plain["parameters"],
        same_answers=[sum(a == b for a, b in pairs), len(pairs)],
        acceptance=statistics.median(one["acceptance"] for one in found["drafts"]),
        vllm_eager=eager,
        details={side: [{k: one[k] for k in kept} for one in found[side]] for side in ("drafts", "inprocess")},
    )


def _make_models(overrides: list[str]) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        config, folder = prepare(overrides)
        for made, stage in (("log", collect), ("models/worldmodel", fit_world_model), ("models/policy-clone", clone)):
            if not (folder / made).exists():
                stage(config, folder)


if __name__ == "__main__":
    main()
