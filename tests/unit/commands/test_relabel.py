"""New questions of a run's log. If these fail, `relabel` writes what training cannot dream of."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest

from imagination.commands.audit import _env_setup
from imagination.commands.collect import collect
from imagination.commands.compare import _play
from imagination.commands.relabel import relabel
from imagination.commands.serve import _starts
from imagination.data.augmentation import read_supplements
from imagination.runs.fingerprint import fingerprint
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from imagination.settings.compose import load_config
from tests.support.refusal import refused

SMALL = ["env=search", "env.options.entities=100", "env.options.retrieval=both", "games.train=15", "games.heldout=2"]
SMALL += ["collect.episodes=1", "collect.heldout_episodes=1", "collect.workers=1", "hindsight.questions=4"]


def test_questions_are_composed_of_a_log_and_dreams_may_begin_there(tmp_path: Path) -> None:
    config = load_config([*SMALL, "dream.hindsight=0.5", "dream.noise=0.5", "dream.noise_actions=^search:"], Config)
    collect(config, tmp_path)
    relabel(config, tmp_path)
    run = RunFolder(tmp_path, config.seed)
    composed = read_supplements(run, ["hindsight"])
    assert len(composed) == run.summary["relabelled"]["questions"] == 4
    assert all(episode.solved and episode.world_facts for episode in composed)
    reached = Session(config, run).reached_goals()
    assert [e.task_id for e in reached] == [e.id for e in composed]
    logged = {episode.start for part in Session(config, run).log for episode in part}
    assert not logged & {episode.start for episode in composed}


def test_tasks_that_are_only_reset_are_known_and_dreamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([*SMALL, "games.train=6", "collect.tasks=4"], Config)
    collect(config, tmp_path)
    config.games.train = 15
    collect(config, tmp_path)
    collect(config, tmp_path)
    session = Session(config, RunFolder(tmp_path, config.seed))
    tasks = session.tasks().tasks("train")
    assert {t.task_id for part in session.log for t in part} == {task.id for task in tasks[:4]}
    assert {(t.task_id, t.world_facts) for t in session.unplayed} == {(task.id, task.world_facts) for task in tasks[4:]}
    assert len(session.unplayed) == 11
    assert all(t.start for t in session.unplayed)
    assert {start.task_id for start in _starts(session).values()} == {task.id for task in tasks}
    assert [task.id for task in _env_setup(session, Mock(), session.tasks()).tasks] == [t.id for t in tasks]
    asked = Mock(side_effect=LookupError)
    monkeypatch.setattr(session, "world_model", asked)
    with pytest.raises(LookupError):
        asyncio.run(_play(session, session.tasks()))
    asked.assert_called_with(session.known)


def test_tasks_that_are_logged_are_not_played_again_where_more_are_asked_for(tmp_path: Path) -> None:
    """Agents are dealt over all tasks, so more tasks deal others to those that were played."""
    config = load_config([*SMALL, "games.train=3", "collect.episodes=4"], Config)
    collect(config, tmp_path)
    config.games.train = 6
    collect(config, tmp_path)
    session = Session(config, RunFolder(tmp_path, config.seed))
    played = Counter(episode.task_id for part in session.log for episode in part)
    assert played == {task.id: 4 for task in session.tasks().tasks("train")}


def test_no_composed_question_is_that_of_a_task_that_was_only_reset(tmp_path: Path) -> None:
    """Or training dreams of what its validation judges by."""
    config = load_config([*SMALL, "collect.tasks=8", "collect.episodes=2", "hindsight.questions=100"], Config)
    collect(config, tmp_path)
    relabel(config, tmp_path)
    session = Session(config, RunFolder(tmp_path, config.seed))
    reset = {episode.start for episode in session.unplayed}
    assert not reset & {episode.start for episode in read_supplements(session.run, ["hindsight"])}


def test_a_world_that_composes_nothing_says_so(tmp_path: Path) -> None:
    config = load_config(["hindsight.questions=4"], Config)
    refused(lambda: relabel(config, tmp_path), "hindsight.questions=0", "env=search")


def test_runs_from_before_there_were_questions_and_noise_are_known() -> None:
    before = Config()
    for settings in (["dream.noise_actions=x"], ["dream.noise_base=2"]):  # without noise they decide nothing
        assert fingerprint(load_config(settings, Config), "train") == fingerprint(before, "train")
    assert fingerprint(load_config(["dream.noise=0.5"], Config), "train") != fingerprint(before, "train")
    assert fingerprint(load_config(["hindsight.questions=4"], Config), "relabel") != fingerprint(before, "relabel")
