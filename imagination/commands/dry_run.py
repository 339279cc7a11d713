"""``--dry-run``: the settings of a stage, and what it would do. It writes nothing."""

from __future__ import annotations

import re
from pathlib import Path

from imagination.commands.stage import Stage
from imagination.runs.fingerprint import STEPS, fingerprint, state
from imagination.settings import Config
from imagination.settings.compose import to_yaml

# Those of the demo, which skips what is done; a stage that is asked for by name is always done.
DEMO = ("collect", "fit_world_model", "clone", "train", "evaluate")


def dry_run(config: Config, folder: Path, stage: Stage) -> None:
    """Prints the resolved configuration, and a line for each step that would be done, done again, or skipped."""
    print(to_yaml(config))
    print(f"in {folder}:")
    for line in plan(config, folder, stage):
        print(f"  {line}")


def plan(config: Config, folder: Path, stage: Stage) -> list[str]:
    """Such as ``["collect: skipped, done before", "fit world model: done again, as its settings have changed"]``."""
    if stage.name == "demo":
        return [*_demo(config, folder), "report: done"]
    missing = [
        f"missing: {name}, which an earlier stage makes"
        for name in stage.reads.split(", ")
        if re.fullmatch(r"[\w./-]+(/|\.\w+)", name) and not (folder / name).exists()
    ]
    step = stage.name.replace("-", "_")
    return [f"{stage.name}: {_said(config, folder, step) if step in STEPS else 'done'}", *missing]


def _demo(config: Config, folder: Path) -> list[str]:
    lines, redo = [], False
    for step in DEMO:
        is_done = state(config, folder, step) == "done"
        why = _said(config, folder, step) if not (redo and is_done) else "done again, after an earlier stage"
        redo = redo or not is_done
        lines.append(f"{step.replace('_', ' ')}: {why if redo else 'skipped, done before'}")
    return lines


def _said(config: Config, folder: Path, step: str) -> str:
    found = state(config, folder, step)
    if found == "stopped" and (steps := _saved_steps(config, folder, step)):
        return f"goes on after step {steps}"
    if found == "done" and step == "collect":
        return "skipped as far as its episodes are logged"
    return {
        "done": "done again, with the same settings",
        "other settings": "done again, as settings have changed",
    }.get(found, "done")


def _saved_steps(config: Config, folder: Path, step: str) -> int:
    """How many steps a saved training state has done, if it is of these settings; torch is loaded for that."""
    from imagination.runs.lifecycle import resume_from
    from imagination.runs.run_folder import RunFolder

    return resume_from(RunFolder(folder, config.seed, fingerprint(config, step)), step)[1]
