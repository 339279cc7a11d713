"""What it saves to learn while players play: a real world whose step takes 0.2 s, with updates that take about as long.

``python -m tests.benchmarks.scale --seeds 0 1 2 3 4``; writes ``outputs/scale/<seed>-<max_staleness>``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.train import train
from imagination.settings import Config
from imagination.settings.compose import load_config
from tests.support.corridor_world import CorridorSettings, CorridorWorld, register
from tests.support.killing import summary_of
from tests.support.tiny import write_log

SIZES = "{hidden: 32, layers: 2, heads: 2, kv_heads: 2, mlp: 64, context: 256}"
WORDS = (
    *("vocab_size=512", f"worldmodel={SIZES}", f"policy={SIZES}", "logger=none", "env=corridors"),
    *("fit.steps=20", "fit.copying_steps=0", "fit.batch_tokens=1024", "clone.copying_steps=0"),
    *("clone.batch_tokens=1024", "clone.steps=160", "clone.lr=5e-3", "clone.agents=[noisy]", "collect.max_turns=5"),
    *("dream.max_turns=5", "tripwires.enabled=false", "train.world=real", "collect.workers=32", "scale=ray"),
    *("train.groups=4", "train.group_size=8", "train.checkpoint_every=1000", "train.updates=20"),
    *("train.epochs=16", "train.lr=3e-4"),  # so that to learn takes about as long as to play
)


def config(seed: int, *words: str) -> Config:
    return load_config([*WORDS, f"seed={seed}", *words], Config)


def trained(folder: Path, seed: int, most: int, words: list[str]) -> dict[str, Any]:
    train(config(seed, f"train.max_staleness={most}", *words), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["stage"] == "train"]
    success = [line.get("real_success") for line in lines]
    return {"success": success, "summary": summary_of(folder), "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("outputs/scale"))
    parser.add_argument("--most", type=int, default=2, help="the staleness that is compared with none")
    parser.add_argument("--seconds", type=float, default=0.2, help="that a step takes")
    parser.add_argument("words", nargs="*", help="other settings, such as train.updates=20")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        packages = arguments.output / "packages"
        shutil.rmtree(packages, ignore_errors=True)
        register(packages.resolve(), patch)
        for seed in arguments.seeds:
            cloned = arguments.output / f"{seed}-cloned"
            shutil.rmtree(cloned, ignore_errors=True)
            write_log(cloned)
            CorridorWorld().generate(cloned / "games", {}, 0, CorridorSettings(arguments.seconds), lambda *_: None, 1)
            fit_world_model(config(seed), cloned)
            clone(config(seed), cloned)
            row = {}
            for most in (0, arguments.most):
                folder = arguments.output / f"{seed}-{most}"
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(cloned, folder)
                row[most] = trained(folder, seed, most, arguments.words)
            rows.append(row)
            show(seed, row)
    differences = [mean(row[arguments.most]["success"]) - mean(row[0]["success"]) for row in rows]
    ratios = [seconds(row[arguments.most]) / seconds(row[0]) for row in rows]
    print(f"time {statistics.fmean(ratios):.2f} of that without staleness ({min(ratios):.2f} to {max(ratios):.2f})")
    spread = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    print(
        f"mean success of the updates {statistics.fmean(differences):+.3f}, standard error {spread:.3f}, n={len(rows)}"
    )


def seconds(done: dict[str, Any]) -> float:
    """From the end of the first update to that of the last: players start at their own pace."""
    times = [line["time"] for line in done["lines"]]
    return float(times[-1] - times[0])


def mean(success: list[float | None]) -> float:
    return statistics.fmean(value for value in success if value is not None)


def show(seed: int, row: dict[int, dict[str, Any]]) -> None:
    for most, done in row.items():
        waits = [line["learner_waits"] for line in done["lines"] if "learner_waits" in line]
        steps = done["summary"]["real_steps"]["train"]
        print(
            f"seed {seed}, max_staleness={most}: {seconds(done):.1f} s, success {mean(done['success']):.3f}, "
            f"of the last five updates {mean(done['success'][-5:]):.3f}, {steps} real steps, "
            f"learner waits {statistics.fmean(waits) if waits else float('nan'):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    begun = time.monotonic()
    main()
    print(f"{time.monotonic() - begun:.0f} s in all")
