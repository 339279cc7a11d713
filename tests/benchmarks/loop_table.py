"""How many real steps on new tasks buy how much success: the loop, its parts apart, and learning without dreams.

    python -m tests.benchmarks.loop_table --seeds 0 1 2
    python -m tests.benchmarks.loop_table --seeds 0 --arms real-only loop loop.budget=4000
    python -m tests.benchmarks.loop_table --table

Each seed has a log, a world model and a clone of the map reader's tasks (``preset=demo``; ``<out>/seed-<n>/base``).
They meet 240 other tasks of the same family. What is counted are real steps on these; resets are free. The policies of
every arm on the way are judged on tasks of a third fold, which no arm plays and nothing is chosen by, the same tasks
and seeds for all. Arms of a seed that begin with dreams from the log have that round in common
(``<out>/seed-<n>/dreams``).

What exists is not done again, and what was interrupted goes on. Writes ``table.md``, ``curves.json`` and ``loop.png``
into ``<out>`` after every arm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.evaluate import play_real
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.loop import loop
from imagination.commands.train import train
from imagination.loop.origin import copy_folder, roots
from imagination.runs.fingerprint import fingerprint
from imagination.runs.lifecycle import open_run
from imagination.runs.memory import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.files import write_atomically
from tests.benchmarks.arguments import going_on, options_and_settings
from tests.benchmarks.loop_arms import ARMS, DREAMS, Arm
from tests.benchmarks.loop_curves import CURVE, draw, read_curves, table
from worldmodel.evaluation.proportions import summarise

SETTINGS = ("preset=demo", "logger=none", "collect.workers=1")
NEW_TASKS = (
    *("env.options.train_fold=dev", "games.train=240", "evaluate.heldout_episodes=2", "train.keep_every=4"),
    *("loop.budget=1600", "loop.first_updates=12", "loop.keep=true"),
)
SHARED = ("games", "log", "origin", "loop", "models")  # of the round that arms have in common


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/loop-table"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    names = [arm.name for arm in ARMS]
    parser.add_argument("--arms", nargs="+", default=names, choices=names, metavar="ARM", help=" ".join(names))
    parser.add_argument("--levels", type=float, nargs="+", default=[0.6, 0.9], help="success, of which steps are told")
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    options, overrides = options_and_settings(parser, "all arms")
    failed: list[str] = []
    for arm in [arm for arm in ARMS if arm.name in options.arms and not options.table]:
        for seed in options.seeds:
            print(f"== {arm.name}, seed {seed}", flush=True)
            with going_on(f"{arm.name}, seed {seed}", failed):
                make_arm(options.out / f"seed-{seed}", arm, seed, overrides)
            write_tables(options.out, options.levels)
    print(write_tables(options.out, options.levels))
    return int(bool(failed))


def make_arm(folder: Path, arm: Arm, seed: int, overrides: list[str]) -> None:
    """One arm of a seed with all that it needs, as far as it is not there yet."""
    base = folder / "base"
    for name, stage in (("collect", collect), ("fit_world_model", fit_world_model), ("clone", clone)):
        config = load_config([*SETTINGS, *overrides, f"seed={seed}"], Config)
        if RunFolder(base, seed).summary.get("done", {}).get(name) != fingerprint(config, name):
            stage(config, base)
            give_back_memory()
    words = [*SETTINGS, *NEW_TASKS, f"loop.origin={base}", *overrides, f"seed={seed}"]
    first = load_config([*words, *DREAMS.settings], Config)
    common = folder / DREAMS.name
    if RunFolder(common, seed).summary.get("done", {}).get("loop") is None:
        loop(first, common)
        give_back_memory()
    config, there = load_config([*words, *arm.settings], Config), folder / arm.name
    if arm.kind == "real":
        _real(config, common, there, arm)
    elif arm != DREAMS:
        _loop(config, common, there, arm)
    judge(config, there, arm)
    give_back_memory()


def _loop(config: Config, common: Path, there: Path, arm: Arm) -> None:
    if RunFolder(there, config.seed).summary.get("done", {}).get("loop") == fingerprint(config, "loop"):
        return
    if arm.begins == "dreams" and "loop" not in RunFolder(there, config.seed).summary:
        copy_folder(common, there)
    loop(config, there)


def _real(config: Config, common: Path, there: Path, arm: Arm) -> None:
    """The same updates in the real games alone, from the clone or from the policy that dreams have taught."""
    config.train.world = "real"
    run = open_run(config, there, "train")
    if run.summary.get("done", {}).get("train") == run.settings:
        return
    if not run.summary.get("copied"):
        for name in SHARED:
            shutil.rmtree(there / name, ignore_errors=True)  # perhaps half a copy
            shutil.copytree(common / name, there / name)
        shutil.rmtree(run.model("kept"))
        if arm.begins == "dreams":
            copy_folder(run.model("policy"), run.model("policy-clone"))
        run.update({"copied": True})
    train(config, there, starts=roots(run))


def judge(config: Config, folder: Path, arm: Arm) -> None:
    """``curve.json``: success on held-out tasks of every policy that was kept, over the real steps behind it."""
    path = folder / CURVE
    known = json.loads(path.read_text(encoding="utf-8"))["points"] if path.exists() else []
    points = {point["policy"]: point for point in known}
    run = RunFolder(folder, config.seed)
    for name, steps in _policies(run, arm):
        if name not in points:
            success = asyncio.run(_success(config, run, name))
            points[name] = {"policy": name, "real_steps": steps, "success": success}
    seconds = sum(run.summary["wall_seconds"].values())
    found = {"arm": arm.name, "seed": config.seed, "seconds": seconds, "points": list(points.values())}
    write_atomically(path, json.dumps(found, indent=1))


def _policies(run: RunFolder, arm: Arm) -> list[tuple[str, int]]:
    """Folders in ``models/`` in the order in which they were made, with the real steps that were taken before."""
    if arm.kind == "loop":
        rounds = run.summary["loop"]["rounds"]
        return [("policy-clone", 0)] + [(f"kept/loop-{r['round']:05d}", r["charged"]) for r in rounds]
    spent = [0]
    for line in run.metrics("train"):
        spent.append(spent[-1] + int(line["turns"]))
    kept = sorted(path.name for path in run.model("kept").glob("train-*"))
    found = [(f"kept/{name}", spent[int(name.rpartition("-")[2])]) for name in kept]
    return [("policy-clone", 0), *found, ("policy", spent[-1])]


async def _success(config: Config, run: RunFolder, name: str) -> dict[str, Any]:
    session = Session(config, run)
    tasks, policy = session.tasks(), session.policy(name)
    agent = session.agent(policy, config.evaluate.temperature)
    episodes = await play_real(config, tasks, agent, policy.version, name, "heldout")
    await tasks.close()
    return summarise(episodes).success.to_json()


def write_tables(out: Path, levels: list[float]) -> str:
    """``table.md``, ``curves.json`` and ``loop.png`` of all arms that are there; what the first says."""
    curves = read_curves(out)
    found = table(curves, levels)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "table.md", found)
    write_atomically(out / "curves.json", json.dumps([curve.to_json() for curve in curves], indent=1) + "\n")
    if curves:
        draw(curves, out / "loop.png")
    return found


if __name__ == "__main__":
    sys.exit(main())
