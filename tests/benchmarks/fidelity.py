"""How good must a dream be before policies trained in it get better in reality?

    python -m tests.benchmarks.fidelity --seeds 0 1 2 3 4
    python -m tests.benchmarks.fidelity --worlds mapreader --seeds 0 --variants full reward-30
    python -m tests.benchmarks.fidelity --table

Each world and seed has one log and one clone, and a world model for every variant of ``fidelity_table``: without rules,
hardly tuned, or fitted to a log with planted errors, of which rules are mined as well. In each the same clone learns
from dreams alone: no expert episodes, which would teach whatever the dreams say. What is measured of a world model is
what ``imagine audit`` says of it, once on the clone's own actions and once on those of the trained policy, and exact
match on logged turns of held-out tasks, which no error is planted in. What comes out is the gain: real success of the
trained policy on the panel's tasks minus that of the clone, the same tasks and seeds.

What exists is not done again. ``<out>/<world>/seed-<n>/<variant>/`` is a run with that world model, ``trained/`` in it
the one that learned there, with its ``part.json``. ``table.md``, ``fidelity.png`` and ``forecast.json`` in ``<out>``
are of all parts there are; the last becomes ``imagination/evaluation/forecast.json``.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from imagination.commands.audit import audited_before, run_audit
from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.experiments.arms import play_clone, train_arm
from imagination.commands.fit_world_model import fit_world_model
from imagination.evaluation.forecast import measures_of
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.files import write_atomically
from real_envs.store import TrajectoryStore
from tests.benchmarks.fidelity_table import (
    FULL,
    PART,
    PLANTED,
    VARIANTS,
    Variant,
    draw,
    forecast_data,
    planted,
    read_parts,
    table,
)
from tests.benchmarks.study import make_parser, options_and_settings, run_once, run_parts, write_files

SETTINGS = (
    *("train.expert_share=0", "clone.keep_every=0", "logger=none", "collect.workers=1", "evaluate.tasks=20"),
    # half the demo's rate: without expert episodes one update can unlearn everything, in good dreams as in bad ones
    *(
        "train.lr=5e-4",
        "train.updates=20",
        "train.keep_every=0",
        "collect.validation=0.01",
        "evaluate.heldout_episodes=2",
    ),
    # one policy an audit, of which all real episodes are judged: ranks of policies and pairs of actions are not used
    *("audit.min_policies=1", "audit.judged=1", "audit.pairs=1", "audit.episodes=1"),
)
WORLDS = {
    "babyai": ("preset=gymnasium", "fit.steps=200", "games.panel=babyai"),
    "mapreader": ("preset=demo", "games.panel=mapreader"),
}
TOKENIZER = ("vocab_size", "tokenizer_kind")  # of the summary: with these a run takes the tokenizer that is there


def main() -> int:
    parser = make_parser(__doc__, "outputs/fidelity", [0, 1, 2, 3, 4])
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--variants", nargs="+", default=names, choices=names, metavar="VARIANT", help=" ".join(names))
    options, overrides = options_and_settings(parser, "all parts")
    parts = [
        (f"{world}, seed {seed}, {variant.name}", partial(make_part, options.out, world, seed, variant, overrides))
        for seed in options.seeds
        for world in options.worlds
        for variant in VARIANTS
        if variant.name in options.variants
    ]
    return run_parts(options, parts, lambda: write_tables(options.out))


def make_part(out: Path, world: str, seed: int, variant: Variant, overrides: list[str]) -> None:
    """One world model and what learns in it, as far as it is not there yet."""
    base, folder = (out / world / f"seed-{seed}" / name for name in (FULL.name, variant.name))
    there = folder / "trained"
    if (there / PART).exists():
        return
    words = [*WORLDS[world], *SETTINGS, *overrides, f"seed={seed}"]
    cloned = _base(load_config(words, Config), base)
    config = load_config([*words, *variant.settings], Config)
    if variant != FULL:
        _world_model(config, base, folder, variant)
    begin = time.monotonic()
    before = _audited(config, folder, folder / "models" / "policy-clone")
    trained = train_arm(config, folder, there)
    after = _audited(config, there, there / "models" / "policy")
    exact = RunFolder(folder, seed).summary["world_model"]["heldout_tasks"]["exact_match"]
    part = {
        "world": world,
        "variant": variant.name,
        "axis": variant.axis,
        "seed": seed,
        "cloned": cloned["heldout_tasks"],
        "trained": trained["heldout_tasks"],
        "dream_success": trained["dream_success"],
        "stopped_by": trained["stopped_by"],
        "measures": {
            "clone": {"exact_heldout": exact, **measures_of(before)},
            "trained": {"exact_heldout": exact, **measures_of(after)},
        },
        "seconds": round(time.monotonic() - begin, 1),
    }
    write_atomically(there / PART, json.dumps(part, indent=1))
    give_back_memory()


def _base(config: Config, folder: Path) -> dict[str, Any]:
    """The log, the full world model and the clone of a seed; how the clone does in reality (``clone.json``)."""
    run_once(config, folder, collect, fit_world_model, clone)
    path = folder / "clone.json"
    if not path.exists():
        write_atomically(path, json.dumps(play_clone(config, folder), indent=1))
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _world_model(config: Config, base: Path, folder: Path, variant: Variant) -> None:
    """A run with the base's games, tokenizer and clone, its own log, and a world model fitted to that."""
    if variant.axis == "rules":  # the same world model
        if not (folder / "summary.json").exists():
            shutil.copytree(
                base, folder, ignore=shutil.ignore_patterns("trained", "audit*", "summary.json"), dirs_exist_ok=True
            )
            shutil.copy(base / "summary.json", folder)
        return
    run = RunFolder(folder, config.seed)
    if not run.summary.get("copied"):
        for name in ("games", "tokenizer", "models/policy-clone", "log"):
            shutil.rmtree(folder / name, ignore_errors=True)  # perhaps half a copy
        for name in ("games", "tokenizer", "models/policy-clone"):
            shutil.copytree(base / name, folder / name)
        write_log(base / "log", folder / "log", variant, config.seed)
        made = RunFolder(base, config.seed).summary
        run.update({**{key: made[key] for key in TOKENIZER}, "copied": True})
    run_once(config, folder, fit_world_model)


def write_log(source: Path, target: Path, variant: Variant, seed: int) -> None:
    """The log with the variant's errors; episodes of held-out tasks, which measure it, stay as they are."""
    store = TrajectoryStore.open(source)
    train = sorted(store.read("train"), key=lambda t: t.id)  # the order in which they ended is chance
    if variant.axis in PLANTED:
        train = planted(train, variant.axis, variant.share, seed)
    TrajectoryStore.create(target, store.splits, store.meta).append([*train, *store.read("heldout")])


def _audited(config: Config, folder: Path, policy: Path) -> dict[str, Any]:
    """The audit of the run's world model by what one policy does."""
    config.audit.policies = [str(policy)]
    return audited_before(config, folder) or run_audit(config, folder)


def write_tables(out: Path) -> str:
    """``table.md``, ``fidelity.png`` and ``forecast.json`` of all parts that are there; what the first says."""
    parts = read_parts(out)
    text = write_files(out, table=table(parts), forecast=json.dumps(forecast_data(parts), indent=1) + "\n")
    if parts:
        draw(parts, out / "fidelity.png")
    return text


if __name__ == "__main__":
    sys.exit(main())
