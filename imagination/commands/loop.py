"""The steps of the loop's rounds.

``summary.json`` says which step comes next. What a step makes is whole or not there, so a loop that is killed goes on
with the step in which it was::

    choose, act, refit, promote, improve, close
    choose, play, refit, promote, close            loop.overlap=true: play is act and improve at the same time

Round 0 has nothing to choose: it begins from another run (begin), or acts without a log, and fits what is missing.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from imagination.commands import check_train
from imagination.commands.clone import clone
from imagination.commands.collect import generate_tasks
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.train import train
from imagination.evaluation.costs import real_costs, spent_before
from imagination.evaluation.world_model_eval import measure
from imagination.learning.collector import NothingToLearn
from imagination.learning.experience import RecordedGroups
from imagination.loop.acting import limits_of, own_episodes, play_round, policy_folder
from imagination.loop.choice import choose_tasks
from imagination.loop.journal import Journal
from imagination.loop.origin import begin, copy_folder, of_new_tasks, read_beside
from imagination.loop.refit import promote, refit_round, true_turns
from imagination.rollout.dream_env import Start, dream_starts
from imagination.rollout.schedules import check_share, max_value
from imagination.rollout.world_models import UNFINISHED, member_folder
from imagination.runs.fingerprint import fingerprint
from imagination.runs.lifecycle import need, with_old_evaluation
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import check_world
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.seeding import derive_seed
from real_envs.worker_pool import PoolStats, count_apart
from worldmodel.calibration import FILE as CALIBRATION
from worldmodel.evaluation.proportions import Proportion, difference_ci95, summarise

_SHORTEST = 2  # turns of an audited horizon


def loop(config: Config, folder: Path) -> None:
    """Run the Dyna loop: collect real episodes within a budget, refit the world model, train in its dreams.

    Each round has five steps, until loop.budget real steps are spent: choose tasks, collect episodes of the
    policy, refit the world model to all real transitions, promote it if it is no worse on held-out real
    episodes, and train the policy in its dreams. Without a log, scripted agents play first, within the budget.
    A missing world model or clone is trained. A stopped or killed loop resumes; a larger loop.budget continues
    a finished one. The loop changes the run's log and world model; copy the folder to keep them.

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
    session = Session.open(config, folder, "loop")
    run = session.run
    check_world(run, config.env)
    with run.timed("loop"):
        generate_tasks(config, run)
        if "loop" not in run.summary:
            cold = not (run.log / "manifest.json").exists()
            step = "begin" if config.loop.origin else "act" if cold else "fit"
            first = {"origin": config.loop.origin, "cold": cold, "round": 0, "step": step, "charged": 0, "best": None}
            run.update({"loop": {**first, "chosen": [], "scores": [], "versions": [], "rounds": []}})
            run.update(real_costs("loop", PoolStats(), config.env.price))
        while (step := run.summary["loop"]["step"]) != "choose" or limits_of(session).left():
            STEPS[step](Session(config, run))  # a new one: its log and models are of before the step
            give_back_memory()
    run.update({"done": {"loop": run.settings}})
    print(f"{run.summary['loop']['charged']} real steps spent; the policy is in {run.model('policy')}")


def check(config: Config) -> None:
    """Raises ``UserError``: the settings cannot work together."""
    beside = max_value(config.loop.real_share) > 0  # real episodes, whose observations can be learned from
    check_train.check(replace(config, train=replace(config.train, observation_coef=0.0)) if beside else config)
    if max_value(config.train.real_share) or config.train.world == "real":
        raise UserError(
            "the loop charges every real step to loop.budget, and training beside dreams takes its own: set "
            "train.real_share=0 and train.world=dream; loop.real_share is the share of the loop's own real episodes"
        )
    if wrong := check_share("loop.real_share", config.loop.real_share):
        raise UserError(wrong)
    if max_value(config.loop.real_share) and (config.train.groups == 1 or config.train.process):
        raise UserError(
            "loop.real_share learns from real episodes beside dreams: set train.groups above 1 and train.process='', "
            "or loop.real_share=0"
        )
    if config.train.max_staleness and isinstance(config.loop.real_share, list):
        raise UserError("players ahead need the same number of dreams in each update: give loop.real_share one number")
    if config.tripwires.real_episodes:
        raise UserError("probes of the tripwires are not in loop.budget: set tripwires.real_episodes=0")
    if config.train.tasks != "train":
        raise UserError(f"the loop plays training tasks: set train.tasks=train, not {config.train.tasks}")
    if lacks := {"diffusion": "only bounds", "code": "does not have"}.get(config.worldmodel.kind):
        raise UserError(
            "the loop compares versions of the world model by the log-probability of held-back turns, which "
            f"worldmodel.kind={config.worldmodel.kind} {lacks}: set worldmodel.kind=text, delta or retrieval"
        )
    if config.loop.price and not config.env.price:
        raise UserError("loop.price limits what real steps cost: set env.price, the price of one")


def _begin(session: Session) -> None:
    before = spent_before(session.run, "loop")
    with count_apart() as spent:
        begin(session)
    session.run.update({**real_costs("loop", before + spent, session.config.env.price), "loop": {"step": "fit"}})


def _choose(session: Session) -> None:
    chosen, scores = choose_tasks(session)
    step = "play" if session.config.loop.overlap else "act"
    session.run.update({"loop": {"chosen": chosen, "scores": scores, "step": step}})


def _act(session: Session) -> None:
    """Plays real episodes into the log. What was spent and that it is done is one write."""
    journal = asyncio.run(play_round(session))
    _charge(session, journal, "fit" if session.run.summary["loop"]["round"] == 0 else "refit")


def _charge(session: Session, journal: Journal, step: str, **more: Any) -> None:
    """Raises ``UserError``: the world answered nothing; what was asked of it is written down, and the round can be
    played again.
    """
    run, state = session.run, session.run.summary["loop"]
    costs = real_costs("loop", spent_before(run, "loop") + journal.spent, session.config.env.price)
    if not journal.charged:
        journal.path.unlink()
        run.update(costs)
        why = f": {journal.failed[-1]}" if journal.failed else "; raise loop.budget"
        raise UserError(f"the real world answered no step of round {state['round']}{why}")
    run.update({**costs, "loop": {"charged": state["charged"] + journal.charged, "step": step, **more}})
    journal.path.unlink()


def _fit(session: Session) -> None:
    """What there is not yet: the first version of the world model, and the policy to start from."""
    config, run, state = session.config, session.run, session.run.summary["loop"]
    if not config.loop.origin:
        done = run.summary.get("done", {}) if state["cold"] else {}
        whole = run.summary.get("world_model_form", UNFINISHED) != UNFINISHED
        if not (run.model("worldmodel").exists() and whole) or (state["cold"] and "fit_world_model" not in done):
            fit_world_model(config, run.path)
        if not run.model("policy-clone").exists() or (state["cold"] and "clone" not in done):
            clone(config, run.path)
    first = "policy-clone" if config.loop.origin else config.loop.policy
    copy_folder(need(run.model(first), "clone"), policy_folder(run, 0))
    turns = true_turns(session) if config.loop.horizon == "audited" else None
    version = {"version": 0, "round": 0, "promoted": True}
    run.update({"loop": {"step": "improve", "versions": [version], "true_turns": turns}})


def _refit(session: Session) -> None:
    versions = [*session.run.summary["loop"]["versions"], refit_round(session)]
    session.run.update({"loop": {"versions": versions, "step": "promote"}})


def _promote(session: Session) -> None:
    config, run = session.config, session.run
    changed: dict[str, Any] = {"step": "close" if config.loop.overlap else "improve"}
    if run.summary["loop"]["versions"][-1]["promoted"]:
        promote(run, config.worldmodel.members)
        _calibrate(session)
        if config.loop.horizon == "audited":
            changed["true_turns"] = true_turns(session)
    shutil.rmtree(run.path / "loop" / "candidate", ignore_errors=True)
    run.update({"loop": changed})


def _improve(session: Session) -> None:
    """Trains the policy in dreams, and from real episodes beside them."""
    _back_to_the_best(session)
    session.run.update({"loop": {"learned": train_round(session), "step": "close"}})


def _play(session: Session) -> None:
    """``act`` and ``improve`` at the same time: neither reads what the other makes."""
    with ThreadPoolExecutor(1) as beside:

        def act() -> Journal:
            with count_apart():  # training in dreams proves that it takes no real step
                return asyncio.run(play_round(Session(session.config, session.run)))

        acting = beside.submit(contextvars.Context().run, act)
        learned = train_round(session)
        journal = acting.result()
    _charge(session, journal, "refit", learned=learned)


def _back_to_the_best(session: Session) -> None:
    """A policy that is surely worse in the real world than an earlier one is not improved; that one is.

    "Surely" is a 95 % interval of the difference below 0.
    """
    run, state = session.run, session.run.summary["loop"]
    now, best = _real_success(session, state["round"]), state["best"]
    if now is None or now["success"] is None:
        return
    kept = run.path / "loop" / "policies" / "best"
    rise = difference_ci95(Proportion.from_json(now), Proportion.from_json(best["real"])) if best else None
    if rise is not None and rise[1] < 0 and best["round"] != state["round"]:
        copy_folder(kept, policy_folder(run, state["round"]))
    elif best is None or now["success"] >= best["real"]["success"]:
        copy_folder(policy_folder(run, state["round"]), kept)
        run.update({"loop": {"best": {"round": state["round"], "real": now}}})


def _close(session: Session) -> None:
    """Publishes the policy and ends the round."""
    run, state = session.run, session.run.summary["loop"]
    number, latest = state["round"], state["versions"][-1]
    copy_folder(policy_folder(run, number + 1), run.model("policy"))
    if session.config.loop.keep:
        copy_folder(policy_folder(run, number + 1), run.model("kept") / f"loop-{number:05d}")
    line: dict[str, Any] = {
        "round": number,
        "charged": state["charged"],
        "left": limits_of(session).left(),
        "tasks": state["chosen"],
        "scores": state["scores"],
        "version": [v["version"] for v in state["versions"] if v["promoted"]][-1],
        "promoted": latest["promoted"] if latest["round"] == number else None,
        "real_success": _real_success(session, number),
        **state["learned"],
    }
    run.forget("loop", number)
    numbers = {k: float(v) for k, v in line.items() if isinstance(v, (int, float)) and k != "round"}
    run.record("loop", number, numbers)
    print(line_of(line, latest), flush=True)
    kept = [r for r in state["rounds"] if r["round"] < number]
    ended = {"rounds": [*kept, line], "round": number + 1, "step": "choose", "chosen": [], "scores": []}
    run.update({"loop": ended, "done": with_old_evaluation(run.summary.get("done", {}))})
    shutil.rmtree(policy_folder(run, number), ignore_errors=True)


def _real_success(session: Session, number: int) -> dict[str, Any] | None:
    """Of the policy's real episodes in a round, as ``Proportion.to_json``; ``None`` without any."""
    played = own_episodes(session.log, number)
    return summarise(played).success.to_json() if played else None


_OF_A_ROUND = (_begin, _choose, _act, _fit, _refit, _promote, _improve, _play, _close)
STEPS: dict[str, Callable[[Session], None]] = {step.__name__[1:]: step for step in _OF_A_ROUND}


def train_round(session: Session) -> dict[str, Any]:
    """Trains the round's policy in dreams of the run's world model, in a run folder of its own; moves it to the next.

    It also learns from the real episodes of this round, or of the last one where it is trained while these are played.

    Returns:
        ``dreamed_success`` of its last update, ``dreamed_turns``, ``stopped_by``, the tripwire that stopped it,
        ``horizon``, the turns that it dreamed, ``learned_from``, real episodes, and ``staleness``, the most updates
        between the policy that played one of these and the policy that learned from it.
    """
    run, loop, settings = session.run, session.config.loop, deepcopy(session.config)
    state = run.summary["loop"]
    number = state["round"]
    policy, improved = policy_folder(run, number), policy_folder(run, number + 1)
    settings.seed = derive_seed("loop", settings.seed, number) % 2**31  # other starts each round; torch takes 32 bits
    if settings.train.seed is not None:
        settings.train.seed = derive_seed("loop", settings.train.seed, number) % 2**31
    updates = {0: loop.first_updates or loop.updates}  # by round; others have loop.updates
    settings.train.updates = updates.get(number, loop.updates)
    nested = RunFolder(run.path / "loop" / f"round-{number:03d}", settings.seed)
    source = number - loop.overlap
    recorded = RecordedGroups.of(sorted(own_episodes(session.log, source), key=lambda t: t.id)) if number else None
    learned: dict[str, Any] = {"learned_from": 0, "staleness": None}
    if recorded is not None and recorded.groups and loop.real_share:
        settings.train.real_share = loop.real_share
        learned["staleness"] = settings.train.updates - 1 + updates.get(source, loop.updates) * loop.overlap
        learned["learned_from"] = sum(map(len, recorded.groups))
    else:
        settings.train.observation_coef = 0.0
    if not improved.exists():
        if loop.horizon == "audited":
            turns, most_turns = state.get("true_turns"), settings.dream.max_turns
            turns = most_turns if turns is None else min(max(turns, _SHORTEST), most_turns)
            settings.dream.horizon, settings.dream.horizon_shape = [[0, turns]], "steps"
        _train(session, settings, nested, recorded, policy, improved)
    # links, and what is kept elsewhere; metrics stay
    for name in ("models", "checkpoints", "log", "origin", "supplements"):
        path = nested.path / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    trained = nested.metrics("train")
    lines = [line for line in trained if "dream_success" in line]  # where an episode began at the start of its task
    return {
        "dreamed_success": lines[-1]["dream_success"] if lines else None,
        "dreamed_turns": nested.summary.get("dreamed_turns", 0),
        "stopped_by": (nested.summary.get("tripwires") or {}).get("stopped_by"),
        "horizon": int(trained[-1].get("horizon", session.config.dream.max_turns)) if trained else None,
        **learned,
    }


def _train(
    session: Session, settings: Config, nested: RunFolder, recorded: RecordedGroups | None, policy: Path, improved: Path
) -> None:
    """Trains by the ``settings`` of this round, in the folder ``nested``."""
    config, run, log = session.config, session.run, session.log
    members = [member_folder(run, member) for member in range(config.worldmodel.members)]
    links = {nested.model(folder.name): folder for folder in members}
    links |= {nested.log: run.log, nested.model("policy-clone"): policy}
    links |= {nested.origin: run.origin} if run.origin.exists() else {}
    first = not run.summary["loop"]["round"] and config.loop.policy == "policy-clone" and not config.loop.origin
    beside = read_beside(run, config.experience, bool(config.dream.hindsight), critic=first)
    links |= {nested.path / name: run.path / name for name in beside}
    for link, target in links.items():  # relative ones, so that a run can be moved
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent), target_is_directory=target.is_dir())
    best = max([run.summary.get("best_return", 1.0), *(t.total_reward for t in log.train)])
    nested.update({"world_model_form": run.summary.get("world_model_form", "text"), "best_return": best})
    run.update({"best_return": best})
    _calibrate(session)
    starts: Mapping[str, Start] | None = None
    if run.origin.exists():  # the run's own tasks: states of the log and, where there is none yet, what resets showed
        own = config.worldmodel.goal.relabel_log(of_new_tasks(log.train))
        starts = dream_starts([*own, *session.unplayed], config.dream.max_turns)
    try:
        if nested.summary.get("done", {}).get("train") != fingerprint(settings, "train"):
            train(settings, nested.path, recorded, starts)
        nested.model("policy").rename(improved)
    except NothingToLearn as error:  # of a world model that has seen little: the next real episodes are its cure
        print(f"note: the policy stays as it is in this round: {error}", file=sys.stderr)
        copy_folder(policy, improved)


def _calibrate(session: Session) -> None:
    """Measures a version that was promoted, and so has no calibration yet, where the settings need one."""
    dream, process = session.config.dream, session.config.train.process
    needed = dream.min_probability > 0 or dream.on_doubt == "downweight" or process.endswith("probability")
    if needed and not (session.run.model("worldmodel") / CALIBRATION).exists():
        measure(session)


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
