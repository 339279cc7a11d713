from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from imagination.commands.check_train import check
from imagination.commands.evaluate import evaluate
from imagination.commands.experiments import arms
from imagination.commands.experiments.arms import markdown, train_arm, write_results
from imagination.commands.report import report
from imagination.evaluation.costs import KEYS
from imagination.runs.fingerprint import fingerprint
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.scale.ray_jobs import run_jobs
from imagination.settings import Config
from imagination.settings.scale import ScaleSettings
from real_envs.seeding import derive_seed
from worldmodel.evaluation.proportions import Proportion, pooled

STAGES = {**arms.STAGES, "evaluate": evaluate}


def demo(config: Config, folder: Path) -> None:
    """Run the whole flow: collect, fit, clone, train in dreams, evaluate, report.

    Takes about five minutes on two idle CPU cores, then prints a table and the path of the report. A stopped
    demo resumes, a finished one only reports again, and changed settings redo the stages that depend on them.

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
    redo, names = False, [*arms.stages_of(config), "evaluate"]
    for number, name in enumerate(names, start=1):
        done = RunFolder(folder, config.seed).summary.get("done", {}).get(name)
        redo = redo or done != fingerprint(config, name)
        title = f"[{number}/{len(names)}] {name.replace('_', ' ')}"
        print(f"{title}: done before" if not redo else title, flush=True)
        if redo:
            STAGES[name](config, folder)
            give_back_memory()


def demo_seeds(config: Config, folder: Path) -> None:
    """Run the demo with seeds 0, 1 and 2, each beside a control that trains in the real environment.

    The control trains the same clone by the same updates with real steps: an upper bound. Seeds run in
    parallel, one process each with its log in seed-0.log and so on: about an hour on two CPU cores. jobs=1
    runs them one after the other.

    Reads: nothing
    Writes: seed-0/ seed-1/ seed-2/ (each a run, with its control/), table.md, table.json

    Examples:
        imagine demo-seeds
        imagine demo-seeds preset=tiny run=tiny-seeds
    """
    alone = replace(config, scale=ScaleSettings())  # a seed is a job, and needs no players
    jobs = {f"seed-{seed}": (alone, folder / f"seed-{seed}", seed) for seed in arms.SEEDS}
    results = list(run_jobs(config.scale, demo_seed, jobs, folder, config.jobs).values())
    write_results(folder, "table", results, seeds_table([table_row(result) for result in results]))


def demo_seed(config: Config, folder: Path, seed: int) -> dict[str, Any]:
    """One seed of them; its line of the table."""
    seeded = arms.seed_config(config, seed)
    real = deepcopy(seeded)
    real.train.world = "real"
    check(real)  # before anything is played
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
    control = train_arm(real, folder, folder / "control")
    report(seeded, folder, partial=False)  # again: now it can say what the same success costs without dreams
    written = json.loads((folder / "report.json").read_text())
    keys = ("seed", "policy", "world_model", "dreamed_turns", "wall_seconds", "hardware")
    kept = {key: written[key] for key in (*keys, *KEYS) if key in keys or key in written}
    return {**kept, "control": control, "training_seeds": again}


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
    rows: list[list[object]] = []
    for split, title in (("train_tasks", "training"), ("heldout_tasks", "held-out")):
        rates: list[tuple[float, float, float]] = []
        for r in results:
            before, control = (Proportion.from_json(r[key][split]) for key in ("before", "control"))
            policies = [Proportion.from_json(arm[split]) for arm in r["after"]]
            after = pooled(policies)
            rates.append((before.rate or 0.0, after.rate or 0.0, control.rate or 0.0))
            by_seed, rise = (
                ", ".join(f"{arm.rate or 0.0:.2f}" for arm in policies),
                f"{rates[-1][1] - rates[-1][0]:+.2f}",
            )
            real, dream = f"{control.cell} ({r['real_steps']})", "-"
            if split == "train_tasks":
                dream = " / ".join(f"{r[key]:.2f}" for key in ("dream_before", "dream_after"))
            rows.append([r["seed"], title, after.n, before.cell, after.cell, by_seed, rise, real, dream])
        before_mean, after_mean, control_mean = (sum(column) / len(column) for column in zip(*rates, strict=True))
        rise = f"**{sum(after - before for before, after, _ in rates) / len(rates):+.2f}**"
        rows.append(
            ["**mean**", title, "", f"{before_mean:.2f}", f"{after_mean:.2f}", "", rise, f"{control_mean:.2f}", ""]
        )
    head = "seed, games, n, cloned, dream-trained, by training seed, rise, control (real steps), dream before / after"
    return "\n".join(markdown(head.split(", "), rows)) + "\n"
