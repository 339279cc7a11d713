"""Real episodes beside dreams, in a world that is slow or broken. If these fail, a browser that hangs holds up
training, or what it answered is learned from."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from imagination.commands import train as train_stage
from imagination.learning import collector as collector_module
from imagination.learning.collector import ExperienceCollector
from imagination.learning.policy_module import Update
from imagination.report.run_page import write_report
from imagination.rollout.schedules import longest_turns
from imagination.session import Session
from imagination.settings import Config
from policy.lm.batch import SOURCES
from real_envs.trajectory import Source, StopReason, Trajectory
from real_envs.worker_pool import SyncEnv
from tests.support.faults import Corridor, Faults, PlantedTasks
from tests.support.killing import assert_same_model, metrics_of
from tests.support.worlds import Corridors, plant


@dataclass
class Seen:
    """What a training played and learned from, by update."""

    updates: list[Update] = field(default_factory=list)
    played: list[list[Trajectory]] = field(default_factory=list)  # a list for each call: dreams or real episodes
    done: list[Source] = field(default_factory=list)  # in the order in which episodes ended

    def episodes(self, update: int, source: Source) -> list[Trajectory]:
        return [t for part in self.played for t in part if t.id.startswith(f"{source.value}/{update}/")]


Train = Callable[[Path, Config, Callable[[], SyncEnv]], Seen]


@pytest.fixture
def mixed(tiny: Config) -> Config:
    tiny.train.updates, tiny.train.groups, tiny.train.group_size, tiny.train.real_share = 4, 4, 6, 0.5
    tiny.env.price, tiny.collect.workers = 0.25, 2
    return tiny


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains beside a real world that a factory makes, and tells what it saw."""

    def run(folder: Path, config: Config, factory: Callable[[], SyncEnv]) -> Seen:
        seen = Seen()
        update, play_all = ExperienceCollector.update, collector_module.play_all

        def watched_update(self: ExperienceCollector, index: int) -> Update:
            seen.updates.append(update(self, index))
            return seen.updates[-1]

        async def watched_play(*given: Any, **watching: Any) -> list[Trajectory]:
            played = await play_all(*given, **watching, on_done=lambda t: seen.done.append(t.source))
            seen.played.append(played)
            return played

        with monkeypatch.context() as patch:
            patch.setattr(ExperienceCollector, "update", watched_update)
            patch.setattr(collector_module, "play_all", watched_play)
            patch.setattr(Session, "tasks", lambda *_: PlantedTasks(factory))
            train_stage.train(config, folder)
        return seen

    return run


def copied(cloned: Path, folder: Path) -> Path:
    shutil.copytree(cloned, folder)
    return folder


def test_training_goes_on_where_a_third_of_the_real_steps_break(
    cloned: Path, tmp_path: Path, mixed: Config, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Corridors)
    faults = Faults(Corridor, tmp_path / "ledger", share=0.3)
    folder = copied(cloned, tmp_path / "faulty")
    seen = train(folder, mixed, faults)
    told = faults.counted()
    assert min(told["crashes"], told["timeouts"], told["garbage"]) > 0, "all kinds have to happen"

    # the counts are exact, by kind
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["real_failures"]["train"] == told
    lines = metrics_of(folder, "train")
    assert len(lines) == 4
    assert sum(line["real_failures"] for line in lines) == told.total()
    assert sum(line.get("real_failures_env_timeout", 0) for line in lines) == told["timeouts"]
    crashed = told["crashes"] + told["garbage"]
    assert sum(line.get("real_failures_env_crashed", 0) for line in lines) == crashed
    real = [t for update in range(4) for t in seen.episodes(update, Source.REAL)]
    assert Counter(t.stop.is_failure for t in real) == {True: told.total(), False: 4 * 12 - told.total()}

    # so are those of what it cost, and the report has them
    steps = sum(len(t.turns) for t in real) + told.total()  # a step that broke is no turn, and was taken
    assert (summary["real_steps"]["train"], summary["real_resets"]["train"]) == (steps, 4 * 12)
    assert summary["real_cost"]["train"] == 0.25 * steps
    assert summary["real_seconds"]["train"] > 0.5 * told["timeouts"]
    write_report(folder, partial=True)
    broke = f"train: {told['crashes']} crashed, {told['timeouts']} hung, {told['garbage']} answered garbage."
    overlap = summary["overlap"]
    for page in ("report.md", "report.html"):
        text = (folder / page).read_text()
        assert broke in text
        assert "while dreams were dreamed" in text
        assert f"{0.25 * steps:,.2f}" in text
    assert 0 < overlap["both_seconds"] <= min(overlap["dream_seconds"], overlap["real_seconds"])

    # nothing of what broke is learned from
    for number, update in enumerate(seen.updates):
        whole = [t for t in seen.episodes(number, Source.REAL) if not t.stop.is_failure]
        rows = [row for row in update.rows if row.source == SOURCES.index(Source.REAL)]
        assert len(rows) == len(whole)
        for row, episode in zip(rows, whole, strict=True):
            assert episode.trace is not None
            assert tuple(row.ids.tolist()) == episode.trace.ids[: len(row)]

    # and nobody else was disturbed: until something was learned, all others are what they are without faults
    mixed.train.updates = 1
    honest = train(copied(cloned, tmp_path / "honest"), mixed, replace(faults, share=0.0))
    assert seen.episodes(0, Source.DREAM) == honest.episodes(0, Source.DREAM), "to the last bit of a log-prob"
    for ours, theirs in zip(seen.episodes(0, Source.REAL), honest.episodes(0, Source.REAL), strict=True):
        assert (ours.id, ours.start) == (theirs.id, theirs.start)
        if not ours.stop.is_failure:
            assert (ours.turns, ours.stop) == (theirs.turns, theirs.stop)
        else:
            assert ours.turns == theirs.turns[: len(ours.turns)]


def test_a_world_that_always_breaks_leaves_the_dreams(
    cloned: Path, tmp_path: Path, mixed: Config, train: Train
) -> None:
    """What is learned is what would be learned if nothing had been played beside."""
    mixed.train.updates, mixed.train.expert_share = 1, 0.0
    folder = copied(cloned, tmp_path / "broken")
    seen = train(folder, mixed, Faults(Corridor, tmp_path / "ledger", share=1.0))
    assert all(t.stop in (StopReason.ENV_CRASHED, StopReason.ENV_TIMEOUT) for t in seen.episodes(0, Source.REAL))
    assert {SOURCES[row.source] for row in seen.updates[0].rows} == {Source.DREAM}
    again = copied(cloned, tmp_path / "again")
    train(again, mixed, Faults(Corridor, tmp_path / "ledger", share=1.0, seed=1))
    assert_same_model(folder / "models" / "policy", again / "models" / "policy")


def test_dreams_are_dreamed_while_a_slow_world_is_played_in(
    cloned: Path, tmp_path: Path, mixed: Config, train: Train
) -> None:
    mixed.train.updates, mixed.train.extra_groups = 1, 2.0
    folder = copied(cloned, tmp_path / "slow")
    seen = train(folder, mixed, partial(Corridor, 0.3))
    dreams = [number for number, source in enumerate(seen.done) if source is Source.DREAM]
    # twelve episodes of two steps at least, two at a time, are 3.6 s: dreams, further groups too, need less
    assert len(dreams) >= 12
    assert seen.done[-1] is Source.REAL, "whoever is slow ends last and nobody waited for it"
    assert dreams[-1] < len(seen.done) - 2
    (line,) = metrics_of(folder, "overlap")
    assert line["real_seconds"] > 1.8
    assert line["both_seconds"] == pytest.approx(line["dream_seconds"], abs=0.05)
    assert not any(key.endswith("seconds") for key in metrics_of(folder, "train")[0]), "metrics are without a clock"


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_dreams_are_the_same_with_and_without_a_real_world_beside(
    cloned: Path, tmp_path: Path, mixed: Config, train: Train, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """To the last bit of each log-prob, however fast the world answers."""
    mixed.train.updates, mixed.train.extra_groups = 1, 1.0
    mixed.dream.on_doubt, mixed.dream.min_confidence, mixed.dream.branch = "branch", 0.5, 0.5
    found: list[list[Trajectory]] = []
    honest = ExperienceCollector._both_worlds

    def play(
        self: ExperienceCollector, index: int, rng: random.Random, longest: int
    ) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        state = rng.getstate()
        for worlds in (self.worlds[:1], self.worlds):
            rng.setstate(state)
            dreams, real, _ = honest(replace(self, worlds=worlds), index, rng, longest_turns(self.plan.dream, index))
            # the engine counts how often its weights were set
            found.append([replace(t, trace=t.trace and replace(t.trace, versions=())) for t in dreams])
            assert bool(real) == (len(worlds) == 2)
        return dreams, real, {}

    monkeypatch.setattr(ExperienceCollector, "_both_worlds", play)
    train(copied(cloned, tmp_path / "run"), mixed, partial(Corridor, seconds))
    alone, beside = found
    assert len(alone) > 12, "further groups are among them"
    assert alone == beside
