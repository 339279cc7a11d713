"""If this fails, a player that hangs, answers nonsense or takes all memory stops a training, or changes its result."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from imagination.scale import ray_players
from tests.scale.faulty import FAULTS, FaultyPlayer, plant
from tests.scale.trained import Trained, Trainings, actors, assert_same_training, cluster
from tests.support.corridor_world import requests

pytestmark = pytest.mark.scale
Undisturbed = Callable[..., Trained]
GIB = 1 << 30


@pytest.mark.parametrize("fault", ["garbage", "error"])
def test_a_player_that_answers_nonsense_is_replaced(
    trainings: Trainings, undisturbed: Undisturbed, run_name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_players, "_PlayerActor", FaultyPlayer)
    done = trainings.copy(run_name)
    plant(done.run, fault)
    trainings.run(done, "scale=ray")
    assert_same_training(done, undisturbed())
    assert done.summary["speed"][f"players_{fault}"] == 1
    assert done.counted() == done.sent()


def test_a_player_that_hangs_is_replaced(trainings: Trainings, undisturbed: Undisturbed, run_name: str) -> None:
    """It is stopped by a signal, so that it does not even answer Ray."""
    done, root, stopped = trainings.copy(run_name, seconds=0.02), os.getpid(), list[int]()

    def stop() -> None:
        while requests(done.journal)["step"] < 40:
            time.sleep(0.01)
        stopped.append(actors("Player", root)[0])
        os.kill(stopped[0], signal.SIGSTOP)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    trainings.run(done, "scale=ray", "scale.hang_seconds=15")
    assert stopped
    assert_same_training(done, undisturbed())
    assert done.summary["speed"]["players_hung"] >= 1
    assert done.counted() == done.sent()


def test_a_player_that_takes_all_memory_is_replaced(
    trainings: Trainings, undisturbed: Undisturbed, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends who takes 4 GiB: the limit lies 2.5 GiB above what the machine has in use before."""
    used, total = _memory()
    if total - used < 8 * GIB:
        pytest.skip("the machine has less than 8 GiB of free memory")
    monkeypatch.setattr(ray_players, "_PlayerActor", FaultyPlayer)
    done = trainings.copy(run_name)
    plant(done.run, "memory")
    share = (used + 2.5 * GIB) / total
    monkeypatch.setenv("RAY_memory_usage_threshold", str(share))
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    with cluster((0, 3)) as machines:
        trainings.run(done, "scale=ray", "train.real_share=0", "scale.players=1", f"scale.address={machines.address}")
    assert not (done.run / FAULTS / "memory").exists()
    assert_same_training(done, undisturbed("train.real_share=0"))
    assert done.summary["speed"]["players_memory"] >= 1


def _memory() -> tuple[float, float]:
    """In use, and in all, in bytes, as the machine has it."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (1024.0 * int(lines[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    return total - free, total
