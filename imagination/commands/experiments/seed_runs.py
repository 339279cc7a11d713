"""Runs to start from: those that the user names, or those of the demo's seeds, made where they are missing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.train import train
from imagination.runs.memory import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError

STAGES = {"collect": collect, "fit_world_model": fit_world_model, "clone": clone, "train": train}
SEEDS = (0, 1, 2)


def seed_config(config: Config, seed: int) -> Config:
    """The settings of one of several seeds; checkpoints of its policy are kept on the way, for audits."""
    mine = deepcopy(config)
    mine.seed = seed
    mine.clone.keep_every = config.clone.keep_every or max(1, config.clone.steps // 5)
    mine.train.keep_every = config.train.keep_every or max(1, config.train.updates // 6)
    return mine


def named_runs(named: Sequence[str], key: str) -> list[Path]:
    """The runs that the setting ``key`` names.

    Raises:
        UserError: one is not there.
    """
    paths = [Path(name) for name in named]
    for path in paths:
        if not (path / "summary.json").exists():
            raise UserError(f"{key}: {path} holds no run (no summary.json)")
    return paths


def prepared_run(config: Config, folder: Path, seed: int, until: str = "train") -> Path:
    """The run of a seed under ``folder``, taken as far as the stage ``until``.

    A stage that it has finished, with whatever settings, is not done again.
    """
    mine, path = seed_config(config, seed), folder / f"seed-{seed}"
    for name in list(STAGES)[: list(STAGES).index(until) + 1]:
        if name not in RunFolder(path, seed).summary.get("done", {}):
            print(f"== seed {seed}: {name.replace('_', ' ')}", flush=True)
            STAGES[name](mine, path)
            give_back_memory()
    return path
