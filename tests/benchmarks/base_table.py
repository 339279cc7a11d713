"""What a base model is worth to a log: exact answers on unseen tasks after so many tokens, with it and without.

    python -m tests.benchmarks.base_table
    python -m tests.benchmarks.base_table --worlds mapreader babyai --models scratch mine:outputs/base/models/base

Each world has one log (its preset, smaller, held-out tasks of the dev fold where it has one). A model reads so many
tokens of it (``fit.steps * fit.batch_tokens``; 0: it is asked as it is) and then answers the logged turns of the
held-out tasks, greedily and without rules. Turns are told apart by what was right to answer: a refusal (as the world
words it), a text that the episode had shown before, or a new one.

What exists is not done again. Writes ``<out>/table.md`` after every part; ``--table`` only reads.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from imagination.commands.experiments.arms import fit_beside, prepared_run
from imagination.evaluation.world_model_eval import heldout_tasks
from imagination.rollout.world_models import trained_as
from imagination.runs.log import read_log
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from imagination.settings.compose import load_config
from policy.lm.backbone import load_checkpoint, save_checkpoint
from policy.lm.settings import BASE
from real_envs.files import write_atomically
from real_envs.trajectory import Trajectory
from real_envs.world import find_world
from tests.benchmarks import study
from worldmodel.evaluation.intervals import Estimate, proportion
from worldmodel.evaluation.transitions import Judged, judge

_EXPRESS = ["preset=demo", "env.options.heldout_fold=dev", "games.train=300", "games.heldout=60"]
WORLDS = {
    "mapreader": _EXPRESS,
    **{
        game: [*_EXPRESS, f"env.options.game={game}", "env.options.params=''"]
        for game in ("coin", "twc", "sorting", "arithmetic", "cookingworld")
    },
    "babyai": ["preset=gymnasium", "games.train=300", "games.heldout=60"],
    "scienceworld": ["preset=scienceworld", "env.options.heldout_fold=dev"],
    "textworld": ["preset=textworld", "games.train=120", "games.heldout=40"],
    "alfworld": ["preset=alfworld"],
}
KINDS = ("all", "refused", "seen", "new")
BUDGETS = [0, 10_000, 100_000, 1_000_000]
SCRATCH = "scratch"
EPISODES = 120  # of held-out tasks, at most
PART = "base_part.json"


def main() -> int:
    parser = study.make_parser(__doc__, "outputs/base-table", [0, 1, 2])
    parser.add_argument("--worlds", nargs="+", default=[*WORLDS])
    parser.add_argument("--tokens", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--models", nargs="+", default=[SCRATCH, BASE], help="scratch, base, or <name>:<folder>")
    options, settings = study.options_and_settings(parser, "all worlds or, such as coin:games.train=300, of one")

    def make(world: str) -> None:
        overrides = study.settings_of(world, settings, options.worlds)
        config = load_config([*WORLDS[world], *overrides, "worldmodel.rules=off"], Config)
        source = prepared_run(config, options.out / world, 0, until="collect")
        for seed, tokens in product(options.seeds, options.tokens):
            for name, checkpoint in checkpoints(options.models).items():
                make_part(config, source, name, checkpoint, tokens, seed)
                write_table(options.out)

    return study.run_parts(options, [(w, partial(make, w)) for w in options.worlds], lambda: write_table(options.out))


def checkpoints(words: Sequence[str]) -> dict[str, str]:
    """What ``--models`` says, by name; of ``scratch`` an empty one.

    Example::

        checkpoints(["scratch", "base", "mine:outputs/mine"])  # {"scratch": "", "base": "base", "mine": "outputs/mine"}
    """
    named = {name: where for name, _, where in (word.partition(":") for word in words)}
    return {name: where or ("" if name == SCRATCH else name) for name, where in named.items()}


def make_part(config: Config, source: Path, name: str, checkpoint: str, tokens: int, seed: int) -> None:
    """One model after so many tokens of the log of the run in ``source``; what is there already is kept."""
    if not tokens and not checkpoint:
        return  # random weights
    there = source / f"{name}-{tokens}-{seed}"
    if (there / PART).exists():
        return
    print(f"{source.parent.name}: {name}, {tokens:,} tokens, seed {seed}", flush=True)
    config = deepcopy(config)
    config.seed, config.worldmodel.model = seed, checkpoint
    config.fit.steps = tokens // config.fit.batch_tokens
    config.fit.warmup = min(config.fit.warmup, config.fit.steps // 10)
    if tokens:
        fit_beside(config, source, there)
    else:
        run = RunFolder(there, seed)
        save_checkpoint(*load_checkpoint(checkpoint), run.model("worldmodel"))
        run.update({"world_model_form": trained_as(config.worldmodel)})
    estimates = asyncio.run(_judged(config, source, there))
    seconds = RunFolder(there, seed).summary.get("wall_seconds", {}).get("fit_world_model", 0.0)
    part = {"world": source.parent.name, "model": name, "tokens": tokens, "seed": seed, "seconds": seconds}
    write_atomically(there / PART, json.dumps({**part, "exact": {k: e.to_json() for k, e in estimates.items()}}))
    for large in ("log", "games", "models", "checkpoints"):
        shutil.rmtree(there / large, ignore_errors=True)
    give_back_memory()


async def _judged(config: Config, source: Path, there: Path) -> dict[str, Estimate]:
    train, _ = read_log(RunFolder(source, 0), config.collect.validation)
    held = heldout_tasks(RunFolder(source, 0))[:EPISODES]
    session = Session(config, RunFolder(there, config.seed))
    world = session.world_model(train, temperature=0.0, served=False).excluding(held)
    judged = await judge(world, held)
    refusal, episodes = re.compile(find_world(config.env.name).invalid), {t.id: t for t in held}
    kinds = [_kind(j, episodes[j.trajectory_id], refusal) for j in judged]
    return {
        kind: proportion(*_columns([j for j, found in zip(judged, kinds, strict=True) if kind in ("all", found)]))
        for kind in KINDS
    }


def _columns(judged: Sequence[Judged]) -> tuple[list[bool], list[str]]:
    return [j.exact for j in judged], [j.task_id for j in judged]


def _kind(judged: Judged, episode: Trajectory, refusal: re.Pattern[str]) -> str:
    text = judged.turn.observation
    if refusal.search(text):
        return "refused"
    before = [episode.start, *(turn.observation for turn in episode.turns[: judged.index])]
    return "seen" if any(text in earlier for earlier in before) else "new"


def write_table(out: Path) -> str:
    """``table.md`` of all parts that are there; what it says."""
    parts = [json.loads(path.read_text()) for path in sorted(out.glob(f"*/seed-0/*/{PART}"))]
    rows: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for part in parts:
        rows.setdefault((part["world"], part["model"], part["tokens"]), []).append(part)
    lines = []
    for (world, model, tokens), found in sorted(rows.items()):
        cells = [_cell([part["exact"][kind] for part in found]) for kind in KINDS]
        seconds = fmean(part["seconds"] for part in found)
        lines.append([world, model, f"{tokens:,}", *cells, len(found), f"{seconds:.0f}"])
    return study.write_files(out, table=study.markdown(["world", "model", "tokens", *KINDS, "seeds", "seconds"], lines))


def _cell(estimates: Sequence[dict[str, Any]]) -> str:
    """The mean over seeds, and the widest of their intervals over tasks."""
    known = [e for e in estimates if e["value"] is not None]
    if not known:
        return study.DASH
    ends = [pick(e["ci95"][k] for e in known) for k, pick in enumerate((min, max))]
    return study.estimate(fmean(e["value"] for e in known), ends)


if __name__ == "__main__":
    sys.exit(main())
