"""The ways of the loop: new tasks with an old world model, play beside learning, dreams as long as they are true. If
these fail, a run takes what it was not given, learns from what is too old, or dreams beyond what its model can."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from imagination.learning.collector import NothingToLearn
from imagination.loop.acting import round_of
from imagination.loop.origin import take_over
from imagination.loop.refit import true_turns
from imagination.runs.log import read_log, unplayed
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.env import StepResult, Task
from real_envs.store import TrajectoryStore
from tests.support.faults import NEW, Corridor, Counted, Elsewhere, PlantedTasks
from tests.support.killing import assert_same_model
from tests.support.loops import NewCorridors, loop_settings, play_in_corridors, run_loop
from worldmodel.rewards import Goal


class HeldOutBefore(NewCorridors):
    """What is held out is what the origin trained on."""

    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks(split) if split == "train" else PlantedTasks.tasks(self, "train")


def test_an_old_world_model_meets_new_tasks(cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_in_corridors(Elsewhere, monkeypatch.setattr, NewCorridors)
    folder, config = tmp_path / "new", loop_settings(budget=12)
    config.loop.origin, config.output = str(cloned), str(tmp_path)
    found = run_loop(folder, config)
    assert found["loop"]["charged"] == found["real_steps"]["loop"] == 12
    run = RunFolder(folder, 0)
    assert {t.task_id for t in TrajectoryStore.open(folder / "log").read()} <= {f"{NEW}corridor-a", f"{NEW}corridor-b"}
    assert {start.task_id for start in unplayed(run)} == {f"{NEW}corridor-a", f"{NEW}corridor-b"}
    train, held = read_log(run, 0.2)
    own = [t for t in (*train, *held) if round_of(t) is not None]
    old = {t.id for t in (*train, *held)} - {t.id for t in own}
    assert sum(len(t.turns) for t in own) == 12
    assert len(old) == 60, "the log of the other tasks is still fitted to"
    assert found["loop"]["rounds"][0]["charged"] == 0, "the first round dreams of what resets have shown"
    assert found["loop"]["rounds"][0]["dreamed_turns"] > 0
    assert_same_model(folder / "models" / "policy-clone", cloned / "models" / "policy-clone")
    for name in ("summary.json", "log/manifest.json"):
        assert (cloned / name).exists()
    with_rounds = [line for line in found["loop"]["rounds"] if line["round"]]
    assert all(line["learned_from"] for line in with_rounds if line["real_success"]["n"])


def test_tasks_that_are_not_new_are_refused(cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_in_corridors(patch=monkeypatch.setattr)
    config = loop_settings(budget=12)
    config.loop.origin, config.output = str(cloned), str(tmp_path)
    with pytest.raises(UserError, match=r"2 of 2 tasks, .*corridor-a.* loop\.origin"):
        run_loop(tmp_path / "new", config)
    config.loop.origin = "nowhere"
    with pytest.raises(UserError, match=r"loop\.origin=nowhere"):
        run_loop(tmp_path / "other", config)
    play_in_corridors(Elsewhere, monkeypatch.setattr, HeldOutBefore)
    config.loop.origin = str(cloned)
    with pytest.raises(UserError, match=r"2 of 2 held-out tasks, .*corridor-a.* loop\.origin"):
        run_loop(tmp_path / "held-out", config)


def test_rules_and_experiences_come_along(cloned: Path, tmp_path: Path) -> None:
    old, config = Path(shutil.copytree(cloned, tmp_path / "old")), loop_settings(budget=0)
    config.loop.origin, config.experience = str(old), "experience.json"
    names = ("rules.json", "experience.json")
    for name in names:
        (old / "models" / name).write_text(name)
    new = RunFolder(tmp_path / "new", 0)
    take_over(Session(config, new))
    assert [new.model(name).read_text() for name in names] == list(names)


def test_its_training_reads_what_lies_beside_the_models(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else policies dream without the rules that everything else in the loop follows."""
    folder, config = Path(shutil.copytree(cloned, tmp_path / "run")), loop_settings(budget=0)
    config.experience, config.dream.hindsight = "experience.json", 0.5
    beside = ["models/rules.json", "models/experience.json", "models/critic/critic.json", "supplements/hindsight/file"]
    for name in beside:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    read: list[str] = []

    def train(settings: Config, nested: Path, *_: object) -> None:
        read.extend((nested / name).read_text() for name in beside)
        raise NothingToLearn

    play_in_corridors(patch=monkeypatch.setattr)
    monkeypatch.setattr("imagination.commands.loop.train", train)
    run_loop(folder, config)
    assert read == beside
    assert all((folder / name).exists() for name in beside), "links went, not what they lead to"
    assert [path.name for path in (folder / "loop" / "round-000").iterdir()] == ["summary.json"]


def test_it_plays_beside_learning_and_says_how_stale_that_is(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates a round: what a round learns from was played before the round of updates before it."""
    folder, config = Path(shutil.copytree(cloned, tmp_path / "run")), loop_settings(budget=24)
    play_in_corridors(Counted(folder / "world.txt"), monkeypatch.setattr)
    config.loop.overlap, config.loop.updates, config.train.checkpoint_every = True, 2, 1
    config.train.observation_coef = 0.05
    found = run_loop(folder, config)
    first, second, *later = found["loop"]["rounds"]
    assert (first["learned_from"], second["learned_from"]) == (0, 0), "nothing was played before"
    assert later
    assert [line["staleness"] for line in later] == [3] * len(later), "two updates of this round, less one, and two"
    assert all(line["learned_from"] for line in later)
    updates = [RunFolder(folder / f"loop/round-{k:03}", 0).metrics("train") for k in range(2 + len(later))]
    predicted = [any("observed_tokens" in line for line in lines) for lines in updates]
    assert predicted == [False, False, *[True] * len(later)], "what the real world said in the episodes learned from"
    charged = found["loop"]["charged"]
    assert charged == found["real_steps"]["loop"] == len((folder / "world.txt").read_text().splitlines()) == 24


def test_a_version_that_was_just_promoted_knows_how_sure_it_is(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks are chosen by dreams under the guard, before any training in them."""
    folder, config = Path(shutil.copytree(cloned, tmp_path / "run")), loop_settings(budget=24)
    play_in_corridors(patch=monkeypatch.setattr)
    config.loop.overlap, config.dream.min_probability = True, 1e-6
    promoted = [line["promoted"] for line in run_loop(folder, config)["loop"]["rounds"]]
    assert len(promoted) > 2
    assert promoted[1], "the next round chose its tasks by this version"


class Unpaid(Corridor):
    """Nobody measures what is earned."""

    def step(self, action: str) -> StepResult:
        return replace(super().step(action), reward=None)


def test_a_world_without_rewards_is_refitted_to_as_it_was_fitted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those of the declared goal."""
    play_in_corridors(Unpaid, monkeypatch.setattr)
    config = loop_settings(budget=90)
    config.worldmodel.goal, config.loop.first_episodes = Goal(observation="You take"), 16
    config.clone.agents = ["noisy"]
    versions = run_loop(tmp_path / "run", config)["loop"]["versions"]
    assert len(versions) > 1
    assert all(version["before"]["old"] is not None for version in versions[1:])


@pytest.mark.parametrize(("true", "dreamed"), [(3, 3), (0, 2), (None, 5), (99, 5)])
def test_dreams_are_as_long_as_they_are_true(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, true: int | None, dreamed: int
) -> None:
    """At least two turns, at most ``dream.max_turns``; all of these where nothing is known."""
    play_in_corridors(patch=monkeypatch.setattr)
    monkeypatch.setattr("imagination.commands.loop.true_turns", lambda *_: true)
    folder, config = Path(shutil.copytree(cloned, tmp_path / "run")), loop_settings(budget=0)
    config.loop.horizon = "audited"
    found = run_loop(folder, config)
    assert found["loop"]["rounds"][0]["horizon"] == dreamed
    lines = [json.loads(line) for line in (folder / "loop/round-000/metrics.jsonl").read_text().splitlines()]
    assert all(line["mean_turns"] <= dreamed for line in lines if line["stage"] == "train")


def test_how_long_dreams_are_true_is_measured(cloned: Path, tmp_path: Path) -> None:
    """Twelve of sixty episodes are held back, of which a model that learned two corridors dreams a turn rightly."""
    run, config = RunFolder(Path(shutil.copytree(cloned, tmp_path / "run")), 0), loop_settings(budget=0)
    found = true_turns(Session(config, run))
    assert found is not None
    assert 0 <= found <= config.dream.max_turns
    config.collect.validation = 0.0
    assert true_turns(Session(config, run)) is None, "nothing is held back"
