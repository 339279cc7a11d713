from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from imagination.commands.audit import audit_files, audited_before, run_audit
from imagination.commands.experiments.ablate import arms_table, compare_arms
from imagination.commands.experiments.arms import (
    SEEDS,
    check_arms,
    config_of_arm,
    fit_beside,
    markdown,
    named_runs,
    note_kept,
    prepared_run,
    slugs_of,
    write_results,
)
from imagination.evaluation.audit import find_candidates
from imagination.evaluation.verdict import show
from imagination.runs.lock import locked
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.scale.ray_jobs import run_jobs
from imagination.settings import Config
from imagination.settings.compose import load_config, load_on_top, remembered_overrides
from imagination.settings.scale import ScaleSettings
from real_envs.files import write_atomically
from worldmodel.evaluation.proportions import number

PARTS = ("others", "models", "arms")  # the longest first


def audit_table(config: Config, folder: Path) -> None:
    """Audit the world models of several runs, by default of seeds 0, 1 and 2, in one table.

    Audits every world model of several runs. Runs that are there are used; missing ones of seeds 0, 1 and 2
    are made as far as an audit needs them, with checkpoints of the policy kept on the way. Those get the
    world models of audit.others, too: one that writes edits, fitted to the same log. Their clones are also
    trained in dreams alone, with guard and tripwires and without (ablation=gating). Runs share the cores,
    one process each (jobs=1 takes one after the other): an hour and a half on two CPU cores.

    Reads: nothing, or the runs of audit.runs
    Writes: audit-table.md, audit-table.json, gating.json; audit.json and audit.html in each run

    Examples:
        imagine audit-table
        imagine audit-table audit.runs=[outputs/a,outputs/b] audit.world_models=[worldmodel]

    Raises:
        UserError: a run of ``audit.runs`` is not there, or ``audit.others`` cannot work.
    """
    alone = replace(config, scale=ScaleSettings())  # a run is a job, and needs no players
    if config.audit.runs:
        paths = named_runs(config.audit.runs, "audit.runs")
        jobs = {str(path): (alone, path) for path in paths}
        rows, gating = list(run_jobs(config.scale, audit_models, jobs, folder, config.jobs).values()), []
    else:
        check_arms(config.audit.others, folder, folder)
        note_kept(config, folder)
        seeds = {f"seed-{seed}": (alone, folder, seed) for seed in SEEDS}
        paths = list(run_jobs(config.scale, prepared_run, seeds, folder, config.jobs).values())
        parts = {f"{path.name}-{part}": (part, alone, path, folder) for part in PARTS for path in paths}
        made = run_jobs(config.scale, _part, parts, folder, config.jobs)
        rows = [made[f"{path.name}-{part}"] for path in paths for part in ("models", "others")]
        gating = [made[f"{path.name}-arms"] for path in paths]
    results = [row for of_run in rows for row in of_run]
    table = render_table(results)
    if gating:
        table += f"\n**Learning from dreams alone, with guard and tripwires and without**\n\n{arms_table(gating)}"
        write_atomically(folder / "gating.json", json.dumps(gating, indent=1))
    write_results(folder, "audit-table", results, table)
    print(f"table: {folder / 'audit-table.md'}")


def _part(part: str, config: Config, path: Path, folder: Path) -> Any:
    """What is done with a seed's run: audits of its own world models, of others fitted to its log, or training."""
    if part == "models":
        return audit_models(config, path)
    if part == "others":
        return audit_others(config, path, folder)
    return compare_arms(load_config(["ablation=gating"], Config).ablation.arms, path, folder)


def audit_models(config: Config, path: Path) -> list[dict[str, Any]]:
    """Rows of the world models of a run that ``audit.world_models`` names."""
    own, rows = config_of(path, config), []
    for name in config.audit.world_models:
        own.audit.world_model = name
        rows.append(row_of(_audited(own, path), audit_files(path, name)[1]))
    return rows


def _audited(config: Config, path: Path) -> dict[str, Any]:
    audited = audited_before(config, path)
    print(f"== {path}, {config.audit.world_model}{': audited before' if audited else ''}", flush=True)
    with locked(path, "audit"):
        audited = audited or run_audit(config, path)
    give_back_memory()
    return audited


def audit_others(config: Config, path: Path, folder: Path) -> list[dict[str, Any]]:
    """Rows of the further world models of a run, judged by what the run's own policies do."""
    rows = []
    slugs = slugs_of(config.audit.others)
    for name, settings in config.audit.others.items():
        other, there = config_of_arm(path, folder, settings), path / "worlds" / slugs[name]
        print(f"== {path}, {name}: fit to the same log", flush=True)
        fit_beside(other, path, there)
        give_back_memory()
        other.audit = deepcopy(config.audit)
        other.audit.policies = other.audit.policies or [
            str(c.folder) for c in find_candidates(path / "models", other.evaluate.temperature, 0, ())
        ]
        row = row_of(_audited(other, there), audit_files(there, other.audit.world_model)[1])
        rows.append(row | {"run": path.name, "world_model": row["world_model"] | {"name": name}})
    return rows


def config_of(path: Path, config: Config) -> Config:
    """A run's own settings, such as the kind of its world model, with the audit's of ``config``."""
    overrides = remembered_overrides(path)
    own = load_on_top(overrides, [], Config) if overrides else deepcopy(config)
    own.audit = deepcopy(config.audit)
    own.worldmodel.code.trust = config.worldmodel.code.trust
    own.seed = int(RunFolder(path, config.seed).summary["seed"])
    return own


def row_of(audited: Mapping[str, Any], page: Path) -> dict[str, Any]:
    """What the table keeps of an audit: targets, verdict, notes, and the failures on real actions of all policies."""
    own = audited["sets"].get("on_policies") or audited["sets"].get("held_out")
    return {
        "run": audited["run"],
        "seed": audited["seeds"]["run"],
        "world_model": audited["world_model"],
        "policies": len(audited["policies"]),
        "targets": audited["targets"],
        "trust": audited["verdict"]["trust"],
        "notes": audited["notes"],
        "failures": {"about": own["about"], **own["failures"]} if own else None,
        "page": str(page),
        "seconds": audited["seconds"],
        "real_steps": audited["real_steps"],
    }


def render_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A table for each world model: one line a run, means over the runs, and why targets are missed; in Markdown."""
    lines = []
    for name in dict.fromkeys(r["world_model"]["name"] for r in results):
        of_model = [r for r in results if r["world_model"]["name"] == name]
        rows = [[r["run"], name, r["policies"], *map(_cell, r["targets"]), r["trust"]] for r in of_model]
        if len(of_model) > 1:
            means = map(_mean, zip(*(r["targets"] for r in of_model), strict=True))
            rows.append([f"**mean of {len(of_model)}**", name, "", *means, ""])
        head = ["run", "world model", "policies", *map(_head, of_model[0]["targets"]), "trust"]
        lines += [*markdown(head, rows), ""]
    lines.append("Bold: missed. Brackets: 95 % intervals. Own actions: those of each run's last policy, really played.")
    for r in results:
        lines += _why(r)
    return "\n".join(lines) + "\n"


def _head(target: Mapping[str, Any]) -> str:
    return f"{target['title']} {'≥' if target['bound'] == '>=' else '≤'} {target['target']:g}"


def _cell(target: Mapping[str, Any]) -> str:
    if target["met"] is None:
        return "–"
    cell = show(target["estimate"])
    return cell if target["met"] else f"**{cell}**"


def _mean(targets: Sequence[Mapping[str, Any]]) -> str:
    values = [t["estimate"]["value"] for t in targets if t["estimate"]["value"] is not None]
    return number(sum(values) / len(values), 3) if values else "–"


def _why(result: Mapping[str, Any]) -> list[str]:
    """The groups of failures behind missed targets, each with its surest example."""
    failures = result["failures"]
    if not failures or not failures["wrong"] or all(t["met"] is not False for t in result["targets"]):
        return []
    lines = [
        "",
        f"**{result['run']}, {result['world_model']['name']}**: {failures['wrong']} of {failures['n']} predictions "
        f"wrong, {failures['wrong_reward']} in the reward ({failures['about']}).",
        "",
    ]
    for group in failures["groups"]:
        lines.append(f"- {group['title']}: {group['n']} ({group['share_of_wrong']:.0%})")
        for case in group["examples"][:1]:
            predicted = "malformed" if case["predicted"] is None else _quoted(case["predicted"])
            lines.append(f"  - `> {_line(case['action'])}`: predicted {predicted}; real {_quoted(case['real'])}")
    return lines


def _quoted(answer: Mapping[str, Any]) -> str:
    text = _line(answer["observation"])
    text = text if len(text) <= 110 else text[:107] + "..."
    return f"“{text}” (reward {answer['reward']:g}{', end' if answer['terminated'] else ''})"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
