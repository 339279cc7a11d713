from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from imagination.runs.fingerprint import STEPS, state, summary
from imagination.settings import Config
from imagination.settings.compose import load_config, remembered_overrides, saved_config
from imagination.settings.schema import ConfigError, flatten
from real_envs.files import read_json

# Folders within a run that hold no run.
_INSIDE = {"games", "log", "models", "checkpoints", "tokenizer", "tensorboard", "csv", "wandb"}


@dataclass(frozen=True)
class RunInfo:
    """One run."""

    run: str  # its name, such as ``demo`` or ``demo-seeds/seed-0``
    chosen: list[str]  # what the user chose for it, such as ``["preset=tiny"]``
    settings: dict[str, Any]  # every key that is not as by default, with its value
    stages: dict[str, str]  # each stage that was begun, and how it stands under these settings
    before: float | None  # real success on the training tasks, of the cloned policy
    after: float | None  # and of the trained one
    verdict: str | None  # of the audit: yes, partly, no or unknown; ``None`` where there was none


def list_runs(config: Config, folder: Path) -> None:
    """List the runs under the output folder: settings, stages done, results.

    Shows each run with its chosen settings, the stages done with them, real success on the training tasks
    before and after training, and the verdict of the audit. listing.format=json prints the same for programs,
    with every setting that is not the default.

    Reads: of every run: config.yaml, overrides.json, summary.json, audit.json
    Writes: nothing

    Examples:
        imagine list
        imagine list output=outputs listing.format=json
    """
    root = Path(config.output)
    runs = [info(path, root) for path in find_runs(root)]
    if config.listing.format == "json":
        print(json.dumps([asdict(run) for run in runs], indent=1))
    elif runs:
        Console().print(table(runs))
    else:
        where = [] if config.output == Config().output else [f"output={config.output}"]
        print(f"no runs in {root}; start one with `{shlex.join(['imagine', 'demo', *where])}`")


def find_runs(root: Path) -> Iterator[Path]:
    """The folders under ``root`` that hold a run, in the order of their names."""
    for folder, inside, files in os.walk(root):
        inside[:] = sorted(set(inside) - _INSIDE)
        if "summary.json" in files or "config.yaml" in files:
            yield Path(folder)


def info(folder: Path, root: Path) -> RunInfo:
    """What the files of a run say; a run within another one may have no settings of its own."""
    written = summary(folder)
    done = {stage: "done" for stage, settings in written.get("done", {}).items() if settings}
    settings: dict[str, Any] = {}
    if (folder / "config.yaml").exists():
        try:
            config = saved_config(folder, Config)
        except ConfigError as error:  # of a version that had other keys
            settings = {"unreadable": str(error)}
        else:
            default = flatten(asdict(load_config([], Config)))
            values = flatten(asdict(config))
            settings = {k: v for k, v in values.items() if v != default.get(k) and k not in ("run", "output")}
            states = {step: state(config, folder, step) for step in (*STEPS, "learn_experience", "loop")}
            done = {step: how for step, how in {**done, **states}.items() if how != "not done"}
    audit = folder / "audit.json"
    policy = written.get("policy", {})
    return RunInfo(
        run=folder.relative_to(root).as_posix(),
        chosen=[o for o in remembered_overrides(folder) if o.partition("=")[0] not in ("run", "output")],
        settings=settings,
        stages=done,
        before=policy.get("before", {}).get("train_tasks", {}).get("success"),
        after=policy.get("after", {}).get("train_tasks", {}).get("success"),
        verdict=read_json(audit)["verdict"]["trust"] if audit.exists() else None,
    )


def table(runs: list[RunInfo]) -> Table:
    """One line a run."""
    shown = Table()
    for title in ("run", "settings", "stages", "real success, training tasks", "trust"):
        shown.add_column(title, overflow="fold")
    for run in runs:
        stages = [s.replace("_", " ") + (f" ({how})" if how != "done" else "") for s, how in run.stages.items()]
        success = "" if run.before is None or run.after is None else f"{run.before:.2f} -> {run.after:.2f}"
        cells = (run.run, " ".join(run.chosen), ", ".join(stages), success, run.verdict or "")
        shown.add_row(*(Text(cell) for cell in cells))
    return shown
