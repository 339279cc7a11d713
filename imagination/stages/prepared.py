"""Runs to start from: those that the user names, or those of the demo's seeds, made where they are missing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from imagination.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.stages.collect import collect
from imagination.stages.common import give_back_memory
from imagination.stages.demo import SEEDS
from imagination.stages.fit import clone, fit_world_model
from imagination.stages.train import train

STAGES = {"collect": collect, "fit_world_model": fit_world_model, "clone": clone, "train": train}


def prepared_runs(config: Config, folder: Path, named: Sequence[str], key: str, until: str = "train") -> list[Path]:
    """The runs named by the setting ``key``, or seeds 0, 1 and 2 under ``folder``, taken as far as the stage ``until``.

    A stage that a run has finished, with whatever settings, is not done again. Checkpoints of the policy are kept on
    the way, for audits.

    Raises:
        UserError: a named run is not there.
    """
    if named:
        paths = [Path(name) for name in named]
        for path in paths:
            if not (path / "summary.json").exists():
                raise UserError(f"{key}: {path} holds no run (no summary.json)")
        return paths
    wanted = list(STAGES)[: list(STAGES).index(until) + 1]
    paths = []
    for seed in SEEDS:
        mine = deepcopy(config)
        mine.seed = seed
        mine.clone.keep_every = config.clone.keep_every or max(1, config.clone.steps // 5)
        mine.train.keep_every = config.train.keep_every or max(1, config.train.updates // 6)
        path = folder / f"seed-{seed}"
        for name in wanted:
            if name not in RunFolder(path, seed).summary.get("done", {}):
                print(f"== seed {seed}: {name.replace('_', ' ')}", flush=True)
                STAGES[name](mine, path)
                give_back_memory()
        paths.append(path)
    return paths
