"""What is a log worth to a policy beyond imitating its experts? Early experience, arm by arm, in TextWorld.

    python -m tests.benchmarks.early_experience --seeds 0 1
    python -m tests.benchmarks.early_experience --seeds 0 --arms clone hindsight
    python -m tests.benchmarks.early_experience --table

Each seed has its own games, log and world model (``<out>/seed-<n>/base``), from which every arm clones a policy by the
same number of steps, and then plays the same games with the same seeds. Held-out games choose nothing.

A part is one arm of one seed. What is there is not done again, and what was interrupted goes on. Writes ``table.md``
into ``<out>`` after every part.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.experiments.arms import hash_of, play_clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.reflect import reflect
from imagination.commands.relabel import relabel
from imagination.runs.fingerprint import fingerprint
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.files import write_atomically
from tests.benchmarks import study
from worldmodel.evaluation.proportions import Proportion

REFUSALS = (
    "^(You can't|That's not|That's already|That's plainly|That can't|That doesn't|I didn't|I only|It isn't|What do you"
    "|You'll have to|You have to|You need to|You already|First you)"
)
SIZES = (
    "hidden=128",
    "layers=3",
    "mlp=384",
)  # a little smaller than the preset's, so that an arm is a matter of minutes
SETTINGS = (
    *("preset=textworld", "logger=none", "games.train=150", "games.heldout=40", "collect.episodes=6"),
    *("collect.heldout_episodes=1", f"worldmodel.refusals={REFUSALS}", "max_action_tokens=128", "vocab_size=1024"),
    *(f"{model}.{size}" for model in ("worldmodel", "policy") for size in SIZES),
    *("fit.steps=800", "clone.agents=[expert]", "clone.steps=300", "clone.batch_tokens=2048"),
    *("clone.copying_steps=100", "clone.keep_every=0", "hindsight.max_turns=5", "reflect.min_confidence=0.05"),
    *("evaluate.episodes=1", "evaluate.tasks=40", "evaluate.heldout_episodes=2"),
)
SHARED = ("games", "log", "tokenizer", "models/worldmodel")
Stage = Callable[[Config, Path], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to clone: its settings, and the stages before it.

    Attributes:
        beside: the arm that it is compared with: the same without what it adds.
    """

    name: str
    title: str
    settings: tuple[str, ...] = ()
    before: tuple[Stage, ...] = ()
    beside: str = "clone"


ARMS = (
    Arm("clone", "clone from the world model's weights", beside="scratch"),
    Arm("hindsight", "and failures with the goals they reached", ("clone.supplements=[hindsight]",), (relabel,)),
    Arm("reflections", "and reflections", ("clone.supplements=[reflections]",), (reflect,)),
    Arm("scratch", "clone from random weights", ("clone.from_world_model=false",), beside=""),
    Arm(
        "scratch-world",
        "half of the steps on what the world answers, before",
        ("clone.from_world_model=false", "clone.world_steps=150", "clone.steps=150"),
        beside="scratch",
    ),
    Arm("observations", "and what the world answers, weight 0.5", ("clone.observation_weight=0.5",)),
)
HEAD = (*("policy", "compared with", "seeds", "success, training games", "held-out games", "n"), "difference, held-out")


def main() -> int:
    names = [arm.name for arm in ARMS]
    parser = study.make_parser(__doc__, "outputs/early-experience", [0, 1])
    parser.add_argument("--arms", nargs="*", choices=names, default=names, help="none prepares the base alone")
    options, settings = study.options_and_settings(parser, "all arms")

    def make(seed: int) -> None:
        place = options.out / f"seed-{seed}"
        study.run_once(part_config(seed, settings), place / "base", collect, fit_world_model)
        for arm in (arm for arm in ARMS if arm.name in options.arms):
            print(f"== seed {seed}: {arm.name}", flush=True)
            make_part(arm, part_config(seed, [*arm.settings, *settings]), place)
            write_table(options.out)

    parts = [(f"seed {seed}", partial(make, seed)) for seed in options.seeds]
    return study.run_parts(options, parts, lambda: write_table(options.out))


def part_config(seed: int, settings: Sequence[str]) -> Config:
    return load_config([*SETTINGS, *settings, f"seed={seed}"], Config)


def make_part(arm: Arm, config: Config, place: Path) -> None:
    """Clones and plays one arm. Writes ``result.json`` into its folder."""
    base, there = place / "base", place / arm.name
    made_of = f"{fingerprint(config)}/{hash_of(base, ['models/worldmodel'])}"
    result = there / "result.json"
    if result.exists() and json.loads(result.read_text())["made_of"] == made_of:
        return
    run = RunFolder(there, config.seed)
    for name in SHARED:
        shutil.rmtree(there / name, ignore_errors=True)
        shutil.copytree(base / name, there / name)
    kept = ("vocab_size", "tokenizer_kind", "world_model_form", "best_return")
    run.update({key: value for key, value in RunFolder(base, config.seed).summary.items() if key in kept})
    for stage in (*arm.before, clone):
        stage(config, there)
    notes = {key: run.summary[key] for key in ("reflected", "relabelled") if key in run.summary}
    played = play_clone(config, there)
    write_atomically(result, json.dumps({"made_of": made_of, "seed": config.seed, **notes, **played}, indent=1))


def write_table(out: Path) -> str:
    """``table.md`` of all parts that are there; what it says."""
    found = {
        arm.name: [json.loads(p.read_text()) for p in sorted(out.glob(f"seed-*/{arm.name}/result.json"))]
        for arm in ARMS
    }
    return study.write_files(out, table=table(found))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A line an arm; differences are over the seeds that both arms have, paired by game."""
    titles = {arm.name: arm.title for arm in ARMS}
    rows = []
    for arm in ARMS:
        own = found.get(arm.name, [])
        seeds = {part["seed"] for part in own} & {part["seed"] for part in found.get(arm.beside, [])}
        one, other = (
            pooled([p for p in found[name] if p["seed"] in seeds], "heldout") if seeds else None
            for name in (arm.name, arm.beside)
        )
        trained, held = pooled(own, "train"), pooled(own, "heldout")
        beside = titles.get(arm.beside, study.DASH)
        rows.append((arm.title, beside, len(own), trained.cell, held.cell, held.n, study.difference(one, other)))
    return study.markdown(HEAD, rows)


def pooled(parts: Sequence[dict[str, Any]], split: str) -> Proportion:
    """One proportion of several seeds; each seed has games of its own."""
    played = [(part["seed"], Proportion.from_json(part[f"{split}_tasks"])) for part in parts]
    by_task = {f"{seed}/{task}": counts for seed, one in played for task, counts in one.by_task.items()}
    failures = sum(one.failures for _, one in played)
    return Proportion(sum(hits for hits, _ in by_task.values()), sum(n for _, n in by_task.values()), failures, by_task)


if __name__ == "__main__":
    sys.exit(main())
