"""World models of other settings, fitted to the log of a run: what else could be dreamed in?"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from imagination.commands.experiments.ablate import config_of_arm, slugs_of
from imagination.commands.experiments.variants import hash_of
from imagination.commands.fit_world_model import fit_world_model
from imagination.runs.fingerprint import fingerprint
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config

SHARED = ("games", "log")


def variant_configs(path: Path, folder: Path, others: Mapping[str, str]) -> dict[str, tuple[Config, Path]]:
    """The further world models of a run by name: settings, and the run folder that each gets within that of the run.

    Args:
        path: the run whose log they are fitted to.
        folder: whose settings the run has where it has none of its own.
        others: names and settings, as in ``ablation.arms``.

    Raises:
        UserError: two names would be one folder, or settings contradict each other.
        ConfigError: a setting has no such key, or not that type.
    """
    slugs = slugs_of(others)
    return {
        name: (config_of_arm(path, folder, settings), path / "worlds" / slugs[name])
        for name, settings in others.items()
    }


def fit_beside(config: Config, source: Path, there: Path) -> None:
    """Fits a world model to the log of the run in ``source``, in a run folder ``there`` of its own.

    One that was fitted with these settings to this log is not fitted again; one that was interrupted goes on.
    """
    origin = hash_of(source, ["log"])
    run = RunFolder(there, config.seed)
    made = f"{fingerprint(config, 'fit_world_model')}/{origin}"
    if run.summary.get("fitted_as") == made:
        return
    if run.summary.get("log_of") != origin:
        for name in ("checkpoints", *SHARED):
            shutil.rmtree(there / name, ignore_errors=True)  # perhaps of an earlier log, or half a copy
        for name in SHARED:
            shutil.copytree(source / name, there / name)
        run.update({"log_of": origin})
    fit_world_model(config, there)
    run.update({"fitted_as": made})
