from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from imagination.commands.screens import audit_screens
from imagination.evaluation.audit import (
    FORMAT,
    VERSION,
    AuditInput,
    LoadedPolicy,
    PlaySetup,
    PolicyCandidate,
    fill_up,
    find_candidates,
    measure,
)
from imagination.evaluation.costs import real_costs
from imagination.evaluation.forecast import forecast
from imagination.evaluation.verdict import targets, verdict
from imagination.evaluation.world_model_eval import heldout_tasks
from imagination.report.audit_page import render_audit, terminal_audit
from imagination.rollout.dream_env import NO_GUARD, Start
from imagination.rollout.world_models import rules_of
from imagination.runs.lifecycle import open_run
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import can_play, logged_world
from imagination.scale.ray_envs import real_tasks
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.env import TaskSet
from real_envs.files import read_json, write_atomically
from real_envs.trajectory import Trajectory
from real_envs.worker_pool import real_interaction
from worldmodel.code.world_model import SOURCE
from worldmodel.rules.rule_set import FILE as RULES
from worldmodel.world_model import LanguageWorldModel


def audit(config: Config, folder: Path) -> None:
    """Audit the world model: is it good enough to train in? With reasons, intervals and examples.

    Measures exact match by turn and by size of the change, rewards, calibration, refusals, action sensitivity
    and drift; in the real environment also the rank correlation of dreamed and real success of policies, and
    all of these on the policy's own actions. Without a real environment the log alone is used.

    Reads: log/, models/, games/ where it is there
    Writes: audit.json, audit.html (worldmodel.kind=screen: audit-screens.json)

    Examples:
        imagine audit run=mine
        imagine audit run=mine audit.episodes=100
        imagine audit run=mine audit.policies=[outputs/a/models/policy,outputs/b/models/policy]
    """
    if config.worldmodel.kind == "screen":
        audit_screens(config, folder)
        return
    measured = run_audit(config, folder)
    console = Console()
    console.print(terminal_audit(measured))
    for sentence in measured["verdict"]["sentences"]:
        console.print(f"- {sentence}", highlight=False, markup=False, soft_wrap=True)
    if measured["forecast"]:
        console.print(f"- {measured['forecast']['sentence']}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"audit: {audit_files(folder, config.audit.world_model)[1]}", highlight=False, soft_wrap=True)


def audit_files(folder: Path, world_model: str) -> tuple[Path, Path]:
    """``audit.json`` and ``audit.html``; of another world model than the run's own, with its name in them."""
    stem = "audit" if world_model == "worldmodel" else f"audit-{world_model}"
    return folder / f"{stem}.json", folder / f"{stem}.html"


def run_audit(config: Config, folder: Path) -> dict[str, Any]:
    """Audits and writes both files; what ``audit.json`` holds. Raises ``UserError``: an earlier stage is missing."""
    run = open_run(config, folder)
    begin, before = time.monotonic(), real_interaction()
    measured = asyncio.run(_audit(config, run))
    spent = real_interaction() - before
    measured |= {"seconds": round(time.monotonic() - begin, 1), "real_steps": spent.steps}
    measured |= {"verdict": verdict(measured, config.audit), "targets": targets(measured, config.audit)}
    measured["forecast"] = forecast(measured, least_n=config.audit.least_n)
    run.update({**real_costs("audit", spent, config.env.price), "wall_seconds": {"audit": measured["seconds"]}})
    for path, text in zip(
        audit_files(folder, config.audit.world_model),
        (json.dumps(measured, indent=1), render_audit(measured)),
        strict=True,
    ):
        write_atomically(path, text)
    return measured


def audited_before(config: Config, folder: Path) -> dict[str, Any] | None:
    """The audit that is there, if it has these settings and no model, rules or policy of it were written since."""
    path = audit_files(folder, config.audit.world_model)[0]
    if not path.exists():
        return None
    written = path.stat().st_mtime
    policies = [Path(policy) / "config.json" for policy in config.audit.policies]
    made = [path for name in ("config.json", SOURCE, RULES) for path in (folder / "models").rglob(name)]
    models = [*made, *(path for path in policies if path.exists())]
    if any(model.stat().st_mtime > written for model in models):
        return None
    measured = read_json(path)
    same = measured.get("version") == VERSION and measured.get("settings") == _settings(config)
    return measured if same else None


def _settings(config: Config) -> str:
    """A short hash of the settings that decide what an audit says."""
    which = {k: v for k, v in asdict(config.audit).items() if k not in ("runs", "world_models", "others")}
    # who wrote its code and how decides nothing of what it is now
    world = {k: v for k, v in asdict(config.worldmodel).items() if k != "code"}
    parts = [config.seed, which, world, asdict(config.dream), asdict(config.evaluate)]
    parts.append(config.collect.validation)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


async def _audit(config: Config, run: RunFolder) -> dict[str, Any]:
    settings = config.audit
    session = Session(config, run)
    goal = config.worldmodel.goal  # it decides what dreams pay, so it says what they should have paid
    log, held = goal.relabel_log(session.log.train), session.log.held
    world = session.world_model(name=settings.world_model)
    candidates = _candidates(config, run)
    tasks, why = _real_tasks(session)
    if tasks is None:  # where nothing can be played, logged turns are all there is; few tasks have several episodes
        held = [*held, *heldout_tasks(run)]
    notes = [] if held else ["The log has no held-out episodes: raise collect.validation."]
    if why:
        notes.append(why)
    if tasks is not None and not candidates:
        notes.append("There is no policy, so nothing was played for real.")
    own = {c.folder for c in candidates}
    if candidates and len(own) < settings.min_policies:
        notes.append(
            f"The {len(candidates)} policies are {len(own)} checkpoints at several temperatures, which differ less in "
            "quality than checkpoints do; clone.keep_every and train.keep_every keep more of them."
        )
    env_setup = _env_setup(session, world, tasks) if tasks is not None and candidates else None
    greedy, logged = world.at_temperature(0.0), {t.id: t for t in held}

    def apart(model: LanguageWorldModel, episodes: Sequence[Trajectory]) -> LanguageWorldModel:
        """It knows episodes as they were logged, and the goal's rewards are others."""
        return model.excluding([*episodes, *(logged[t.id] for t in episodes if t.id in logged)])

    audit_input = AuditInput(
        model=greedy,
        log=log,
        held=goal.relabel_log(held),
        policies={candidate.name: partial(_load, session, candidate) for candidate in candidates},
        env_setup=env_setup,
        seed=config.seed,
        horizon=config.evaluate.max_turns,
        apart=partial(apart, greedy),
        sampled=partial(apart, world) if config.dream.temperature else None,
        rules=rules_of(run),
    )
    try:
        measured = await measure(audit_input, settings, lambda what: print(f"audit: {what}", flush=True))
    finally:
        if tasks is not None:
            await tasks.close()
    return {
        "format": FORMAT,
        "version": VERSION,
        "run": run.path.name,
        "world_model": {"name": settings.world_model, "version": world.version, "kind": config.worldmodel.kind},
        "settings": _settings(config),
        "seeds": {"run": config.seed, "bootstrap": config.seed},
        "horizon": config.evaluate.max_turns,
        **measured,
        "notes": [*notes, *measured["notes"]],
    }


def _candidates(config: Config, run: RunFolder) -> list[PolicyCandidate]:
    """The policies of the settings, or those of the run, the oldest first. Raises ``UserError``: a folder of the
    settings holds no model.
    """
    settings, temperature = config.audit, config.evaluate.temperature
    if not settings.policies:
        return find_candidates(run.path / "models", temperature, settings.min_policies, settings.temperatures)
    folders = [Path(name) for name in settings.policies]
    for folder in folders:
        if not (folder / "config.json").exists():
            raise UserError(f"audit.policies: {folder} holds no model (no config.json); name folders of checkpoints")
    named = [PolicyCandidate(_short(folder, folders), folder, temperature) for folder in folders]
    return fill_up(named, folders[::-1], settings.min_policies, settings.temperatures)


def _short(folder: Path, others: Sequence[Path]) -> str:
    """The folder's name, or its path where that is not unique."""
    return folder.name if sum(other.name == folder.name for other in others) == 1 else str(folder)


def _load(session: Session, candidate: PolicyCandidate) -> LoadedPolicy:
    policy = session.policy(candidate.folder)
    policy.model.requires_grad_(False)
    return LoadedPolicy(session.agent(policy, candidate.temperature, candidate.name), policy.model, policy.version)


def _real_tasks(session: Session) -> tuple[TaskSet | None, str]:
    """The real tasks, or why there are none: a log of the user's own may be of a world that cannot be played here."""
    config, run = session.config, session.run
    if logged_world(run) != config.env.name:
        return None, "The log is of a world that cannot be played for real here: only logged turns were judged."
    if not can_play(run, config.env):
        return None, f"{run.games} is not there: only logged turns were judged."
    return real_tasks(session), ""


def _env_setup(session: Session, world: LanguageWorldModel, tasks: TaskSet) -> PlaySetup:
    config = session.config
    starts = {t.task_id: Start(t.task_id, t.start) for t in [*session.unplayed, *session.log.train]}
    guard = session.guard(name=config.audit.world_model)
    return PlaySetup(
        dream=session.paying(world),
        guard=None if guard == NO_GUARD else guard,
        starts=starts,
        tasks=[task for task in tasks.tasks("train")[: config.evaluate.tasks or None] if task.id in starts],
        make_env=tasks.make_env,
        episodes=config.audit.episodes,
        max_turns=config.evaluate.max_turns,
        seed=config.seed,
        solved_at=session.solved_at,
    )
