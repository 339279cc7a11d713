"""Disks that fill and processes that die at every point of every stage. If these fail, work of a night is lost."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from real_envs.store import TrajectoryStore
from tests.chaos.flow import NAME, SHORTER, STAGES, Flow, digests, result

pytestmark = pytest.mark.chaos
POINTS = int(os.environ.get("CHAOS_POINTS", "30"))  # of a stage, at which a process is killed
WRITES = int(os.environ.get("CHAOS_WRITES", "60"))  # of a stage, at which the disk is full; all if there are no more


def undisturbed(flow: Flow, stage: str, mode: str) -> tuple[int, object]:
    """How many changes the stage makes, and what the run is after it."""
    root = flow.copy(stage, f"whole-{stage}")
    done = flow.run(stage, root, mode, at=10**9, more=SHORTER.get(stage, ()))
    assert done.code == 0, done.err
    return done.changes, result(root / NAME)


def logged(run: Path) -> set[str]:
    return set(TrajectoryStore.open(run / "log").ids()) if (run / "log" / "manifest.json").exists() else set()


def lines(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    return [line for line in path.read_text().splitlines() if json.loads(line)] if path.exists() else []


@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_fills_at_any_write_loses_nothing_and_the_stage_goes_on_with_room(flow: Flow, stage: str) -> None:
    more = SHORTER.get(stage, ())
    writes, whole = undisturbed(flow, stage, "full")
    chosen = range(1, writes + 1)
    if writes > WRITES:
        chosen = sorted({1, 2, writes, *random.Random(stage).sample(chosen, WRITES - 3)})
    for at in chosen:
        root = flow.copy(stage, f"full-{stage}")
        before = digests(root / NAME, "models", "games", "tokenizer"), logged(root / NAME), lines(root / NAME)
        done = flow.run(stage, root, "full", at, more)
        where = f"{stage}, write {at} of {writes}: {done.err}"
        if done.code == 0:  # a logger's thread writes now and then, so that there may be fewer writes another time
            assert result(root / NAME) == whole, where
            continue
        assert done.code == 2, where
        assert len(done.errors) == 1, where
        assert "full" in done.errors[0], where
        assert "Traceback" not in done.err, where
        after = digests(root / NAME, "models", "games", "tokenizer")
        # a stage may already have put its own result in the place of an older one, and then fail at the rest
        assert before[0].keys() <= after.keys(), where
        assert before[1] <= logged(root / NAME), where
        assert set(before[2]) <= set(lines(root / NAME)), where
        again = flow.run(stage, root, more=more)
        assert again.code == 0, f"{where}, then {again.err}"
        assert result(root / NAME) == whole, where


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_killed_anywhere_comes_to_the_same(flow: Flow, stage: str) -> None:
    """What a killed process leaves is decided by the changes of files that it has made: it dies at some of them, and in
    the middle of writes.
    """
    more = SHORTER.get(stage, ())
    changes, whole = undisturbed(flow, stage, "kill")
    for at in sorted(random.Random(f"kill {stage}").sample(range(1, changes + 1), min(POINTS, changes))):
        root = flow.copy(stage, f"killed-{stage}")
        before = logged(root / NAME)
        done = flow.run(stage, root, "kill", at, more)
        assert done.code == -9 or done.changes < at, f"{stage}, change {at} of {changes}: {done.err}"
        kept = logged(root / NAME)
        assert before <= kept, f"{stage}, change {at}"
        again = flow.run(stage, root, more=more)
        assert again.code == 0, f"{stage}, killed at change {at} of {changes}, then {again.err}"
        assert kept <= logged(root / NAME)
        assert result(root / NAME) == whole, f"{stage}, killed at change {at} of {changes}"


def test_a_clock_that_jumps_by_an_hour_changes_nothing(flow: Flow) -> None:
    """Also not where there is a limit in minutes, or a world may take seconds to answer."""
    limits = ("fit.minutes=20", "train.minutes=20")
    for stage in STAGES[:-1]:
        more = (*SHORTER.get(stage, ()), *limits)
        runs = []
        for mode in ("count", "clock"):
            root = flow.copy(stage, f"{mode}-{stage}")
            done = flow.run(stage, root, mode, more=more)
            assert done.code == 0, done.err
            assert "Traceback" not in done.err, done.err
            runs.append(result(root / NAME))
            spent = json.loads((root / NAME / "summary.json").read_text())["wall_seconds"]
            assert 0 <= spent[stage.replace("-", "_")] < 1800
            times = [json.loads(line)["time"] for line in lines(root / NAME)]
            assert all(0 <= time < 1800 for time in times)
        assert runs[0] == runs[1], stage
