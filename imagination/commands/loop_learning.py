"""What a round of the loop learns: the world model from real transitions, the policy from dreams and real episodes."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from imagination.commands.loop_rounds import POLICY, own_episodes, round_of
from imagination.commands.train import train
from imagination.evaluation.world_model_eval import measure
from imagination.learning.collector import NothingToLearn
from imagination.learning.recorded import Recorded
from imagination.loop.origin import copy_folder, of_new_tasks, roots
from imagination.loop.refit import no_worse, refit, scores_of
from imagination.rollout.dream_env import Start, dream_starts
from imagination.rollout.world_models import member_folder
from imagination.runs.fingerprint import fingerprint
from imagination.runs.log import read_log
from imagination.runs.models import load_model, weights_version
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.dreams import drift_metrics, roll
from worldmodel.evaluation.proportions import summarise

NOTHING_NEW = "not fitted again: no new episode to fit to"
FROZEN = "not fitted again: loop.fit_steps=0"
_JUDGED = 64  # held-back episodes of a kind that a version is asked about: twice as many take twice as long
_SHORTEST, _FEWEST = 2, 10  # turns of an audited horizon, and episodes that it is believed from


# refit


def refit_round(config: Config, run: RunFolder, number: int, versions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fits a new version into ``loop/candidate`` and judges it; what ``summary.json`` says of it."""
    train, held = read_log(run, config.collect.validation)
    last = max(v["round"] for v in versions if v["promoted"])

    def is_new(episode: Trajectory) -> bool:
        played = round_of(episode)
        return played is not None and played > last

    told: dict[str, Any] = {
        "version": versions[-1]["version"] + 1,
        "round": number,
        "episodes": len(train),
        "new_episodes": sum(map(is_new, train)),
        "turns": sum(len(t.turns) for t in train),
    }
    if not config.loop.fit_steps:
        return {**told, "promoted": False, "why": FROZEN}
    if not any(round_of(t) == number for t in train):
        return {**told, "promoted": False, "why": NOTHING_NEW}
    candidates, settings = run.path / "loop" / "candidate", config.worldmodel
    own = {t.id for t in train if round_of(t) is not None and t.agent == POLICY}
    refit(Session(config, run), train, own, number, candidates)
    kinds = {
        "old": _some([t for t in held if not is_new(t)], config.seed),
        "new": _some([t for t in held if is_new(t)], config.seed),
    }
    members, limit = range(settings.members), config.fit.micro_tokens
    before = scores_of([member_folder(run, m) for m in members], settings, train, kinds, limit)
    after = scores_of([candidates / str(m) for m in members], settings, train, kinds, limit)
    promoted = no_worse(before, after, config.loop.tolerance)
    why = "no worse on held-back episodes" if promoted else "not promoted: worse on held-back episodes"
    if not held:
        why = "not promoted: no episode is held back (collect.validation)"
    weights = [weights_version(load_model(candidates / str(m), "loop", settings)[0]) for m in members]
    return {
        **told,
        "held": {kind: len(episodes) for kind, episodes in kinds.items()},
        "weights": "+".join(weights),
        "before": before,
        "after": after,
        "promoted": promoted,
        "why": why,
    }


def _some(episodes: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    """At most ``_JUDGED`` of them."""
    rng = random.Random(derive_seed("loop judged", seed))
    return list(episodes) if len(episodes) <= _JUDGED else rng.sample(list(episodes), _JUDGED)


def true_turns(config: Config, run: RunFolder) -> int | None:
    """For how many turns at least half of the held-back episodes stay true in the run's world model.

    Each is dreamed open-loop along its own actions: the model reads what it has predicted. Episodes of the tasks that
    the loop plays are asked about where there are enough.

    Returns:
        ``None`` where fewer than ten episodes are held back.
    """
    session = Session(config, run)
    held = session.log.held
    new = [t for t in held if t.id in {own.id for own in of_new_tasks(held)} and not t.prefix_turns]
    asked = _some(new if len(new) >= _FEWEST else held, config.seed)
    if len(asked) < _FEWEST:
        return None
    model = session.world_model(temperature=0.0)
    still = drift_metrics(asyncio.run(roll(model, asked, config.dream.max_turns)))["true_until"]
    return max((int(k) for k, found in still.items() if found["n"] >= _FEWEST and found["value"] >= 0.5), default=0)


# improve


def train_round(config: Config, run: RunFolder, number: int, policy: Path, improved: Path) -> dict[str, Any]:
    """Trains ``policy`` in dreams of the run's world model, in a run folder of its own, and moves it to ``improved``.

    It also learns from the real episodes of this round, or of the last one where it is trained while these are played.

    Returns:
        ``dreamed_success`` of its last update, ``dreamed_turns``, ``stopped_by``, the tripwire that stopped it,
        ``horizon``, the turns that it dreamed, ``learned_from``, real episodes, and ``staleness``, the most updates
        between the policy that played one of these and the policy that learned from it.
    """
    there = run.path / "loop" / f"round-{number:03d}"
    loop, mine = config.loop, deepcopy(config)
    mine.seed = derive_seed("loop", config.seed, number) % 2**31  # other starts each round; torch takes 32 bits
    mine.train.updates = (loop.first_updates or loop.updates) if number == 0 else loop.updates
    nested = RunFolder(there, mine.seed)
    train_log, held = read_log(run, config.collect.validation)
    source = number - loop.overlap
    recorded = Recorded.of(sorted(own_episodes([*train_log, *held], source), key=lambda t: t.id)) if number else None
    told: dict[str, Any] = {"learned_from": 0, "staleness": None}
    if recorded is not None and recorded.groups and loop.real_share:
        mine.train.real_share = loop.real_share
        before = (loop.first_updates or loop.updates) if source == 0 else loop.updates
        told["staleness"] = mine.train.updates - 1 + (before if loop.overlap else 0)
        told["learned_from"] = sum(map(len, recorded.groups))
    if not improved.exists():
        if loop.horizon == "audited":
            found = run.summary["loop"].get("true_turns")
            turns = min(max(found, _SHORTEST), config.dream.max_turns) if found is not None else config.dream.max_turns
            mine.dream.horizon, mine.dream.horizon_shape = [[0, turns]], "steps"
        _train(Session(config, run), mine, nested, policy, improved, recorded)
    for name in ("models", "checkpoints", "log", "origin"):  # links, and what is kept elsewhere; metrics stay
        path = there / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    trained = nested.metrics("train")
    lines = [line for line in trained if "dream_success" in line]  # where an episode began at the start of its task
    return {
        "dreamed_success": lines[-1]["dream_success"] if lines else None,
        "dreamed_turns": nested.summary.get("dreamed_turns", 0),
        "stopped_by": nested.summary.get("tripwires", {}).get("stopped_by"),
        "horizon": int(trained[-1].get("horizon", config.dream.max_turns)) if trained else None,
        **told,
    }


def _train(
    session: Session, mine: Config, nested: RunFolder, policy: Path, improved: Path, recorded: Recorded | None
) -> None:
    """``mine``: the settings of this round's training, which works in the folder ``nested``."""
    config, run, log = session.config, session.run, session.log
    for member in range(config.worldmodel.members):
        _link(nested.model(member_folder(run, member).name), member_folder(run, member))
    _link(nested.log, run.log)
    if run.origin.exists():
        _link(nested.origin, run.origin)
    _link(nested.model("policy-clone"), policy)
    best = max([run.summary.get("best_return", 1.0), *(t.total_reward for t in log.train)])
    nested.update({"world_model_form": run.summary.get("world_model_form", "text"), "best_return": best})
    run.update({"best_return": best})
    if run.summary["loop"]["versions"][-1]["version"] and _calibrated(config):  # version 0 was measured when fitted
        measure(session, log.train, log.held)
    try:
        if nested.summary.get("done", {}).get("train") != fingerprint(mine, "train"):
            train(mine, nested.path, recorded, _starts(config, run, log.train))
        nested.model("policy").rename(improved)
    except NothingToLearn as error:  # of a world model that has seen little: the next real episodes are its cure
        print(f"note: the policy stays as it is in this round: {error}", file=sys.stderr)
        copy_folder(policy, improved)


def _starts(config: Config, run: RunFolder, log: Sequence[Trajectory]) -> Mapping[str, Start] | None:
    """Dreams begin in the run's own tasks: in states of the log and, where there is none yet, in what resets showed."""
    if not run.origin.exists():
        return None
    own = dream_starts(config.worldmodel.goal.relabel_log(of_new_tasks(log)), config.dream.max_turns)
    return roots(run) | own


def _calibrated(config: Config) -> bool:
    """Whether dreams need the calibration of this very version."""
    dream = config.dream
    return dream.min_probability > 0 or dream.on_doubt == "downweight" or config.train.process.endswith("probability")


def real_success(log: Sequence[Trajectory], number: int) -> dict[str, Any] | None:
    """Of the policy's real episodes in a round, as ``Proportion.to_json``; ``None`` without any."""
    played = own_episodes(log, number)
    return summarise(played).success.to_json() if played else None


def _link(link: Path, target: Path) -> None:
    """A relative link, so that a run can be moved."""
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
