"""Trainings with and without players, what they came to, and the processes of Ray that they have."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from imagination.commands.train import train
from imagination.settings import Config
from imagination.settings.compose import load_config
from tests.support.corridor_world import ROOT, CorridorSettings, CorridorWorld, requests
from tests.support.killing import metrics_of, summary_of, weights
from tests.support.processes import below

SIZES = "{hidden: 32, layers: 2, heads: 2, kv_heads: 2, mlp: 64, context: 256}"
# What `tests.support.tiny` has, as words: a command in a process of its own must have the same.
WORDS = (
    *("vocab_size=512", f"worldmodel={SIZES}", f"policy={SIZES}", "logger=none", "env=corridors"),
    *("fit.precision=fp32", "fit.copying_steps=0", "fit.batch_tokens=1024", "fit.warmup=2", "fit.steps=150"),
    *("fit.lr=1e-2", "fit.average=0", "fit.optimizer=adamw", "clone.precision=fp32", "clone.copying_steps=0"),
    *("clone.batch_tokens=1024", "clone.warmup=2", "clone.steps=80", "clone.lr=5e-3", "clone.optimizer=adamw"),
    *("clone.average=0", "clone.agents=[noisy]", "collect.max_turns=5", "collect.workers=2", "tripwires.enabled=false"),
    *("dream.max_turns=5", "dream.max_tokens=96", "dream.min_confidence=0", "dream.min_outcome_confidence=0"),
    *("train.updates=6", "train.groups=4", "train.group_size=4", "train.checkpoint_every=1", "train.real_share=0.5"),
)
OF_THE_CLOCK = {"time", "stage_seconds", "learner_waits"}


@dataclass(frozen=True)
class Trained:
    """A run after its training."""

    run: Path
    journal: Path

    @property
    def summary(self) -> dict[str, Any]:
        return summary_of(self.run)

    def counted(self) -> tuple[int, int]:
        """Real steps and resets, as the run has them."""
        return self.summary["real_steps"]["train"], self.summary["real_resets"]["train"]

    def sent(self) -> tuple[int, int]:
        """Real steps and resets, as the worlds saw them."""
        counts = requests(self.journal)
        return counts["step"], counts["reset"]


@dataclass(frozen=True)
class Trainings:
    """Trainings that begin with the same clone.

    Attributes:
        cloned: the run as it is before ``train``.
        place: where copies of it go.
    """

    cloned: Path
    place: Path

    def copy(self, name: str, seconds: float = 0.0) -> Trained:
        """A new run, whose real worlds take so many seconds a step."""
        done = Trained(self.place / name, self.place / f"{name}.journal")
        shutil.copytree(self.cloned, done.run)
        CorridorWorld().generate(done.run / "games", {}, 0, CorridorSettings(seconds, str(done.journal)), _nothing, 1)
        return done

    def train(self, name: str, *words: str, seconds: float = 0.0) -> Trained:
        """A copy, in this process."""
        return self.run(self.copy(name, seconds), *words)

    def run(self, done: Trained, *words: str) -> Trained:
        """In this process."""
        train(config(*words), done.run)
        return done

    def start(self, done: Trained, *words: str, python: Sequence[str] = ("-m", "imagination")) -> subprocess.Popen[str]:
        """``imagine train`` in a process of its own, which leads a group."""
        command = [sys.executable, *python, "train", *WORDS, *words, f"run={done.run.name}", f"output={self.place}"]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            # a shell that has put the tests in the background has made all of them deaf to SIGINT
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        weakref.finalize(self, process.kill)  # where its test failed
        return process


def _nothing(done: int, total: int) -> None: ...


def config(*words: str) -> Config:
    return load_config([*WORDS, *words], Config)


def assert_same_training(got: Trained, expected: Trained, tolerance: float = 1e-5) -> None:
    """The same episodes, each once; the same numbers of each update; and the same weights."""
    policies = [weights(done.run / "models" / "policy") for done in (got, expected)]
    clone = weights(expected.run / "models" / "policy-clone")
    for name, expected_weight in policies[1].items():
        worst = float((policies[0][name] - expected_weight).abs().max())
        assert worst <= tolerance, f"{name} is off by {worst}"
    moved = max(float((w - clone[name]).abs().max()) for name, w in policies[1].items())
    assert moved > 100 * tolerance, "the training changed nothing"
    played = [rollouts(done.run) for done in (got, expected)]
    assert [row["id"] for row in played[0]] == [row["id"] for row in played[1]]
    assert_close(played[0], played[1], "rollouts")
    lines = [[_timeless(row) for row in metrics_of(done.run, "train")] for done in (got, expected)]
    assert_close(lines[0], lines[1], "metrics")


def rollouts(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "policy_version"} for row in rows]


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in OF_THE_CLOCK and not k.endswith(("seconds", "per_second"))}


def assert_close(got: Any, expected: Any, where: str) -> None:
    """Equal, numbers up to what sums in another order differ by."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key in expected:
            assert_close(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), where
        for n, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_close(a, b, f"{where}[{n}]")
    elif isinstance(expected, float):
        assert math.isclose(got, expected, rel_tol=1e-3, abs_tol=1e-3), f"{where}: {got} instead of {expected}"
    else:
        assert got == expected, where


def actors(kind: str, root: int | None = None) -> list[int]:
    """Processes of this process's clusters that run an actor, such as ``_PlayerActor``; the oldest first."""
    pids = []
    for pid in below(root or os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if title.startswith("ray::") and kind in title:
            pids.append(pid)
    return sorted(pids)


@contextmanager
def cluster(cpus: Sequence[int] = (0, 3), **head: Any) -> Iterator[Any]:
    """A cluster of this machine; its first node, where the driver is, has ``cpus[0]``."""
    from ray.cluster_utils import Cluster

    system = {"prestart_worker_first_driver": False, **head.pop("_system_config", {})}
    head = {"num_cpus": cpus[0], "include_dashboard": False, "_system_config": system, **head}
    machines = Cluster(head_node_args=head)
    try:
        for count in cpus[1:]:
            machines.add_node(num_cpus=count)
        yield machines
    finally:
        machines.shutdown()
