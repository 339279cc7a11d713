"""How well the agent does on tasks never seen, over the number of tasks that it was trained on.

    python -m tests.benchmarks.transfer --tasks 6 60 600 --seeds 0 1 2

Each number of training tasks has a log of about the same size, and everything else is the demo's. A line of the table
is one number of tasks, with what other episodes have shown in the world model's prompt (``worldmodel.facts``) or
without: how exact the world model is on held-out tasks, and how often the policy solves them, cloned, trained in
dreams, and trained by the same updates in the real tasks. Intervals are over the held-out tasks of all seeds.

Writes ``table.md``, ``table.json`` and ``transfer.png`` into ``--out``; runs that are done are not done again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagination.commands.experiments.demo import demo_seed
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.files import write_atomically
from tests.benchmarks.study import figure, markdown, pooled, write_files
from worldmodel.evaluation.proportions import Proportion

ARMS = ("cloned", "dream-trained", "control")
HEAD = (
    *("training tasks", "facts", "seeds", "world model exact on held-out tasks (n)", "reward precision, recall"),
    *("cloned", "dream-trained", "control, real steps", "n"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/transfer"))
    parser.add_argument("--tasks", type=int, nargs="+", default=[6, 60, 600])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--facts", nargs="+", choices=["with", "without"], default=["with", "without"])
    parser.add_argument("overrides", nargs="*", help="settings, such as env.options.game=coin")
    options = parser.parse_args()
    demo = load_config(["preset=demo", *options.overrides], Config)
    episodes = demo.games.train * demo.collect.episodes
    cells: list[dict[str, Any]] = []
    for tasks in options.tasks:
        for facts in options.facts:
            found = []
            for seed in options.seeds:
                config = load_config(["preset=demo", *options.overrides, f"seed={seed}"], Config)
                config.games.train, config.collect.episodes = tasks, max(1, round(episodes / tasks))
                config.worldmodel.facts = demo.worldmodel.facts if facts == "with" else 0
                config.evaluate.tasks = min(tasks, demo.evaluate.tasks or tasks)
                print(f"== {tasks} tasks, {facts} facts, seed {seed}", flush=True)
                found.append(demo_seed(config, options.out / f"{tasks}-{facts}" / f"seed-{seed}", seed))
            cells.append(cell(tasks, facts, found))
            write_atomically(options.out / "table.json", json.dumps(cells, indent=1))
            text = write_files(options.out, table=markdown(HEAD, map(row, cells)))
    draw(cells, options.out / "transfer.png")
    print(text)


def cell(tasks: int, facts: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What some seeds have found together."""
    judged = [run["world_model"].get("heldout_tasks_known") or run["world_model"]["heldout_tasks"] for run in runs]
    arms = [[run["policy"][which]["heldout_tasks"] for run in runs] for which in ("before", "after")]
    arms.append([run["control"]["heldout_tasks"] for run in runs])
    mean = {
        key: sum(j[key] or 0.0 for j in judged) / len(judged)
        for key in ("exact_match", "reward_precision", "reward_recall")
    }
    together = dict(zip(ARMS, map(pooled, arms), strict=True))
    return {
        "tasks": tasks,
        "facts": facts,
        "seeds": len(runs),
        "world_model": {**mean, "n": sum(j["n"] for j in judged)},
        **{name: p.to_json() for name, p in together.items()},
        "real_steps": round(sum(run["control"]["real_steps"]["train"] for run in runs) / len(runs)),
    }


def row(found: Mapping[str, Any]) -> tuple[object, ...]:
    judged, arms = found["world_model"], [Proportion.from_json(found[name]) for name in ARMS]
    return (
        *(found[key] for key in ("tasks", "facts", "seeds")),
        f"{judged['exact_match']:.2f} ({judged['n']:,})",
        f"{judged['reward_precision']:.2f}, {judged['reward_recall']:.2f}",
        *(arms[0].cell, arms[1].cell, f"{arms[2].cell} ({found['real_steps']:,})", arms[1].n),
    )


def draw(cells: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Held-out success and exact match over the number of training tasks."""
    with figure(target, 1, 2, dpi=130, figsize=(11, 4.2), sharex=True) as (_, axes):
        for facts, style in (("with", "-"), ("without", "--")):
            mine = [found for found in cells if found["facts"] == facts]
            if not mine:
                continue
            tasks = [found["tasks"] for found in mine]
            axes[0].plot(
                tasks, [found["world_model"]["exact_match"] for found in mine], f"o{style}", label=f"{facts} facts"
            )
            for name, colour in zip(ARMS, ("#6e7781", "#7b5cd6", "#1a7f5a"), strict=True):
                rates = [Proportion.from_json(found[name]) for found in mine]
                middle = [p.rate or 0.0 for p in rates]
                spread = [
                    [abs(m - (p.ci95 or (0, 0))[side]) for m, p in zip(middle, rates, strict=True)] for side in (0, 1)
                ]
                axes[1].errorbar(
                    tasks, middle, yerr=spread, fmt=f"o{style}", color=colour, capsize=3, label=f"{name}, {facts} facts"
                )
        axes[0].set(
            xscale="log", xlabel="training tasks", ylabel="share of turns", title="World model exact, held-out tasks"
        )
        axes[1].set(xlabel="training tasks", ylabel="success rate", title="Policy, held-out tasks in the real world")
        for one in axes:
            one.set_ylim(0, 1)
            one.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
