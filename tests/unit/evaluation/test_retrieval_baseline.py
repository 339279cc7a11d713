"""What looking up another task gets right, counted by hand. If this fails, an import promises what no log can keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from imagination.commands import import_logs
from imagination.commands.import_logs import coverage_lines
from imagination.evaluation.retrieval_baseline import looked_up, tasks_to_look_at
from real_envs.store import TrajectoryStore
from real_envs.trajectory import NO_ANSWER, Source, StopReason, Trajectory, Turn
from tests.support.coverage import cover_log


def episode(task: str, start: str, *turns: Turn) -> Trajectory:
    return Trajectory(f"{task}/0", task, task, Source.REAL, "log", 0, start, turns, StopReason.TERMINATED, success=True)


def reading(task: str) -> Trajectory:
    """A door that opens in every task, and a note that says another thing in each."""
    door, note = Turn("open door", "It opens.", 0.0, False), Turn("read note", f"note {task}", 1.0, True)
    return episode(task, f"House {task}", door, note)


def test_what_tasks_have_in_common_is_foretold_and_what_they_have_not_is_not() -> None:
    found = looked_up([reading(task) for task in "abc"], [])
    assert found is not None
    assert (found["episodes"], found["turns"], found["tasks"]) == (3, 6, 3)
    assert (found["exact"]["value"], found["exact"]["n"]) == (0.5, 6)  # three doors, no note
    assert found["token_f1"]["value"] == 0.75  # of a note one word of two
    assert [found["reward"][key]["value"] for key in ("precision", "recall")] == [1.0, 1.0]  # each note pays 1
    assert found["exact"]["ci95"][0] < 0.1  # three tasks are few


def test_a_near_duplicate_does_not_answer() -> None:
    """a and b are one house with two names; the others have walls of their own."""
    walls = {
        "a": ("red house at a", "red"),
        "b": ("red house at b", "red"),
        "c": ("hut", "blue"),
        "d": ("tent", "green"),
    }
    log = [episode(task, start, Turn("look", wall, 0.0, True)) for task, (start, wall) in walls.items()]

    def right(*groups: frozenset[str]) -> float:
        found = looked_up(log, groups)
        return float(found["exact"]["value"])

    assert right() == 0.5
    assert right(frozenset("ab"), frozenset("c"), frozenset("d")) == 0.0
    assert right(frozenset("abc")) == 0.5  # with more than half of the tasks it is the world, and no duplicate


def test_nothing_to_ask_is_not_zero() -> None:
    assert looked_up([reading("a")], []) is None
    unpaid = [replace(e, turns=tuple(replace(t, reward=None) for t in e.turns)) for e in map(reading, "ab")]
    assert looked_up(unpaid, []) is None
    cut = [replace(e, turns=(*e.turns, Turn("wait", "", 0.0, False, {NO_ANSWER: 1.0}))) for e in map(reading, "ab")]
    found = looked_up(cut, [])
    assert found is not None
    assert found["exact"]["n"] == 4, "nobody answered the last action"
    assert looked_up([], []) is None


def test_of_a_large_log_whole_tasks_are_looked_at() -> None:
    sizes = dict.fromkeys("abcdef", 10)
    assert tasks_to_look_at(sizes) == set("abcdef")
    some = tasks_to_look_at(sizes, most=35)
    assert len(some) == 3
    assert tasks_to_look_at(sizes, most=25) < some  # always the same ones
    assert len(tasks_to_look_at(sizes, most=1)) == 1
    assert tasks_to_look_at({}) == set()


def test_the_forecast_of_an_import_reads_no_held_out_task(tmp_path: Path) -> None:
    """The held-out task says what the notes of training tasks say, which would answer two of them."""
    tasks = {"train": ("a", "b", "c"), "heldout": ("h",)}
    store = TrajectoryStore.create(tmp_path / "log", tasks, {"imported": True})
    known = [replace(reading(task), id=f"h/{task}", task_id="h", group_id="h") for task in "ab"]
    store.append([*map(reading, "abc"), *known])
    coverage, found = cover_log(tmp_path, store)
    assert coverage.episodes == 5
    assert found["looked_up"] == looked_up([reading(task) for task in "abc"], [])
    assert json.loads((tmp_path / "coverage.json").read_text())["looked_up"]["exact"]["value"] == 0.5


def test_a_forecast_of_a_sample_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode is read in 47 characters: its start with both actions, and what was done and seen."""
    store = TrajectoryStore.create(tmp_path / "log", {"train": ("a", "b", "c"), "heldout": ("h",)})
    store.append(map(reading, "abch"))

    def said(characters: int) -> tuple[int, str]:
        monkeypatch.setattr(import_logs, "CHARACTERS", characters)
        coverage, found = cover_log(tmp_path, store)
        assert coverage.read_sizes["a"] == 2 * len("House a") + len("open doorIt opens.read notenote a") == 47
        (line,) = (line for line in coverage_lines(coverage, found) if "looked up" in line)
        return found["looked_up"]["episodes"], line.partition("of another task")[2]

    assert said(3 * 47) == (3, "")
    assert said(2 * 47) == (2, ", of a sample of 2 episodes")
