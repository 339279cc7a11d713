from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from imagination.commands.evaluate import evaluate
from imagination.commands.experiments import variants
from imagination.commands.experiments.variants import train_arm
from imagination.commands.report import report
from imagination.evaluation.costs import KEYS
from imagination.runs.fingerprint import fingerprint
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.runs.side_by_side import side_by_side
from imagination.settings import Config
from real_envs.files import write_atomically
from real_envs.seeding import derive_seed
from worldmodel.evaluation.proportions import Proportion, pooled

STAGES = {**variants.STAGES, "evaluate": evaluate}


def demo(config: Config, folder: Path) -> None:
    """The whole flow at once: collect, fit, clone, dream, evaluate, report.

    Runs every stage below in about twenty minutes on two CPU cores, then prints a table and where the
    page is. Stopped, it goes on where it was; finished, it only reports again; with other settings it
    does again what depends on them.

    Reads: nothing
    Writes: everything that the stages below write

    Examples:
        imagine demo
        imagine demo preset=tiny
        imagine demo run=demo-7 seed=7
    """
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
    """The demo for seeds 0, 1 and 2, each beside a control that trains in the real games.

    One seed proves little. Runs the demo once a seed, then trains the same clone by the same updates in
    the real games: the upper bound that costs real steps. Seeds share the cores, one process each, whose
    words go to seed-0.log and so on: about an hour on two CPU cores. jobs=1 takes one after the other.

    Reads: nothing
    Writes: seed-0/ seed-1/ seed-2/ (each a run, with its control/), table.md, table.json

    Examples:
        imagine demo-seeds
        imagine demo-seeds preset=tiny run=tiny-seeds
    """
    jobs = {f"seed-{seed}": (config, folder / f"seed-{seed}", seed) for seed in variants.SEEDS}
    results = list(side_by_side(demo_seed, jobs, folder, config.jobs).values())
    write_atomically(folder / "table.json", json.dumps(results, indent=1))
    table = seeds_table([table_row(result) for result in results])
    write_atomically(folder / "table.md", table)
    print(table)


def demo_seed(config: Config, folder: Path, seed: int) -> dict[str, Any]:
    """One seed of them; its line of the table."""
    seeded = variants.seed_config(config, seed)
    print(f"== seed {seed}: dreams", flush=True)
    run_stages(seeded, folder)
    report(seeded, folder, partial=False)
    again: list[dict[str, Any]] = []
    for k in range(1, config.train.seeds):
        print(f"== seed {seed}: the same clone in dreams of the same world model, training seed {k}", flush=True)
        arm = deepcopy(seeded)
        arm.train.seed = derive_seed("training seed", seed, k)
        again.append(train_arm(arm, folder, folder / f"training-seed-{k}"))
    print(f"== seed {seed}: control, the same updates in the real games", flush=True)
    control = _control(seeded, folder)
    report(seeded, folder, partial=False)  # again: now it can say what the same success costs without dreams
    return {**_result(folder, control), "training_seeds": again}


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


def table_row(result: dict[str, Any]) -> dict[str, Any]:
    """What ``seeds_table`` shows of a seed: the clone, the policy of each training seed, the control."""
    policy = result["policy"]
    again = result.get("training_seeds", [])
    dreamed = [policy["after"]["dream_success"]["success"], *(arm["dream_success"][1] for arm in again)]
    return {
        "seed": result["seed"],
        "before": policy["before"],
        "after": [policy["after"], *again],
        "control": result["control"],
        "real_steps": result["control"]["real_steps"]["train"],
        "dream_before": policy["before"]["dream_success"]["success"],
        "dream_after": sum(dreamed) / len(dreamed),
    }


def seeds_table(results: Sequence[dict[str, Any]]) -> str:
    """One line per seed and one with the means, in Markdown. A policy stands for all training seeds of its clone, which
    stand beside it one by one."""
    head = (
        "| seed | games | n | cloned | dream-trained | by training seed | rise | control (real steps) | "
        "dream before / after |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    lines: list[str] = []
    for split, title in (("train_tasks", "training"), ("heldout_tasks", "held-out")):
        rises: list[float] = []
        columns: dict[str, list[float]] = {"before": [], "after": [], "control": []}
        for r in results:
            before, control = (Proportion.from_json(r[key][split]) for key in ("before", "control"))
            arms = [Proportion.from_json(arm[split]) for arm in r["after"]]
            after = pooled(arms)
            for name, cell in (("before", before), ("after", after), ("control", control)):
                columns[name].append(cell.rate or 0.0)
            rises.append(columns["after"][-1] - columns["before"][-1])
            dream = "-"
            if split == "train_tasks":
                dream = " / ".join(f"{r[key]:.2f}" for key in ("dream_before", "dream_after"))
            lines.append(
                f"| {r['seed']} | {title} | {after.n} | {before.cell} | {after.cell} "
                f"| {', '.join(f'{arm.rate or 0.0:.2f}' for arm in arms)} | {rises[-1]:+.2f} "
                f"| {control.cell} ({r['real_steps']}) | {dream} |"
            )
        mean = {name: sum(values) / len(values) for name, values in columns.items()}
        lines.append(
            f"| **mean** | {title} | | {mean['before']:.2f} | {mean['after']:.2f} | "
            f"| **{sum(rises) / len(rises):+.2f}** | {mean['control']:.2f} | |"
        )
    return head + "\n".join(lines) + "\n"
