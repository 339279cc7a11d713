"""What each compiled step is worth end to end: the demo, shortened, with that step alone left to torch.

    python -m tests.benchmarks.kernels --demo outputs/demo --rounds 2

Every variant runs the stages in a process of its own on the log of a finished demo, one after the other, so that the
machine's moods fall on all. What counts is the processor time of a step on one thread: the median of a run, and of
those the least, because neighbours only ever slow a run down. The last column weighs the stages by their steps in a
whole demo. Writes ``<out>/kernels.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lightning.pytorch import Callback

from imagination.cli import main as imagine
from imagination.learning import trainer
from imagination.settings import Config
from policy.lm import fused_llama
from policy.lm.engines.inprocess import decode, slots
from policy.lm.pack import packed_attention

STEPS = {"fit-world-model": ("fit.steps", 12), "clone": ("clone.steps", 20), "train": ("train.updates", 4)}
FEW = ["tripwires.enabled=false"]


def attention_of_training() -> AbstractContextManager[Any]:
    """Attention of training, laid out in rectangles for torch."""

    def apply(q: Any, k: Any, v: Any, packing: Any, native: Any) -> Any:
        module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True, training=True)
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        return packed_attention(module, q, k, v, None, packing=packing, scaling=q.shape[-1] ** -0.5)[0][0]  # type: ignore[arg-type]

    return mock.patch.object(fused_llama, "CausalAttention", SimpleNamespace(apply=apply))


def layers_of_training() -> AbstractContextManager[Any]:
    """Norms, gates and rotations of training."""
    stack = ExitStack()
    for name in ("RMSNorm", "SwiGLU", "RoPE"):
        plain = getattr(fused_llama, name)
        of_torch = SimpleNamespace(apply=lambda *given, plain=plain: plain.apply(*given[:-1], None))
        stack.enter_context(mock.patch.object(fused_llama, name, of_torch))
    return stack


def attention_of_decoding() -> AbstractContextManager[Any]:
    """Attention of new tokens over slots."""
    return mock.patch.object(slots, "native_attention", return_value=None)


def layers_of_decoding() -> AbstractContextManager[Any]:
    """Norms, gates, rotations and the writing of keys of decoding."""
    return mock.patch.object(decode, "native_layers", return_value=None)


def everything() -> AbstractContextManager[Any]:
    """All of them."""
    return mock.patch.dict(os.environ, {"IMAGINATION_NATIVE": "0"})


VARIANTS = {
    "none": nullcontext,
    **{
        f.__name__: f
        for f in (attention_of_training, layers_of_training, attention_of_decoding, layers_of_decoding, everything)
    },
}


def child(variant: str, stage: str, folder: Path, settings: list[str]) -> None:
    """Runs a stage in this process until its last step, and prints the processor time of the median step."""
    ticks: list[float] = []

    class Clock(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            ticks.append(time.process_time())

        def on_train_end(self, *_: Any) -> None:
            print(statistics.median(late - early for early, late in itertools.pairwise(ticks)), flush=True)
            os._exit(0)  # what a stage does after training is not measured

    make = trainer.L.Trainer
    clocked = mock.patch.object(trainer.L, "Trainer", lambda **given: make(**_with(given, Clock())))
    with clocked, VARIANTS[variant]():
        sys.exit(imagine([stage, f"run={folder.name}", f"output={folder.parent}", *settings]))


def _with(given: dict[str, Any], callback: Callback) -> dict[str, Any]:
    return {**given, "callbacks": [*given["callbacks"], callback]}


def seconds(variant: str, stage: str, demo: Path, out: Path, steps: int) -> float:
    """Processor time of a step of ``stage`` on a copy of the demo."""
    folder = out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(demo, folder)
    settings = [f"{STEPS[stage][0]}={steps}", *FEW]
    command = [sys.executable, "-m", "tests.benchmarks.kernels", "--child", variant, stage, str(folder), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(made.stderr)
    return float(made.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--out", type=Path, default=Path("outputs/kernels"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stages", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        variant, stage, folder, *settings = given.child
        return child(variant, stage, Path(folder), settings)
    given.out.mkdir(parents=True, exist_ok=True)
    config = Config()
    full = {"fit-world-model": config.fit.steps, "clone": config.clone.steps, "train": config.train.updates}
    measured: dict[str, dict[str, list[float]]] = {v: {s: [] for s in STEPS} for v in VARIANTS}
    for _ in range(given.rounds):
        for variant in VARIANTS:
            for stage in given.stages:
                measured[variant][stage].append(seconds(variant, stage, given.demo, given.out, STEPS[stage][1]))
                print(f"{variant} {stage}: a step {measured[variant][stage][-1]:.3f} s", flush=True)
            (given.out / "kernels.json").write_text(json.dumps(measured, indent=1))
    whole_of = {v: {s: full[s] * min(x) for s, x in of.items() if x} for v, of in measured.items()}
    total = {v: sum(of.values()) for v, of in whole_of.items()}
    print("| left to torch | " + " | ".join(given.stages) + " | together |\n" + "|---" * (len(given.stages) + 2) + "|")
    for v, of in whole_of.items():
        cells = [f"{of[s] / whole_of['none'][s]:.2f}" for s in given.stages]
        print(f"| {v.replace('_', ' ')} | {' | '.join(cells)} | {total[v] / total['none']:.2f} |")


if __name__ == "__main__":
    main()
