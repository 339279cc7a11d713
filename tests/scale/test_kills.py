"""If this fails, a process that is killed costs a training its episodes, its result, or the count of its real steps."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tests.scale.trained import Trained, Trainings, actors, assert_same_training, cluster
from tests.support.corridor_world import requests

Undisturbed = Callable[..., Trained]
WORKERS, EPISODES = 2, 16  # real worlds that are stepped at a time, and episodes of an update
SCALED = ("scale=ray", "scale.players=2", "scale.attempts=1000", f"collect.workers={WORKERS}")


class Killer(threading.Thread):
    """Kills in turn what its list names, each when the real worlds have seen a number of steps drawn at random."""

    def __init__(self, done: Trained, steps: int, kinds: list[str], seed: int, machines: Any = None) -> None:
        super().__init__(daemon=True)
        rng = random.Random(seed)
        self.kinds, self.killed = kinds, list[str]()
        self._points = sorted(rng.sample(range(1, steps), len(kinds)))
        self._rng, self._done, self._machines, self._root = rng, done, machines, os.getpid()

    def run(self) -> None:
        for kind, point in zip(self.kinds, self._points, strict=True):
            while requests(self._done.journal)["step"] < point:
                time.sleep(0.005)
            time.sleep(self._rng.uniform(0, 0.3))
            self._kill(kind)
            self.killed.append(kind)

    def _kill(self, kind: str) -> None:
        if kind == "node":
            node = self._rng.choice(sorted(self._machines.worker_nodes, key=lambda n: n.unique_id))
            self._machines.remove_node(node, allow_graceful=False)
            return
        while not (pids := actors(kind, self._root)):
            time.sleep(0.05)
        os.kill(self._rng.choice(pids), signal.SIGKILL)


def assert_counted(done: Trained, worlds_killed: int) -> None:
    """Each request that reached a world counts, once; beside them only what was on its way to a world that died."""
    (steps, resets), (steps_sent, resets_sent) = done.counted(), done.sent()
    assert steps_sent <= steps <= steps_sent + WORKERS * worlds_killed
    assert resets_sent <= resets <= resets_sent + EPISODES * worlds_killed


def test_a_player_that_is_killed_changes_nothing(trainings: Trainings, undisturbed: Undisturbed, run_name: str) -> None:
    done, expected = trainings.copy(run_name, seconds=0.02), undisturbed()
    killer = Killer(done, expected.sent()[0], ["Player"], seed=0)
    killer.start()
    trainings.run(done, *SCALED)
    assert killer.killed == ["Player"]
    assert_same_training(done, expected)
    assert_counted(done, worlds_killed=0)
    assert done.summary["speed"]["players_died"] == 1


@pytest.mark.scale
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random_points_change_nothing(
    trainings: Trainings, undisturbed: Undisturbed, run_name: str, seed: int
) -> None:
    kinds = ["Player", "Player", "Player", "EnvActor", "EnvActor", "node", "node"]
    random.Random(seed).shuffle(kinds)
    done, expected = trainings.copy(run_name, seconds=0.02), undisturbed()
    with cluster((0, 3, 3, 3, 3)) as machines:
        killer = Killer(done, expected.sent()[0], kinds, seed, machines)
        killer.start()
        trainings.run(done, *SCALED, f"scale.address={machines.address}")
    assert killer.killed == kinds
    assert_same_training(done, expected)
    assert_counted(done, worlds_killed=4)


@pytest.mark.scale
@pytest.mark.parametrize("own", [True, False], ids=["its cluster", "a cluster"])
def test_a_driver_that_is_killed_goes_on_with_the_same_command(
    trainings: Trainings, undisturbed: Undisturbed, run_name: str, own: bool
) -> None:
    done, expected = trainings.copy(run_name, seconds=0.02), undisturbed()
    rng, total = random.Random(own), expected.sent()[0]
    with nullcontext() if own else cluster() as machines:
        words = [*SCALED, *([] if own else [f"scale.address={machines.address}"])]
        for point in sorted(rng.sample(range(total // 4, total), 3)):
            process = trainings.start(done, *words)
            while requests(done.journal)["step"] < point:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.02)
            process.kill()
            process.communicate()
        process = trainings.start(done, *words)
        assert process.wait(300) == 0, process.communicate()[1]
    assert_same_training(done, expected)
    assert_counted(done, worlds_killed=3)
