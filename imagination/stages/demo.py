"""Stages ``demo`` and ``demo-seeds``: the whole flow, once or for several seeds with a control."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from imagination.runs.fingerprint import fingerprint
from imagination.runs.memory import give_back_memory
from imagination.runs.real_costs import KEYS
from imagination.runs.run_folder import RunFolder
from imagination.runs.side_by_side import side_by_side
from imagination.settings import Config
from imagination.stages import seed_runs
from imagination.stages.evaluate import evaluate
from imagination.stages.report import report
from imagination.stages.variants import train_arm
from imagination.trust.evaluation import Proportion
from real_envs.files import write_atomically

STAGES = {**seed_runs.STAGES, "evaluate": evaluate}


def demo(config: Config, folder: Path) -> None:
    """Runs every stage that this folder has not finished with these settings, and reports."""
    run_stages(config, folder)
    report(config, folder, partial=False)


def run_stages(config: Config, folder: Path) -> None:
    """All stages in order; the finished ones of an interrupted run are kept."""
    redo = False
    for number, (name, stage) in enumerate(STAGES.items(), start=1):
        done = RunFolder(folder, config.seed).summary.get("done", {}).get(name)
        redo = redo or done != fingerprint(config, name)
        title = f"[{number}/{len(STAGES)}] {name.replace('_', ' ')}"
        print(f"{title}: done before" if not redo else title, flush=True)
        if redo:
            stage(config, folder)
            give_back_memory()


def demo_seeds(config: Config, folder: Path) -> None:
    """The demo for seeds 0, 1 and 2, each beside its control: the same updates played in the real games.

    Writes ``table.json`` and ``table.md``.
    """
    jobs = {f"seed-{seed}": (config, folder / f"seed-{seed}", seed) for seed in seed_runs.SEEDS}
    results = list(side_by_side(demo_seed, jobs, folder, config.jobs).values())
    write_atomically(folder / "table.json", json.dumps(results, indent=1))
    table = seeds_table(results)
    write_atomically(folder / "table.md", table)
    print(table)


def demo_seed(config: Config, folder: Path, seed: int) -> dict[str, Any]:
    """One seed of them; its line of the table."""
    mine = seed_runs.seed_config(config, seed)
    print(f"== seed {seed}: dreams", flush=True)
    run_stages(mine, folder)
    report(mine, folder, partial=False)
    print(f"== seed {seed}: control, the same updates in the real games", flush=True)
    control = _control(mine, folder)
    report(mine, folder, partial=False)  # again: now it can say what the same success costs without dreams
    return _result(folder, control)


def _control(config: Config, folder: Path) -> dict[str, Any]:
    """Trains the same clone with the same settings in the real games; its success and what it cost."""
    real = deepcopy(config)
    real.train.world = "real"
    return train_arm(real, folder, folder / "control")


def _result(folder: Path, control: dict[str, Any]) -> dict[str, Any]:
    found = json.loads((folder / "report.json").read_text())
    keys = ("seed", "policy", "world_model", "dreamed_turns", "wall_seconds", "hardware")
    costs = {key: found[key] for key in KEYS if key in found}
    return {**{key: found[key] for key in keys}, **costs, "control": control}


def seeds_table(results: Sequence[dict[str, Any]]) -> str:
    """One line per seed and one with the means, in Markdown."""
    head = (
        "| seed | games | n | cloned | dream-trained | rise | control (real steps) | dream before / after |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    lines: list[str] = []
    for split, title in (("train_tasks", "training"), ("heldout_tasks", "held-out")):
        rises: list[float] = []
        columns: dict[str, list[float]] = {"before": [], "after": [], "control": []}
        for r in results:
            before, after, control = r["policy"]["before"], r["policy"]["after"], r["control"]
            for name, cell in (("before", before), ("after", after), ("control", control)):
                columns[name].append(cell[split]["success"])
            rises.append(after[split]["success"] - before[split]["success"])
            dream = "-"
            if split == "train_tasks":
                dream = f"{before['dream_success']['success']:.2f} / {after['dream_success']['success']:.2f}"
            cells = [Proportion.from_json(arm[split]).cell for arm in (before, after, control)]
            lines.append(
                f"| {r['seed']} | {title} | {after[split]['n']} | {cells[0]} | {cells[1]} "
                f"| {rises[-1]:+.2f} | {cells[2]} ({control['real_steps']['train']}) | {dream} |"
            )
        mean = {name: sum(values) / len(values) for name, values in columns.items()}
        lines.append(
            f"| **mean** | {title} | | {mean['before']:.2f} | {mean['after']:.2f} "
            f"| **{sum(rises) / len(rises):+.2f}** | {mean['control']:.2f} | |"
        )
    return head + "\n".join(lines) + "\n"
