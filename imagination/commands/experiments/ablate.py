from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from imagination.commands.experiments.arms import (
    SEEDS,
    Arms,
    check_arms,
    config_of_arm,
    markdown,
    named_runs,
    note_kept,
    play_clone,
    prepared_run,
    slugs_of,
    train_arm,
    write_results,
)
from imagination.data.augmentation import HINDSIGHT, MADE_BY, supplement_folder
from imagination.evaluation.monitors.rules import stopped_sentence
from imagination.runs.lifecycle import need
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.scale.ray_jobs import run_jobs
from imagination.settings import Config, UserError
from imagination.settings.scale import ScaleSettings
from worldmodel.evaluation.proportions import Proportion, difference_ci95, interval, pooled, signed


def ablate(config: Config, folder: Path) -> None:
    """Ablate settings: train the same clones with and without them, and evaluate them for real.

    Starts from the clones and world models of several runs, trains each arm in a folder of its own, and
    plays every result in the same real games. Missing runs of seeds 0, 1 and 2 are made. An arm that was
    finished is not done again; about two minutes an arm and a seed. Runs share the cores, one process each
    (jobs=1 takes one after the other).

    Reads: nothing, or the runs of ablation.runs
    Writes: arms/, ablation.md, ablation.json

    Examples:
        imagine ablate ablation=gating
        imagine ablate ablation=masks ablation.runs=[outputs/demo] run=masks
        imagine ablate ablation.arms.grpo=algorithm=grpo ablation.arms.rloo=algorithm=rloo

    Raises:
        UserError: no arms, two of one name, settings that contradict each other, or a run that is not there.
    """
    if not config.ablation.arms:
        raise UserError(
            "nothing to compare: choose ablation=gating, masks or methods, or name arms and their settings, such as "
            "ablation.arms.as_it_is= ablation.arms.rloo=algorithm=rloo"
        )
    arms = config.ablation.arms
    if config.ablation.runs:
        paths = named_runs(config.ablation.runs, "ablation.runs")
        for path in paths:
            check_arms(arms, path, folder)
        runs = {str(path): (arms, path, folder) for path in paths}
        by_run = run_jobs(config.scale, compare_arms, runs, folder, config.jobs)
    else:
        check_arms(arms, folder, folder)
        note_kept(config, folder, until="clone")
        alone = replace(config, scale=ScaleSettings())  # a seed is a job, and needs no players
        seeds = {f"seed-{seed}": (alone, folder, seed) for seed in SEEDS}
        by_run = run_jobs(config.scale, _compare_arms_of_seed, seeds, folder, config.jobs)
    results = list(by_run.values())
    write_results(folder, "ablation", results, arms_table(results))
    print(f"table: {folder / 'ablation.md'}")


def _compare_arms_of_seed(config: Config, folder: Path, seed: int) -> dict[str, Any]:
    path = prepared_run(config, folder, seed, until="clone")
    for settings in config.ablation.arms.values():  # what an arm alone reads, such as goals to dream of
        prepared_run(config_of_arm(path, folder, settings), folder, seed, until="clone")
    return compare_arms(config.ablation.arms, path, folder)


def compare_arms(arms: Arms, path: Path, folder: Path) -> dict[str, Any]:
    """The clone of the run in ``path`` in the real games, and every arm trained from it under ``folder/arms/``. Raises
    ``UserError``: as ``ablate``; before anything is trained.
    """
    slugs = slugs_of(arms)
    configs = {name: config_of_arm(path, folder, settings) for name, settings in arms.items()}
    run = RunFolder(path, next(iter(configs.values())).seed)
    need(run.games / "games.json", "collect")
    if any(config.dream.hindsight for config in configs.values()):
        need(supplement_folder(run, HINDSIGHT), MADE_BY[HINDSIGHT])
    print(f"== {path}: the clone", flush=True)
    result = {"run": str(path), "seed": run.summary["seed"], "clone": play_clone(next(iter(configs.values())), path)}
    result |= {"hardware": run.summary["hardware"], "arms": {}}
    for name, config in configs.items():
        print(f"== {path}: {name}", flush=True)
        there = folder / "arms" / slugs[name] / f"seed-{run.summary['seed']}"
        result["arms"][name] = {"settings": arms[name], **train_arm(config, path, there)}
        give_back_memory()
    return result


def arms_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Real success of the clone and of every arm, on tasks never seen and on training tasks, in Markdown.

    With several runs there is a row of all together. Below it, what each arm is, and by how much it differs from the
    first one on tasks never seen.
    """
    names = list(results[0]["arms"])
    columns = [[r["clone"] for r in results], *([r["arms"][name] for r in results] for name in names)]
    rows: list[list[object]] = []
    for split, kind in (("heldout_tasks", "never seen"), ("train_tasks", "training")):
        if any(split not in arm for column in columns for arm in column):
            continue
        for result, arms in zip(results, zip(*columns, strict=True), strict=True):
            rows.append([result["run"], kind, arms[0][split]["n"], *(_cell(arm, split) for arm in arms)])
        if len(results) > 1:
            everything = [_all(column, split) for column in columns]
            rows.append(["**all**", kind, everything[0].n, *(success.cell for success in everything)])
    lines = [
        *markdown(["run", "tasks", "n", "clone", *names], rows),
        "",
        "Success in the real games, 95 % intervals over tasks; in brackets what the last update's dreams believed.",
    ]
    first = columns[1]
    for name, column in zip(names, columns[1:], strict=True):
        versus = f"; less {names[0]}, never seen: {_difference(column, first)}" if column is not first else ""
        lines.append(f"- {name}: `{results[0]['arms'][name]['settings'] or 'as the run is'}`{versus}")
        for result in results:
            if stopped := result["arms"][name]["stopped_by"]:
                lines.append(f"  - {result['run']}: {stopped_sentence(stopped)}")
    return "\n".join(lines) + "\n"


def _all(arms: Sequence[Mapping[str, Any]], split: str) -> Proportion:
    return pooled([Proportion.from_json(arm[split]) for arm in arms])


def _difference(arms: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """On held-out tasks, paired by task; a dash where they were not played."""
    if any(not arm.get("heldout_tasks", {}).get("n") for arm in (*arms, *others)):
        return "–"
    after, before = _all(arms, "heldout_tasks"), _all(others, "heldout_tasks")
    return (
        f"{signed((after.rate or 0) - (before.rate or 0))} {interval(difference_ci95(after, before), with_sign=True)}"
    )


def _cell(arm: Mapping[str, Any], split: str) -> str:
    success, believed = Proportion.from_json(arm[split]), arm.get("dream_success")
    return success.cell + (f" ({believed[1]:.2f})" if success.n and believed else "")
