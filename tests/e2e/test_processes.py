"""If these fail, a command does not share its work among processes, or waits for ever for one that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.refusal import in_a_line, mistaken
from tests.support.tiny import write_log

ROOT = Path(__file__).parents[2]
SIZES = "{hidden: 32, layers: 2, heads: 2, kv_heads: 2, mlp: 64, context: 256}"
WORDS = ("vocab_size=512", f"worldmodel={SIZES}", f"policy={SIZES}", "logger=none", "dream.max_tokens=96",
         "fit.precision=fp32", "fit.copying_steps=0", "fit.batch_tokens=1024", "fit.warmup=2")  # fmt: skip
BROKEN = """
import os, signal, time
if os.environ.get("RANK") == "1":
    from imagination.learning.supervised import SupervisedModule
    honest = SupervisedModule.training_step
    def step(self, batch, number):
        if self.global_step == 2:
            {fault}
        honest(self, batch, number)
    SupervisedModule.training_step = step
"""


def imagine(words: Sequence[str], folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, in the run ``folder``."""
    paths = os.pathsep.join(map(str, (ROOT, *path)))
    command = [sys.executable, "-m", "imagination", *words, f"run={folder.name}", f"output={folder.parent}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("fault", "minutes", "reason"),
    [("os.kill(os.getpid(), signal.SIGKILL)", 5, "SIGKILL"), ("time.sleep(600)", 0.1, "wait_minutes")],
    ids=["dies", "hangs"],
)
def test_a_process_that_is_gone_ends_the_others_in_a_line_that_names_it(
    tmp_path: Path, fault: str, minutes: float, reason: str
) -> None:
    write_log(tmp_path / "run")
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(BROKEN.format(fault=fault))
    begin = time.monotonic()
    words = ["fit-world-model", *WORDS, "fit.steps=5", "devices=2", "strategy=fsdp2", f"wait_minutes={minutes}"]
    done = imagine(words, tmp_path / "run", tmp_path / "hook")
    assert time.monotonic() - begin < 120
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    in_a_line(line, "error: process 1 ", reason)
    assert not (tmp_path / "run" / "models").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("evaluate", "devices=2"), ("devices", "fit-world-model")),
        (("clone", "devices=-1"), ("devices", "-1")),
        (("clone", "num_nodes=0"), ("num_nodes", "0")),
        (("clone", "num_nodes=2"), ("num_nodes=2", "MASTER_ADDR", "torchrun")),
        (("clone", "strategy=zero"), ("strategy", "zero", "fsdp2")),
        (("clone", "activation_checkpointing=true"), ("activation_checkpointing", "strategy=fsdp2")),
        (("clone", "wait_minutes=0"), ("wait_minutes", "0")),
    ],
    ids=" ".join,
)
def test_processes_that_cannot_share_the_work_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    mistaken(capsys, [*words, "run=new", f"output={tmp_path}"], *named)
    assert not (tmp_path / "new").exists()


def test_torchrun_with_other_devices_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for setting in ("devices=3", "num_nodes=3"):
        mistaken(capsys, ["clone", setting, f"output={tmp_path}"], setting, "torchrun")
