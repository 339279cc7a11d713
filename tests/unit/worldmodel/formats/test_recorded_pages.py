"""Real pages of MiniWoB++, recorded. If these fail, edits of accessibility trees save nothing, or are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests
from real_envs.screens import FOLDER, screens_of
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Trajectory
from real_envs.worlds.web.miniwob import RULES
from worldmodel.formats.edits import EditFormat
from worldmodel.formats.full import status_line

RECORDED = Path(tests.__file__).parent / "recorded" / "miniwob"


@pytest.fixture(scope="module")
def log() -> list[Trajectory]:
    return list(TrajectoryStore.open(RECORDED).read())


def test_the_log_is_of_many_families_and_of_episodes_good_and_bad(log: list[Trajectory]) -> None:
    families = {t.task_id.partition("/")[0].removeprefix("miniwob.") for t in log}
    assert len(families) >= 16
    assert families <= set(RULES)
    assert {t.solved for t in log} == {True, False}
    assert all(t.start.startswith("Goal: ") for t in log)
    named = set(screens_of(log))
    assert named
    assert {path.name for path in (RECORDED / FOLDER).iterdir()} == named


def test_edits_of_pages_read_back_as_the_pages(log: list[Trajectory]) -> None:
    form = EditFormat()
    for episode in log:
        for k, text in enumerate(form.answers(episode.start, episode.turns)):
            turn = episode.turns[k]
            observation, reward, terminated = form.read(text, episode.start, episode.turns[:k])
            assert (observation, reward, terminated) == (turn.observation, turn.reward, turn.terminated)


def test_edits_of_pages_are_a_fraction_of_the_pages(log: list[Trajectory]) -> None:
    form, status = EditFormat(), len(status_line(0.0, False))
    whole = sum(len(turn.observation) for t in log for turn in t.turns)
    edits = sum(len(text) - status for t in log for text in form.answers(t.start, t.turns))
    assert edits < 0.3 * whole
    unchanged = sum(
        text.startswith("=\n[") or text.split("\n")[0] == "=" for t in log for text in form.answers(t.start, t.turns)
    )
    assert unchanged > 0.8 * sum(len(t.turns) for t in log), "pages are hardly ever written anew"


def test_pages_are_numbered_from_one_in_every_episode(log: list[Trajectory]) -> None:
    """Not as BrowserGym numbers them, which depends on what is hidden on the page."""
    for episode in log:
        numbers = [line.partition("]")[0] for line in episode.start.split("\n") if line.startswith("[")]
        assert numbers == [f"[{k}" for k in range(1, len(numbers) + 1)]
