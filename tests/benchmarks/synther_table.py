"""Do synthetic transitions make a better critic? SynthER on the hidden states of a cloned policy, in TextWorld.

    python -m tests.benchmarks.synther_table --seeds 0 1 2
    python -m tests.benchmarks.synther_table --seeds 0 --shares 0.1
    python -m tests.benchmarks.synther_table --table

Each seed has its own games, log, world model and clone (``<out>/seed-<n>/base``). The value head of ``turn_ppo`` is
fitted to the returns of a share of the training tasks, by the same number of optimiser steps of the same size in every
arm, and judged on held-out games: mean squared error of its values against what logged episodes went on to earn there.

A part is one share of one seed, all arms. What is there is not done again. Writes ``table.md`` into ``<out>`` after
every part.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.experiments.arms import hash_of
from imagination.commands.fit_critic import transitions_of
from imagination.commands.fit_world_model import fit_world_model
from imagination.evaluation.world_model_eval import heldout_tasks
from imagination.learning.algorithms import build_algorithm
from imagination.learning.critic import fit_value_head, squared_errors
from imagination.runs.fingerprint import fingerprint
from imagination.runs.log import read_log
from imagination.runs.models import load_model
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.files import write_atomically
from real_envs.seeding import derive_seed
from tests.benchmarks.early_experience import REFUSALS
from tests.benchmarks.study import (
    DASH,
    markdown,
    options_and_settings,
    run_once,
    skip_failed,
    study_options,
    write_files,
)
from tests.benchmarks.study import estimate as estimate_cell
from worldmodel.evaluation.intervals import Estimate, estimate, ratio
from worldmodel.extras.synther.transitions import Transitions

SETTINGS = (
    *("preset=textworld", "logger=none", "games.train=90", "games.heldout=40", "collect.episodes=8"),
    *("collect.heldout_episodes=1", "max_action_tokens=128", "vocab_size=1024", f"worldmodel.refusals={REFUSALS}"),
    *(f"{model}.{size}" for model in ("worldmodel", "policy") for size in ("hidden=96", "layers=3", "mlp=256")),
    *(
        "fit.steps=300",
        "clone.agents=[expert]",
        "clone.steps=160",
        "clone.batch_tokens=1024",
        "clone.copying_steps=100",
    ),
    *("clone.keep_every=0", "algorithm=turn_ppo", "algorithm.gamma=0.95", "critic.synther.ratio=0.5"),
)
SHARES = (0.1, 0.3, 1.0)
LITTLE = 0.01  # weight decay of the second half of the arms: next to none
MIXED = {
    "logged": "logged transitions",
    "components": "half of them through their principal components",
    "synther": "half of them synthetic",
}
ARMS = {
    "mean": "no critic: the mean return of the log",
    **MIXED,
    **{f"{arm}, little decay": f"{title}; hardly any weight decay" for arm, title in MIXED.items()},
}
HEAD = (
    *("training tasks", "critic fitted to", "squared error, held-out games", "difference to logged alone"),
    "by seed",
)
CHECKS = ("training tasks", "beside held-out transitions", "marginals", "correlations", "dynamics error")
Part = dict[str, Any]


def main() -> int:
    parser = study_options(__doc__, "outputs/synther", [0, 1, 2])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    options, settings = options_and_settings(parser, "all parts")
    failed: list[str] = []
    for seed in [] if options.table else options.seeds:
        config = load_config([*SETTINGS, *settings, f"seed={seed}"], Config)
        there = options.out / f"seed-{seed}"
        with skip_failed(f"seed {seed}", failed):
            run_once(config, there / "base", collect, fit_world_model, clone)
            for share in options.shares:
                print(f"== seed {seed}: {share:.0%} of the training tasks", flush=True)
                make_part(config, share, there)
                write_table(options.out)
    print(write_table(options.out))
    return int(bool(failed))


def make_part(config: Config, share: float, there: Path) -> None:
    """All arms on one share of the training tasks. Writes ``<percent>.json`` into ``there``."""
    run = RunFolder(there / "base", config.seed)
    made_of = f"{fingerprint(config, 'fit_critic')}/{hash_of(run.path, ['models/policy-clone'])}"
    result = there / f"{round(100 * share)}.json"
    if result.exists() and json.loads(result.read_text())["made_of"] == made_of:
        return
    model, chat = load_model(run.model("policy-clone"), "clone", config.policy)
    algorithm = build_algorithm(config.algorithm)
    train, held = read_log(run, config.collect.validation)[0], heldout_tasks(run)
    tasks = sorted({episode.task_id for episode in train})
    chosen = set(
        random.Random(derive_seed("tasks", config.seed)).sample(tasks, len(tasks))[: round(share * len(tasks))]
    )
    real = transitions_of(config, algorithm, model, chat, [t for t in train if t.task_id in chosen])
    unseen = transitions_of(config, algorithm, model, chat, held)
    assert real is not None
    assert unseen is not None
    errors, told = judge_arms(config, real[0], unseen[0])
    names = [held[i].task_id for i in unseen[1].tolist()]
    by_task = {arm: summed(found, names) for arm, found in errors.items()}
    part = {"made_of": made_of, "seed": config.seed, "share": share, "tasks": len(chosen), "transitions": len(real[0])}
    write_atomically(result, json.dumps({**part, "errors": by_task, **told}, indent=1))


def judge_arms(config: Config, real: Transitions, unseen: Transitions) -> tuple[dict[str, Tensor], Part]:
    """Squared errors on unseen transitions, ``[n]`` of each arm, and the checks of the synthetic ones."""
    from worldmodel.extras.synther.model import Upsampler
    from worldmodel.extras.synther.transitions import similarity

    settings, seed = config.critic.synther, config.seed
    upsampler = Upsampler.fit(real, settings, seed)
    made = upsampler.sample(settings.samples, settings.denoising_steps, derive_seed("synthetic transitions", seed))
    projected = upsampler.denoiser.decode(upsampler.denoiser.encode(real))
    others = {"logged": None, "components": replace(projected, returns=real.returns), "synther": made}
    errors = {"mean": (unseen.returns - real.returns.mean()).square()}
    for critic, ending in ((config.critic, ""), (replace(config.critic, weight_decay=LITTLE), ", little decay")):
        heads = {f"{arm}{ending}": fit_value_head(real, critic, seed, other) for arm, other in others.items()}
        errors |= {arm: squared_errors(head, unseen) for arm, head in heads.items()}
    found = {"logged": real, "synthetic": made}
    checks = {name: similarity(upsampler.denoiser, unseen, one).to_json() for name, one in found.items()}
    return errors, {"checks": checks, "kept_variance": upsampler.kept_variance}


def summed(errors: Tensor, tasks: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Sum and number of the errors of each task."""
    found: dict[str, tuple[float, int]] = {}
    for task, error in zip(tasks, errors.tolist(), strict=True):
        total, n = found.get(task, (0.0, 0))
        found[task] = (total + error, n + 1)
    return found


def write_table(out: Path) -> str:
    """``table.md`` of all parts that are there; what it says."""
    return write_files(out, table=table([json.loads(path.read_text()) for path in sorted(out.glob("seed-*/*.json"))]))


def table(parts: Sequence[Part]) -> str:
    """A line a share and arm; differences are paired by state, intervals at 95 % over held-out tasks of all seeds."""
    rows, checks = [], []
    for share in sorted({part["share"] for part in parts}):
        own = [part for part in parts if part["share"] == share]
        for arm, title in ARMS.items():
            difference, by_seed = DASH, DASH
            beside = beside_which(arm)
            if beside:
                difference = cell(error_of(own, arm, beside), sign="+")
                by_seed = ", ".join(f"{error_of([part], arm, beside).value:+.4f}" for part in own)
            rows.append((f"{share:.0%}", title, cell(error_of(own, arm)), difference, by_seed))
        for name in ("logged", "synthetic"):
            keys = ("marginal", "correlation", "dynamics_error")
            means = (sum(part["checks"][name][key] for part in own) / len(own) for key in keys)
            checks.append((f"{share:.0%}", name, *(f"{mean:.3f}" for mean in means)))
    return f"{markdown(HEAD, rows)}\n{markdown(CHECKS, checks)}"


def beside_which(arm: str) -> str:
    """The arm without what this one adds; empty for those that add nothing."""
    kind, _, ending = arm.partition(", ")
    return "" if kind in ("mean", "logged") else ", ".join(["logged", *([ending] if ending else [])])


def error_of(parts: Sequence[Part], arm: str, beside: str = "") -> Estimate:
    """Mean squared error over all states of all parts, or how much more it is than another arm's."""
    rows, clusters = [], []
    for part in parts:
        other: Mapping[str, Sequence[float]] = part["errors"].get(beside, {})
        for task, (total, n) in part["errors"][arm].items():
            rows.append((total - (other[task][0] if beside else 0.0), n))
            clusters.append(f"{part['seed']}/{task}")
    return estimate(rows, clusters, ratio, seed=0)


def cell(found: Estimate, sign: str = "") -> str:
    return DASH if found.ci95 is None else estimate_cell(found.value, found.ci95, f"{sign}.4f")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
