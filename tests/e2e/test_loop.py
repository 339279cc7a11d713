"""The loop spends what it was given, counts it, and believes no world model that got worse. If these fail, real steps
are lost, taken twice or taken beyond the budget, or a policy dreams in a broken world."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagination import session
from imagination.loop.acting import round_of
from imagination.runs.log import read_log
from imagination.runs.run_folder import RunFolder
from imagination.settings import UserError
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Trajectory
from tests.support.faults import Corridor, Faults
from tests.support.killing import assert_same_model, metrics_of
from tests.support.loops import loop_settings, play_in_corridors, run_loop

ROOT = Path(__file__).parents[2]


def relogged(cloned: Path, folder: Path) -> Path:
    """A run as it is before the loop, whose log says that it is of the corridors that the loop plays."""
    return Path(shutil.copytree(cloned, folder))


def real_turns(folder: Path) -> int:
    """Of the loop's episodes in the log."""
    return sum(len(t.turns) for t in played(folder))


def played(folder: Path) -> list[Trajectory]:
    return [t for t in TrajectoryStore.open(folder / "log").read() if round_of(t) is not None]


def world_steps(folder: Path) -> int:
    """What the world itself has counted."""
    return len((folder / "world.txt").read_text().splitlines())


def test_without_a_log_the_first_episodes_are_charged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_in_corridors(patch=monkeypatch.setattr)
    config = loop_settings(budget=54)
    config.loop.first_episodes, config.env.price = 10, 0.5
    found = run_loop(tmp_path / "run", config)
    first, *later = found["loop"]["rounds"]
    assert 20 <= first["charged"] <= 50, "ten episodes of at most five turns"
    assert later, "what they left was for the policy"
    steps = [first["charged"], *(line["charged"] for line in later)]
    assert steps == sorted(set(steps)), "every round acted"
    assert steps[-1] == found["loop"]["charged"] == found["real_steps"]["loop"] == real_turns(tmp_path / "run") == 54
    assert found["real_cost"]["loop"] == 27.0
    assert found["real_steps"]["fit_world_model"] == 0
    assert (tmp_path / "run" / "models" / "policy" / "model.safetensors").exists()


def random_points() -> str:
    """``IMAGINATION_KILLS=20`` kills twenty times; a loop of twelve steps has not many more points."""
    chance = random.Random(0)
    kinds = {"ask": 9, "answer": 9, "append": 3, "state": 12, "copy": 4, "fit": 10, "train": 2}
    drawn = [chance.choice(list(kinds)) for _ in range(int(os.environ.get("IMAGINATION_KILLS", "3")))]
    return ",".join(f"{kind}-{chance.randint(1, kinds[kind])}?" for kind in drawn)


@pytest.fixture(scope="module")
def killed(cloned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loops of twelve steps, a folder each, that died where they should. One process for all: it imports torch once."""
    there = tmp_path_factory.mktemp("killed")
    start = relogged(cloned, there / "start")
    points = {"whole": "", "between": "train-1,append-1,fit-1,copy-1", "within": "ask-4,answer-3"}
    points["anywhere"] = random_points()
    folders = [f"{there / name}={where}" for name, where in points.items()]
    # imported, not run as a module: workers must find by name what the world is made of
    source = (
        f"from pathlib import Path; from tests.support.loops import main; main(Path({str(start)!r}), 12, {folders})"
    )
    command = [sys.executable, "-c", source]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{points}: {done.stderr[-3000:]}"
    return there


def test_a_killed_loop_comes_to_the_same(killed: Path) -> None:
    """Between real steps bit for bit; at a real step without losing it, and without taking more than the budget."""
    whole, between, within = (killed / name for name in ("whole", "between", "within"))
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (between, whole))
    assert ours["loop"] == theirs["loop"]
    assert len(theirs["loop"]["versions"]) == len(theirs["loop"]["rounds"]) >= 2
    assert all(v["promoted"] for v in theirs["loop"]["versions"]), "honest episodes are no reason to distrust a version"
    assert [(t.id, t.turns) for t in played(between)] == [(t.id, t.turns) for t in played(whole)]
    assert metrics_of(between, "loop") == metrics_of(whole, "loop")
    for name in ("policy", "worldmodel"):
        assert_same_model(between / "models" / name, whole / "models" / name)
    for folder, summary in ((between, ours), (whole, theirs)):
        counts = {real_turns(folder), world_steps(folder), summary["loop"]["charged"], summary["real_steps"]["loop"]}
        assert counts == {12}

    found = json.loads((within / "summary.json").read_text())
    assert found["loop"]["charged"] == found["real_steps"]["loop"] == 12, "all that was asked for, and no more"
    assert world_steps(within) == 11, "one step was asked for and not taken any more"
    assert real_turns(within) == 10, "of another, which was taken, the answer died with the process"


def test_a_loop_killed_at_random_points_loses_and_repeats_no_real_step(killed: Path) -> None:
    points, folder = random_points(), killed / "anywhere"
    found = json.loads((folder / "summary.json").read_text())
    taken, told = world_steps(folder), real_turns(folder)
    assert found["loop"]["charged"] == found["real_steps"]["loop"] == 12, points
    unanswered, untaken = points.count("answer"), points.count("ask")
    assert 12 - untaken <= taken <= 12, "none beyond the budget; at most one a kill was written down and not taken"
    assert taken - unanswered <= told <= taken, "of at most one a kill the answer died with the process"


def test_only_answered_steps_are_charged_where_the_world_breaks(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(Corridor, tmp_path / "ledger", share=0.3)
    play_in_corridors(faults, monkeypatch.setattr)
    folder = relogged(cloned, tmp_path / "run")
    found = run_loop(folder, loop_settings(budget=16))
    broken = faults.counted().total()
    assert broken > 0
    assert found["loop"]["charged"] == real_turns(folder) == 16
    assert found["real_steps"]["loop"] == 16 + broken, "requests, as everywhere in the summary"
    assert sum(found["real_failures"]["loop"].values()) == broken
    train, held = read_log(RunFolder(folder, 0), 0.2)
    assert not any(t.stop.is_failure for t in (*train, *held)), "nothing of what broke is fitted to"


def test_a_world_that_answers_nothing_ends_the_loop_with_its_reason(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_in_corridors(Faults(Corridor, tmp_path / "ledger", share=1.0, seed=1), monkeypatch.setattr)
    folder, config = relogged(cloned, tmp_path / "run"), loop_settings(budget=12)
    config.loop.group_size, config.loop.patience = 1, 1.0
    with pytest.raises(UserError, match="of round 1"):
        run_loop(folder, config)
    play_in_corridors(patch=monkeypatch.setattr)
    assert run_loop(folder, config)["loop"]["charged"] == 12, "it goes on when the world is back"


def test_a_world_model_of_broken_transitions_is_not_promoted(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observations are shuffled among the transitions of the loop's episodes, and the refit believes them a lot."""
    play_in_corridors(patch=monkeypatch.setattr)
    config = loop_settings(budget=24)
    config.loop.fit_steps, config.loop.fit_lr, config.loop.tolerance, config.loop.own_share = 60, 1e-2, 0.1, 0.95
    config.collect.validation = 0.05  # what the first version was not fitted to either

    def shuffled(*arguments: Any) -> tuple[list[Trajectory], list[Trajectory]]:
        rng = random.Random(0)
        words = [turn.observation for part in read_log(*arguments) for t in part for turn in t.turns]

        def broken(t: Trajectory) -> Trajectory:
            turns = tuple(replace(turn, observation=rng.choice(words)) for turn in t.turns)
            return t if round_of(t) is None else replace(t, turns=turns)

        train, held = read_log(*arguments)
        copies = [replace(broken(t), id=f"{t.id}/{k}") for t in train if round_of(t) is not None for k in range(40)]
        return [t for t in train if round_of(t) is None] + copies, [broken(t) for t in held]

    monkeypatch.setattr(session, "read_log", shuffled)
    folder = relogged(cloned, tmp_path / "broken")
    found = run_loop(folder, config)
    assert len(found["loop"]["versions"]) > 1
    assert not any(v["promoted"] for v in found["loop"]["versions"][1:])
    assert found["loop"]["versions"][1]["after"]["old"] < found["loop"]["versions"][1]["before"]["old"] - 0.1
    assert_same_model(folder / "models" / "worldmodel", cloned / "models" / "worldmodel")
    assert {line["version"] for line in found["loop"]["rounds"]} == {0}, "nobody dreamed in it"


def test_real_steps_beside_the_loop_are_refused(tmp_path: Path) -> None:
    config = loop_settings(budget=10)
    config.train.real_share = 0.5
    with pytest.raises(UserError, match=r"train\.real_share=0"):
        run_loop(tmp_path, config)
