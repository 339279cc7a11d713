"""Stage ``loop``: act a little in reality where it teaches most, fit the world model again, dream, improve.

Each round is five steps, and ``summary.json`` says which comes next. What a step makes is whole or not there, so a loop
that is killed goes on with the step in which it was: choose, act, refit, promote, improve.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from imagination.dreaming.world_models import UNFINISHED
from imagination.loop.budget import Budget
from imagination.loop.refit import promote
from imagination.runs.lifecycle import need, open_run
from imagination.runs.memory import give_back_memory
from imagination.runs.real_costs import real_costs, spent_before
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import check_world
from imagination.settings import Config, UserError
from imagination.stages import check_train
from imagination.stages.clone import clone
from imagination.stages.collect import generate_tasks
from imagination.stages.fit_world_model import fit_world_model
from imagination.stages.loop_rounds import choose_tasks, copy_folder, play_round, refit_round, train_round
from real_envs.isolation import PoolStats


def loop(config: Config, folder: Path) -> None:
    """Spends ``loop.budget`` real steps and leaves the policy in ``models/policy``, the world model in its place.

    Raises:
        UserError: settings contradict each other, or the real world answered nothing.
    """
    check(config)
    run = open_run(config, folder, "loop")
    check_world(run, config.env)
    with run.timed("loop"):
        generate_tasks(config, run)
        if "loop" not in run.summary:
            cold = not (run.log / "manifest.json").exists()
            first = {"cold": cold, "round": 0, "step": "act" if cold else "fit", "charged": 0}
            run.update({"loop": {**first, "chosen": [], "scores": [], "versions": [], "rounds": []}})
            run.update(real_costs("loop", PoolStats(), config.env.price))
        while (step := run.summary["loop"]["step"]) != "choose" or left(config, run):
            STEPS[step](config, run)
            give_back_memory()
    run.update({"done": {"loop": run.settings}})
    print(f"{run.summary['loop']['charged']} real steps spent; the policy is in {run.model('policy')}")


def left(config: Config, run: RunFolder) -> int:
    """Real steps that the budget still has."""
    return budget_of(config).left(run.summary["loop"]["charged"], spent_before(run, "loop").seconds)


def budget_of(config: Config) -> Budget:
    return Budget(config.loop.budget, config.loop.seconds, config.loop.price, config.env.price)


def check(config: Config) -> None:
    """
    Raises:
        UserError: the settings cannot work together.
    """
    check_train.check(config)
    if check_train.most(config.train.real_share) or config.train.world == "real":
        raise UserError(
            "the loop charges every real step to loop.budget, and training beside dreams takes its own: set "
            "train.real_share=0 and train.world=dream"
        )
    if config.tripwires.real_episodes:
        raise UserError("probes of the tripwires are not in loop.budget: set tripwires.real_episodes=0")
    if config.train.tasks != "train":
        raise UserError(f"the loop plays training tasks: set train.tasks=train, not {config.train.tasks}")
    if config.loop.price and not config.env.price:
        raise UserError("loop.price limits what real steps cost: set env.price, the price of one")


def _choose(config: Config, run: RunFolder) -> None:
    chosen, scores = choose_tasks(config, run, run.summary["loop"]["round"])
    run.update({"loop": {"chosen": chosen, "scores": scores, "step": "act"}})


def _act(config: Config, run: RunFolder) -> None:
    """Plays real episodes into the log. What was spent and that it is done is one write."""
    state, spent = run.summary["loop"], spent_before(run, "loop")
    journal = asyncio.run(
        play_round(config, run, state["round"], state["chosen"], budget_of(config), (state["charged"], spent.seconds))
    )
    told = real_costs("loop", spent + journal.spent, config.env.price)
    if not journal.charged:
        journal.path.unlink()
        run.update(told)
        why = next((f": {t.failure}" for t in journal.episodes() if t.failure), "; raise loop.budget")
        raise UserError(f"the real world answered no step of round {state['round']}{why}")
    step = "fit" if state["round"] == 0 else "refit"
    run.update({**told, "loop": {"charged": state["charged"] + journal.charged, "step": step}})
    journal.path.unlink()


def _fit(config: Config, run: RunFolder) -> None:
    """What there is not yet: the first version of the world model, and the policy to start from."""
    state = run.summary["loop"]
    made = run.summary.get("done", {}) if state["cold"] else {}
    whole = run.summary.get("world_model_form", UNFINISHED) != UNFINISHED
    if not (run.model("worldmodel").exists() and whole) or (state["cold"] and "fit_world_model" not in made):
        fit_world_model(config, run.path)
    if not run.model("policy-clone").exists() or (state["cold"] and "clone" not in made):
        clone(config, run.path)
    copy_folder(need(run.model(config.loop.policy), "clone"), policy_folder(run, 0))
    run.update({"loop": {"step": "improve", "versions": [{"version": 0, "round": 0, "promoted": True}]}})


def _refit(config: Config, run: RunFolder) -> None:
    state = run.summary["loop"]
    verdict = refit_round(config, run, state["round"], state["versions"])
    run.update({"loop": {"versions": [*state["versions"], verdict], "step": "promote"}})


def _promote(config: Config, run: RunFolder) -> None:
    state = run.summary["loop"]
    if state["versions"][-1]["promoted"]:
        promote(run, config.worldmodel.members, run.path / "loop" / "candidate")
    shutil.rmtree(run.path / "loop" / "candidate", ignore_errors=True)
    run.update({"loop": {"step": "improve"}})


def _improve(config: Config, run: RunFolder) -> None:
    """Trains the policy in dreams, publishes it, and ends the round."""
    state = run.summary["loop"]
    number = state["round"]
    told = train_round(config, run, number, policy_folder(run, number), policy_folder(run, number + 1))
    copy_folder(policy_folder(run, number + 1), run.model("policy"))
    version = [v["version"] for v in state["versions"] if v["promoted"]][-1]
    latest = state["versions"][-1]
    line: dict[str, Any] = {
        "round": number,
        "charged": state["charged"],
        "left": left(config, run),
        "tasks": state["chosen"],
        "scores": state["scores"],
        "version": version,
        "promoted": latest["promoted"] if latest["round"] == number else None,
        **told,
    }
    run.forget("loop", number)
    numbers = {k: float(v) for k, v in line.items() if isinstance(v, (int, float)) and k != "round"}
    run.record("loop", number, numbers)
    print(line_of(line, latest), flush=True)
    kept = [r for r in state["rounds"] if r["round"] < number]
    run.update({"loop": {"rounds": [*kept, line], "round": number + 1, "step": "choose", "chosen": [], "scores": []}})
    shutil.rmtree(policy_folder(run, number), ignore_errors=True)


STEPS: dict[str, Callable[[Config, RunFolder], None]] = {
    "choose": _choose,
    "act": _act,
    "fit": _fit,
    "refit": _refit,
    "promote": _promote,
    "improve": _improve,
}


def line_of(line: dict[str, Any], latest: dict[str, Any]) -> str:
    """A round in one line of the terminal."""
    tasks = list(dict.fromkeys(line["tasks"]))
    where = ", ".join(tasks[:3]) + (f" and {len(tasks) - 3} more" if len(tasks) > 3 else "")
    parts = [f"round {line['round']}: {line['charged']} real steps, {line['left']} left"]
    if tasks:
        parts.append(f"acted in {where}")
    verdict = "" if line["promoted"] is None else ", promoted" if line["promoted"] else f", {latest['why']}"
    parts.append(f"world model version {line['version']}{verdict}")
    if (dreamed := line["dreamed_success"]) is not None:
        parts.append(f"dreamed success {dreamed:.2f}")
    if line["real_success"] is not None and line["real_success"]["n"]:
        real = line["real_success"]
        parts.append(f"real success while acting {real['success']:.2f} of {real['n']}")
    return "; ".join(parts)


def policy_folder(run: RunFolder, number: int) -> Path:
    """The policy that acts in a round and is improved in it."""
    return run.path / "loop" / "policies" / str(number)
