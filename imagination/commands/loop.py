"""Stage ``loop``: act a little in reality where it teaches most, fit the world model again, dream, improve.

Each round is some steps, and ``summary.json`` says which comes next. What a step makes is whole or not there, so a loop
that is killed goes on with the step in which it was::

    choose, act, refit, promote, improve, close
    choose, play, refit, promote, close            loop.overlap=true: play is act and improve at the same time

Round 0 has nothing to choose: it begins from another run (begin), or acts without a log, and fits what is missing.
"""

from __future__ import annotations

import asyncio
import contextvars
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from imagination.commands import check_train
from imagination.commands.clone import clone
from imagination.commands.collect import generate_tasks
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.loop_learning import real_success, refit_round, train_round, true_turns
from imagination.commands.loop_rounds import begin, choose_tasks, play_round, policy_folder
from imagination.evaluation.costs import real_costs, spent_before
from imagination.loop.acting import Budget
from imagination.loop.journal import Journal
from imagination.loop.origin import copy_folder
from imagination.loop.refit import promote
from imagination.rollout.schedules import check_share, most
from imagination.rollout.world_models import UNFINISHED
from imagination.runs.lifecycle import need, open_run
from imagination.runs.log import read_log
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import check_world
from imagination.settings import Config, UserError
from real_envs.worker_pool import PoolStats, count_apart
from worldmodel.evaluation.proportions import Proportion, difference_ci95


def loop(config: Config, folder: Path) -> None:
    """Act a little for real where it teaches most, refit, dream, improve; every real step is counted.

    Rounds of five steps, until loop.budget real steps are spent: choose tasks by what log and dreams say of
    them, play the policy there for real, fit the world model on to all real transitions, promote the result
    only where it is no worse on held-back real episodes, and improve the policy in its dreams. Without a
    log scripted agents play first, within the budget; a world model and a clone that are missing are made.
    Stopped at any point, even killed, it goes on where it was; a larger loop.budget goes on with a finished
    one. The run's log and world model grow; a copy of its folder keeps what they were.

    Reads: nothing, or what the stages above write
    Writes: games/, log/, models/, loop/, metrics.jsonl, summary.json

    Examples:
        imagine loop run=mine loop.budget=2000
        imagine loop run=fresh env=textworld_express loop.budget=5000 loop.first_episodes=100
        imagine loop run=plain loop.choice=uniform

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
            step = "begin" if config.loop.origin else "act" if cold else "fit"
            first = {"origin": config.loop.origin, "cold": cold, "round": 0, "step": step, "charged": 0, "best": None}
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
    if most(config.train.real_share) or config.train.world == "real":
        raise UserError(
            "the loop charges every real step to loop.budget, and training beside dreams takes its own: set "
            "train.real_share=0 and train.world=dream; loop.real_share is the share of the loop's own real episodes"
        )
    if wrong := check_share("loop.real_share", config.loop.real_share):
        raise UserError(wrong)
    if most(config.loop.real_share) and (config.train.groups == 1 or config.train.process):
        raise UserError(
            "loop.real_share learns from real episodes beside dreams: set train.groups above 1 and train.process='', "
            "or loop.real_share=0"
        )
    if config.tripwires.real_episodes:
        raise UserError("probes of the tripwires are not in loop.budget: set tripwires.real_episodes=0")
    if config.train.tasks != "train":
        raise UserError(f"the loop plays training tasks: set train.tasks=train, not {config.train.tasks}")
    if config.worldmodel.kind == "diffusion":
        raise UserError(
            "the loop compares versions of the world model by the log-probability of held-back turns, which "
            "worldmodel.kind=diffusion only bounds: set worldmodel.kind=text, delta or retrieval"
        )
    if config.loop.price and not config.env.price:
        raise UserError("loop.price limits what real steps cost: set env.price, the price of one")


def _begin(config: Config, run: RunFolder) -> None:
    before = spent_before(run, "loop")
    with count_apart() as spent:
        begin(config, run)
    run.update({**real_costs("loop", before + spent, config.env.price), "loop": {"step": "fit"}})


def _choose(config: Config, run: RunFolder) -> None:
    chosen, scores = choose_tasks(config, run, run.summary["loop"]["round"])
    run.update({"loop": {"chosen": chosen, "scores": scores, "step": "play" if config.loop.overlap else "act"}})


def _act(config: Config, run: RunFolder) -> None:
    """Plays real episodes into the log. What was spent and that it is done is one write."""
    _charge(config, run, _played(config, run), "fit" if run.summary["loop"]["round"] == 0 else "refit")


def _played(config: Config, run: RunFolder) -> Journal:
    state, seconds = run.summary["loop"], spent_before(run, "loop").seconds
    return asyncio.run(
        play_round(config, run, state["round"], state["chosen"], budget_of(config), (state["charged"], seconds))
    )


def _charge(config: Config, run: RunFolder, journal: Journal, step: str, **more: Any) -> None:
    """
    Raises:
        UserError: the world answered nothing; what was asked of it is written down, and the round can be played again.
    """
    state = run.summary["loop"]
    told = real_costs("loop", spent_before(run, "loop") + journal.spent, config.env.price)
    if not journal.charged:
        journal.path.unlink()
        run.update(told)
        why = f": {journal.failed[-1]}" if journal.failed else "; raise loop.budget"
        raise UserError(f"the real world answered no step of round {state['round']}{why}")
    run.update({**told, "loop": {"charged": state["charged"] + journal.charged, "step": step, **more}})
    journal.path.unlink()


def _fit(config: Config, run: RunFolder) -> None:
    """What there is not yet: the first version of the world model, and the policy to start from."""
    state = run.summary["loop"]
    if not config.loop.origin:
        made = run.summary.get("done", {}) if state["cold"] else {}
        whole = run.summary.get("world_model_form", UNFINISHED) != UNFINISHED
        if not (run.model("worldmodel").exists() and whole) or (state["cold"] and "fit_world_model" not in made):
            fit_world_model(config, run.path)
        if not run.model("policy-clone").exists() or (state["cold"] and "clone" not in made):
            clone(config, run.path)
    first = "policy-clone" if config.loop.origin else config.loop.policy
    copy_folder(need(run.model(first), "clone"), policy_folder(run, 0))
    turns = true_turns(config, run) if config.loop.horizon == "audited" else None
    version = {"version": 0, "round": 0, "promoted": True}
    run.update({"loop": {"step": "improve", "versions": [version], "true_turns": turns}})


def _refit(config: Config, run: RunFolder) -> None:
    state = run.summary["loop"]
    verdict = refit_round(config, run, state["round"], state["versions"])
    run.update({"loop": {"versions": [*state["versions"], verdict], "step": "promote"}})


def _promote(config: Config, run: RunFolder) -> None:
    state = run.summary["loop"]
    found: dict[str, Any] = {"step": "close" if config.loop.overlap else "improve"}
    if state["versions"][-1]["promoted"]:
        promote(run, config.worldmodel.members, run.path / "loop" / "candidate")
        if config.loop.horizon == "audited":
            found["true_turns"] = true_turns(config, run)
    shutil.rmtree(run.path / "loop" / "candidate", ignore_errors=True)
    run.update({"loop": found})


def _improve(config: Config, run: RunFolder) -> None:
    """Trains the policy in dreams, and from real episodes beside them."""
    number = run.summary["loop"]["round"]
    _back_to_the_best(config, run)
    told = train_round(config, run, number, policy_folder(run, number), policy_folder(run, number + 1))
    run.update({"loop": {"learned": told, "step": "close"}})


def _play(config: Config, run: RunFolder) -> None:
    """``act`` and ``improve`` at the same time: neither reads what the other makes."""
    number = run.summary["loop"]["round"]
    with ThreadPoolExecutor(1) as beside:

        def act() -> Journal:
            with count_apart():  # training in dreams proves that it takes no real step
                return _played(config, run)

        acting = beside.submit(contextvars.Context().run, act)
        told = train_round(config, run, number, policy_folder(run, number), policy_folder(run, number + 1))
        journal = acting.result()
    _charge(config, run, journal, "refit", learned=told)


def _back_to_the_best(config: Config, run: RunFolder) -> None:
    """A policy that is surely worse in the real world than an earlier one is not improved; that one is.

    "Surely" is a 95 % interval of the difference below 0.
    """
    state = run.summary["loop"]
    train, held = read_log(run, config.collect.validation)
    now, best = real_success([*train, *held], state["round"]), state["best"]
    if now is None or now["success"] is None:
        return
    kept = run.path / "loop" / "policies" / "best"
    away = difference_ci95(Proportion.from_json(now), Proportion.from_json(best["real"])) if best else None
    if away is not None and away[1] < 0 and best["round"] != state["round"]:
        copy_folder(kept, policy_folder(run, state["round"]))
    elif best is None or now["success"] >= best["real"]["success"]:
        copy_folder(policy_folder(run, state["round"]), kept)
        run.update({"loop": {"best": {"round": state["round"], "real": now}}})


def _close(config: Config, run: RunFolder) -> None:
    """Publishes the policy and ends the round."""
    state = run.summary["loop"]
    number, told = state["round"], state["learned"]
    copy_folder(policy_folder(run, number + 1), run.model("policy"))
    if config.loop.keep:
        copy_folder(policy_folder(run, number + 1), run.model("kept") / f"loop-{number:05d}")
    train, held = read_log(run, config.collect.validation)
    latest = state["versions"][-1]
    line: dict[str, Any] = {
        "round": number,
        "charged": state["charged"],
        "left": left(config, run),
        "tasks": state["chosen"],
        "scores": state["scores"],
        "version": [v["version"] for v in state["versions"] if v["promoted"]][-1],
        "promoted": latest["promoted"] if latest["round"] == number else None,
        "real_success": real_success([*train, *held], number),
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
    "begin": _begin,
    "choose": _choose,
    "act": _act,
    "fit": _fit,
    "refit": _refit,
    "promote": _promote,
    "improve": _improve,
    "play": _play,
    "close": _close,
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
