"""Somebody else's world is played without touching this tree. If these fail, every new world needs a fork."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from imagination.runs.worlds import commands_of
from real_envs.env import Task
from real_envs.trajectory import Observation
from real_envs.world import UnknownWorld, find_world, world_names
from real_envs.worlds.textworld import TextWorld
from tests.support.refusal import mistaken, refused

WORLD = '''
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from real_envs.scripted_agents import mixture
from real_envs.env import StepResult, Task
from real_envs.worker_pool import WorkerPool
from real_envs.trajectory import Observation
from real_envs.world import FILE


@dataclass(frozen=True)
class Settings:
    rooms: int = 2


class Corridor:
    """Go east until there is a lamp, then take it."""

    def reset(self, task, seed=0):
        self.rooms, self.at = int(task.spec["rooms"]), 0
        return self.observe("Find the lamp.")

    def step(self, action):
        if action == "go east" and self.at < self.rooms:
            self.at += 1
            return StepResult(self.observe("You walk east."), 0.0, False, False)
        if action == "take lamp" and self.at == self.rooms:
            return StepResult(self.observe("You take the lamp."), 1.0, True, False)
        return StepResult(self.observe("What?"), 0.0, False, False)

    def observe(self, text):
        plan = ["go east"] * (self.rooms - self.at) + ["take lamp"]
        here = {"admissible_commands": plan[:1], "policy_commands": plan, "inventory": "", "entities": ["lamp"]}
        return Observation(f"{text} Room {self.at}.", here)

    def close(self):
        pass


class Tasks:
    def __init__(self, folder, workers):
        self.splits = json.loads((folder / FILE).read_text())
        self.pool = WorkerPool(Corridor, workers=workers)

    def tasks(self, split):
        return [Task(f"corridor-{rooms}", {"rooms": str(rooms)}) for rooms in self.splits[split]]

    def make_env(self):
        return self.pool.make_env()

    async def close(self):
        await self.pool.close()


class Corridors:
    name, settings, invalid = "corridors", Settings, "What"

    def generate(self, folder, counts, seed, settings, progress, workers):
        folder.mkdir(parents=True, exist_ok=True)
        splits, first = {}, settings.rooms
        for split, count in counts.items():
            splits[split] = list(range(first, first + count))
            first += count
        (folder / FILE).write_text(json.dumps(splits))

    def open(self, folder, privileged, workers):
        return Tasks(folder, workers)

    def behaviours(self, elsewhere):
        return mixture(elsewhere)
'''


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """An installed package with a world of its own, as environment variables of a process that sees it."""
    site = tmp_path / "site"
    info = site / "corridors-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "corridors.py").write_text(WORLD)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: corridors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[imagination.envs]\ncorridors = corridors:Corridors\n")
    paths = [str(site), str(Path(__file__).parents[3])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_the_world_of_another_package_is_collected_by_its_name(package: dict[str, str], tmp_path: Path) -> None:
    look = (
        "import sys; from imagination.cli import main; assert main(sys.argv[1:]) == 0\n"
        "from real_envs.store import TrajectoryStore\n"
        f"store = TrajectoryStore.open({str(tmp_path / 'tiny' / 'log')!r})\n"
        "logged = list(store.read('train'))\n"
        "print(store.meta['environment'], len(logged), {t.task_id for t in logged}, any(t.solved for t in logged))"
    )
    chosen = ["preset=tiny", "env=corridors", "env.options.rooms=3", "collect.episodes=20", f"output={tmp_path}"]
    command = [sys.executable, "-c", look, "collect", *chosen]
    read = subprocess.run(command, env=package, capture_output=True, text=True, timeout=120)
    assert read.stdout.splitlines()[-1] == "corridors 20 {'corridor-3'} True", read.stderr


def test_a_world_with_agents_of_its_own_needs_no_plan() -> None:
    world = Mock(spec=["behaviours"])
    tasks = Mock(tasks=lambda split: [Task("corridor")])
    tasks.make_env.return_value = AsyncMock(**{"reset.return_value": Observation("Find the lamp.")})
    assert asyncio.run(commands_of(world, tasks)) == []


def test_options_that_the_world_does_not_have_are_told_in_a_line(
    package: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(package["PYTHONPATH"].split(os.pathsep)[0])
    words = ["collect", "preset=tiny", "env=corridors", "env.options.doors=3", f"output={tmp_path}"]
    mistaken(capsys, words, "env.options.doors")


def test_an_unknown_world_is_told_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(lambda: find_world("nowhere"), "nowhere", "textworld, textworld_express", error=UnknownWorld)
    mistaken(capsys, ["collect", "preset=tiny", "env=nowhere", f"output={tmp_path}"], "nowhere")


def test_a_world_without_its_packages_names_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textworld_express", None)
    command = "pip install 'imagination[textworld-express]'"
    refused(lambda: find_world("textworld_express"), command, error=UnknownWorld)


def test_built_in_worlds_are_found() -> None:
    assert {"textworld", "textworld_express"} <= set(world_names())
    assert isinstance(find_world("textworld"), TextWorld)
