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

import asyncio
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.evaluate import play_real
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.loop import loop
from imagination.commands.train import train
from imagination.loop.origin import copy_folder
from imagination.rollout.dream_env import dream_starts
from imagination.runs.fingerprint import fingerprint
from imagination.runs.lifecycle import open_run
from imagination.runs.log import unplayed
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.files import write_atomically
from tests.benchmarks import study
from worldmodel.evaluation.proportions import Proportion, summarise

CURVE = "curve.json"
SHOWN = ("real-only", "real-only-small", "echo", "dream-then-real", "loop", "uniform", "frozen")
SETTINGS = ("preset=demo", "logger=none", "collect.workers=1")
NEW_TASKS = (
    *("env.options.train_fold=dev", "games.train=240", "evaluate.heldout_episodes=2", "train.keep_every=4"),
    *("loop.budget=1600", "loop.first_updates=12", "loop.keep=true"),
)
SHARED = ("games", "log", "origin", "loop", "models")  # of the round that arms have in common


@dataclass(frozen=True, slots=True)
class Arm:
    """One way.

    Attributes:
        kind: ``real`` trains in the real games alone; ``loop`` is ``imagine loop``.
        settings: overrides of the table's.
        begins: with which policy and, for ``loop``, after what: ``clone``, or ``dreams``, the round of dreams from the
            log that the arms of a seed have in common.
    """

    name: str
    title: str
    kind: Literal["real", "loop"] = "loop"
    settings: tuple[str, ...] = ()
    begins: Literal["clone", "dreams"] = "dreams"


REAL_ONLY = ("real-only", "real-only-small")  # the better of these is what others are compared with
DREAMS = Arm("dreams", "dreams from the log only", settings=("loop.budget=0",), begins="clone")
_ECHO = ("train.updates=16", "train.observation_coef=0.05")
ARMS = (
    Arm("real-only", "real only, 72 episodes an update", "real", ("train.updates=16",), "clone"),
    Arm(
        "real-only-small",
        "real only, 24 episodes an update",
        "real",
        ("train.groups=4", "train.group_size=6", "train.minibatches=1", "train.updates=36", "train.keep_every=9"),
        "clone",
    ),
    Arm("echo", "real only, observations predicted (ECHO)", "real", _ECHO, "clone"),
    Arm("paw", "real only, a third of them (PaW)", "real", (*_ECHO, "train.observation_share=0.33"), "clone"),
    DREAMS,
    Arm("dream-then-real", "dreams, then real only", "real", ("train.updates=12",)),
    Arm("loop", "the loop"),
    Arm("uniform", "the loop, tasks at random", settings=("loop.choice=uniform",)),
    Arm("frozen", "the loop, world model frozen", settings=("loop.fit_steps=0",)),
    Arm("fit-only", "the loop, real episodes only fitted to", settings=("loop.real_share=0",)),
    Arm("share-20", "the loop, a fifth real", settings=("loop.real_share=0.2",)),
    Arm("share-80", "the loop, four fifths real", settings=("loop.real_share=0.8",)),
    Arm("audited", "the loop, dreams as long as true", settings=("loop.horizon=audited",)),
    Arm(
        "no-guard",
        "the loop, neither guard nor tripwires",
        settings=("dream.min_confidence=0", "dream.min_outcome_confidence=0", "tripwires.enabled=false"),
        begins="clone",
    ),
    Arm("no-expert", "the loop, no expert episodes", settings=("train.expert_share=0",), begins="clone"),
    Arm("imitation", "the loop, best episodes imitated", settings=("algorithm.name=filtered_bc",), begins="clone"),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One arm of one seed.

    Attributes:
        points: real steps and success on held-out tasks after them, in the order of the steps.
        seconds: wall time of everything that the arm did, judging left out.
    """

    arm: str
    seed: int
    points: tuple[tuple[int, Proportion], ...]
    seconds: float

    def steps_to(self, level: float) -> int | None:
        """Real steps after which a judged policy succeeds at least so often, or ``None``: no such policy.

        Example::

            of points (0, 0.2), (1000, 0.5), (2000, 0.7): steps_to(0.6) is 2000
        """
        return next((steps for steps, success in self.points if (success.rate or 0.0) >= level), None)

    def to_json(self) -> dict[str, Any]:
        points = [[steps, success.to_json() | {"by_task": None}] for steps, success in self.points]
        return {"arm": self.arm, "seed": self.seed, "seconds": round(self.seconds), "points": points}


def main() -> int:
    parser = study.make_parser(__doc__, "outputs/loop-table", [0, 1, 2])
    names = [arm.name for arm in ARMS]
    parser.add_argument("--arms", nargs="+", default=names, choices=names, metavar="ARM", help=" ".join(names))
    parser.add_argument("--levels", type=float, nargs="+", default=[0.6, 0.9], help="success, of which steps are told")
    options, overrides = study.options_and_settings(parser, "all arms")
    parts = [
        (f"{arm.name}, seed {seed}", partial(make_arm, options.out / f"seed-{seed}", arm, seed, overrides))
        for arm in ARMS
        if arm.name in options.arms
        for seed in options.seeds
    ]
    return study.run_parts(options, parts, lambda: write_tables(options.out, options.levels))


def make_arm(folder: Path, arm: Arm, seed: int, overrides: list[str]) -> None:
    """One arm of a seed with all that it needs, as far as it is not there yet."""
    base = folder / "base"
    for command in (collect, fit_world_model, clone):
        study.run_once(load_config([*SETTINGS, *overrides, f"seed={seed}"], Config), base, command)
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
    train(config, there, starts=dream_starts(unplayed(run), config.dream.max_turns))


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
    rows = json.dumps([curve.to_json() for curve in curves], indent=1) + "\n"
    text = study.write_files(out, table=table(curves, levels), curves=rows)
    if curves:
        draw(curves, out / "loop.png")
    return text


def read_curves(out: Path) -> list[Curve]:
    """All that are there, in order of arms and seeds."""
    order, curves = [arm.name for arm in ARMS], []
    for path in out.glob(f"seed-*/*/{CURVE}"):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["arm"] != path.parent.name:
            continue  # an arm that goes on from the common round, and has not been judged yet
        points = [(int(p["real_steps"]), Proportion.from_json(p["success"])) for p in found["points"]]
        curves.append(Curve(found["arm"], found["seed"], tuple(sorted(points, key=lambda p: p[0])), found["seconds"]))
    return sorted(curves, key=lambda curve: (order.index(curve.arm), curve.seed))


def table(curves: Sequence[Curve], levels: Sequence[float]) -> str:
    """A line an arm. Success is that of all seeds together, with its interval over their tasks."""
    head = ["arm", "seeds", "n", "real steps", "success", "seconds"]
    head += [f"real steps to {level:g}" for level in levels] + [f"fewer than real only, {level:g}" for level in levels]
    by_arm = {arm: [curve for curve in curves if curve.arm == arm.name] for arm in ARMS}
    return study.markdown(head, [_cells(arm, own, curves, levels) for arm, own in by_arm.items() if own])


def _cells(arm: Arm, own: Sequence[Curve], curves: Sequence[Curve], levels: Sequence[float]) -> list[str]:
    last = study.pooled([curve.points[-1][1].to_json() for curve in own])
    steps = statistics.mean(curve.points[-1][0] for curve in own)
    seconds = statistics.mean(curve.seconds for curve in own)
    cells = [arm.title, str(len(own)), str(last.n), f"{steps:,.0f}", last.cell, f"{seconds:,.0f}"]
    cells += [", ".join(_steps(curve.steps_to(level), curve) for curve in own) for level in levels]
    return cells + [_ratios(own, curves, level) for level in levels]


def _steps(steps: int | None, curve: Curve) -> str:
    return f"> {curve.points[-1][0]:,}" if steps is None else f"{steps:,}"


def _ratios(own: Sequence[Curve], curves: Sequence[Curve], level: float) -> str:
    """Seed by seed, how often the steps of this arm go into those of the better real-only one."""
    cells = []
    for curve in own:
        steps = curve.steps_to(level)
        others = [one.steps_to(level) for one in curves if one.arm in REAL_ONLY and one.seed == curve.seed]
        known = [other for other in others if other is not None]
        cells.append(
            study.DASH if steps is None or not known else f"{min(known) / steps:.1f}x" if steps else "without any"
        )
    return study.DASH if set(cells) == {study.DASH} or curve.arm in REAL_ONLY else ", ".join(cells)


def draw(curves: Sequence[Curve], target: Path) -> None:
    """Success over real steps: a thin line a seed, a thick one for their mean where all seeds have been."""
    with study.figure(target, figsize=(9, 5)) as (_, panel):
        for name, colour in zip(SHOWN, study.COLOURS, strict=True):
            own = [curve for curve in curves if curve.arm == name]
            if not own:
                continue
            title = next(arm.title for arm in ARMS if arm.name == name)
            lines = [np.array([(steps, success.rate or 0.0) for steps, success in curve.points]).T for curve in own]
            for x, y in lines:
                panel.plot(x, y, color=colour, linewidth=0.7, alpha=0.45)
            grid = np.linspace(0, min(x[-1] for x, _ in lines), 60)
            mean = np.mean([np.interp(grid, x, y) for x, y in lines], axis=0)
            panel.plot(grid, mean, color=colour, linewidth=2.4, label=f"{title} ({len(own)} seeds)")
        panel.set(xlabel="real steps on the new tasks", ylabel="success on held-out tasks, real world", ylim=(0, 1))
        if panel.lines:
            panel.legend(frameon=False, fontsize=8, loc="upper left")


if __name__ == "__main__":
    sys.exit(main())
