"""If this fails, players leave processes, memory or files of Ray behind, or a training needs Ray where none is."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.scale.trained import WORDS, Trainings
from tests.support.corridor_world import requests
from tests.support.processes import alive, below
from tests.support.refusal import mistaken

SECONDS = 30.0
SCALED = ("scale=ray", "scale.players=2", "train.updates=1000")
# A learner that fails in its third update; everything else is `imagine`.
FAILS = """
import sys
from imagination.cli import main
from imagination.learning.policy_module import PolicyModule
honest = PolicyModule.training_step
def step(self, update, number):
    if update.index == 2:
        raise ZeroDivisionError("the learner")
    return honest(self, update, number)
PolicyModule.training_step = step
sys.exit(main(sys.argv[1:]))
"""
PLAIN = """
import sys
from imagination.cli import main
code = main(sys.argv[1:])
assert not [name for name in sys.modules if name.partition(".")[0] == "ray"]
sys.exit(code)
"""


def held(pids: set[int]) -> set[Path]:
    """Folders of Ray that processes were started with, and shared memory that they map."""
    texts = [title(pid) for pid in pids]
    for pid in pids:
        with suppress(OSError):
            texts.append(Path(f"/proc/{pid}/maps").read_text())
    return {Path(path) for text in texts for path in re.findall(r"/tmp/ray[^/\s]*|/dev/shm/[^/\s]+", text)}


def left(pids: set[int], things: set[Path]) -> list[str]:
    """Those that are still there, and processes that were started with one of the folders in their environment."""
    found = [title(pid) or str(pid) for pid in pids if alive(pid)]
    found += [str(path) for path in things if path.exists()]
    folders = [str(path).encode() for path in things if path.parts[1] == "tmp"]
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if any(folder in environment.read_bytes() for folder in folders):
                found.append(title(int(environment.parent.name)))
    return found


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.scale
@pytest.mark.parametrize("end", ["Ctrl-C", "Ctrl-C of the group", "kill", "kill while a player hangs", "learner"])
def test_nothing_is_left_of_ray(trainings: Trainings, run_name: str, end: str) -> None:
    done = trainings.copy(run_name, seconds=0.02)
    process = trainings.start(done, *SCALED, python=("-c", FAILS) if end == "learner" else ("-m", "imagination"))
    while requests(done.journal)["step"] < 40:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    family = set(below(process.pid))
    things = held(family)
    assert {path.parts[1] for path in things} == {"tmp", "dev"}, "no Ray at work"
    titles = {pid: title(pid) for pid in family}
    assert any("Player" in text for text in titles.values())
    if "hangs" in end:
        os.kill(next(pid for pid, text in titles.items() if "Player" in text), signal.SIGSTOP)
    match end.split()[0]:
        case "Ctrl-C" if "group" in end:
            os.killpg(process.pid, signal.SIGINT)
        case "Ctrl-C":
            process.send_signal(signal.SIGINT)
        case "kill":
            process.kill()
    begun = time.monotonic()
    process.communicate(timeout=120 if end == "learner" else SECONDS)
    begun = time.monotonic() if end == "learner" else begun
    while (still := left(family, things)) and time.monotonic() - begun < SECONDS:
        time.sleep(0.2)
    print(f"{end}: nothing left after {time.monotonic() - begun:.1f} s, exit code {process.returncode}")
    assert not still
    assert process.returncode != 0


def test_a_training_in_one_process_imports_nothing_of_ray(trainings: Trainings, run_name: str) -> None:
    done = trainings.copy(run_name)
    process = trainings.start(done, "train.updates=1", python=("-c", PLAIN))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def test_without_ray_its_use_is_refused_in_a_line(
    trainings: Trainings, run_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trainings.copy(run_name)
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    words = ["train", *WORDS, "scale=ray", f"run={done.run.name}", f"output={trainings.place}"]
    mistaken(capsys, words, "ray", "imagination[scale]")
    assert not (done.run / "models" / "policy").exists()
