"""The world model measured on held-out episodes, and its calibration fitted there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from imagination.rollout.play import judge_with_bar
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import UserError
from policy.lm.render import ChatFormat
from real_envs.grouping import grouped
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Trajectory
from worldmodel.calibration import FILE as CALIBRATION
from worldmodel.evaluation.calibration import calibration_metrics, fit_calibration
from worldmodel.evaluation.transitions import Judged, audit_metrics, in_new_situations
from worldmodel.formats.full import FullObservation, TransitionFormat
from worldmodel.world_model import LanguageWorldModel


def measure(session: Session, name: str = "worldmodel") -> dict[str, Any]:
    """The audit on episodes of the training games that the model has not seen, and on the held-out games.

    ``new`` of it are the turns that no training episode has. A model that reads facts is also judged on the last
    episodes of each held-out game with the others in reach (``heldout_tasks_known``). A declared goal is what pays in
    predictions, so it also says what they should have paid; what looks up the log knows episodes as they were logged,
    and shows neither. Writes the calibration beside the model. ``name``: of the folder under ``models/``.
    """
    run, settings, train = session.run, session.config.worldmodel, session.log.train
    goal = settings.goal

    def judged_on(
        title: str, model: LanguageWorldModel, logged: Sequence[Trajectory]
    ) -> tuple[list[Judged], dict[str, Any]]:
        failed: list[tuple[str, int]] = []
        log = goal.relabel_log(logged)
        judged = asyncio.run(judge_with_bar(title, model.excluding([*logged, *log]), log, failed))
        return judged, {**audit_metrics(judged), "failed": len(failed)}

    held = goal.relabel_log(session.log.held)
    world_model = session.world_model(train, temperature=0.0, served=False, name=name)
    judged, metrics = judged_on("judge kept-back episodes", world_model, session.log.held)
    metrics["new"] = audit_metrics(in_new_situations(judged, held, train))
    # what dreams are made of is sampled, and sampled answers are right less often than the most likely ones
    temperature = session.config.dream.temperature
    sampling = world_model.excluding([*session.log.held, *held]).at_temperature(temperature)
    sampled = asyncio.run(judge_with_bar("the same, sampled", sampling, held))
    calibration = fit_calibration(sampled, temperature, goal.observation)
    if calibration is not None:
        calibration.save(run.model(name))
    else:  # or that of the model before would be taken for its own
        (run.model(name) / CALIBRATION).unlink(missing_ok=True)
    metrics["calibration"] = calibration_metrics(sampled)
    metrics |= {"heldout_tasks": None, "heldout_tasks_known": None}  # or those of a model before it would stay
    if elsewhere := heldout_tasks(run):
        metrics["heldout_tasks"] = judged_on("judge held-out tasks", world_model, elsewhere)[1]
        if settings.facts:
            reach, rest = in_reach(elsewhere)
            known = session.world_model([*train, *reach], 0.0, served=False, name=name)
            metrics["heldout_tasks_known"] = judged_on("the same, known by a few", known, rest)[1]
    return metrics


def heldout_tasks(run: RunFolder) -> list[Trajectory]:
    """Logged episodes of tasks that nothing is trained on; a log of one's own may have none."""
    try:
        return [t for t in TrajectoryStore.open(run.log).read("heldout") if t.turns and not t.stop.is_failure]
    except ValueError:
        return []


def few_episodes(log: Sequence[Trajectory], most: int) -> list[Trajectory]:
    """The first episodes of each task, at most so many; 0 is all. Raises ``UserError``: there are none at all."""
    if not log:
        raise UserError("the log has no episode of a held-out task; log some: collect.heldout_episodes=20")
    return [episode for episodes in _by_task(log) for episode in episodes[: most or None]]


def _by_task(log: Sequence[Trajectory]) -> list[list[Trajectory]]:
    return list(grouped(log, lambda episode: episode.task_id).values())


def in_reach(log: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """The first three quarters of each task's episodes, to know the task by, and the rest, to judge by.

    A task with a single episode is known by what it declares alone.
    """
    reach, judged = [], []
    for episodes in _by_task(log):
        cut = len(episodes) * 3 // 4
        reach += episodes[:cut] or [replace(episodes[0], turns=())]
        judged += episodes[cut:]
    return reach, judged


_WORD = re.compile(r"\w+")


def language_metrics(
    chat: ChatFormat, log: Sequence[Trajectory], elsewhere: Sequence[Trajectory], form: TransitionFormat | None = None
) -> dict[str, Any]:
    """Tokens of an action and of an observation of the log, and how many observations elsewhere have an unread word.

    ``{"tokens_per_action": 3.1, "tokens_per_observation": 41.0, "tokens_per_prediction": 12.5, "unread_words": 0.04,
    "n": 1825}``: of 1,825 observations of other tasks, 4 % hold a word that the log never had. With one token per
    action the problem is tabular. A prediction is what the world model writes for a turn, reward and end included.
    """
    form = form or FullObservation()
    turns = [turn for episode in log for turn in episode.turns]
    read = set().union(
        *(_words(f"{turn.action}\n{turn.observation}") for turn in turns), *(_words(e.start) for e in log)
    )
    there = [turn.observation for episode in elsewhere for turn in episode.turns]
    lengths: dict[str, int] = {}

    def tokens(text: str) -> int:
        if text not in lengths:
            lengths[text] = len(chat.encode(text))
        return lengths[text]

    return {
        "tokens_per_action": mean([tokens(turn.action) for turn in turns]),
        "tokens_per_observation": mean([tokens(turn.observation) for turn in turns]),
        "tokens_per_prediction": mean([tokens(text) for e in log for text in form.answers(e.start, e.turns)]),
        "unread_words": mean([not _words(text) <= read for text in there]),
        "n": len(there),
    }


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
