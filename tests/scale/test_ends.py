"""If this fails, players leave processes, memory or files of Ray behind, or a training needs Ray where none is."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.scale.trained import Trained, Trainings
from tests.support.corridor_world import requests
from tests.support.processes import below

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
WITHOUT = """
import sys
sys.modules["ray"] = None
from imagination.cli import main
sys.exit(main(sys.argv[1:]))
"""
PLAIN = """
import sys
from imagination.cli import main
code = main(sys.argv[1:])
assert not [name for name in sys.modules if name.partition(".")[0] == "ray"]
sys.exit(code)
"""


def left(folders: set[Path], pids: set[int]) -> list[str]:
    """Processes and what they hold: of the training or in a session with one of them; folders; shared memory."""
    found = [f"{pid}" for pid in pids if Path(f"/proc/{pid}/stat").exists()]
    found += [str(path) for path in folders if path.exists()]
    for maps in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = maps.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [f"{maps.parent.name} of {folder}" for folder in folders if str(folder) in text]
    return found


def ray_things() -> set[Path]:
    return {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("ray-*"), *Path("/tmp/ray").glob("session_2*")}


@pytest.mark.scale
@pytest.mark.parametrize("end", ["Ctrl-C", "Ctrl-C of the group", "kill", "kill while a player hangs", "learner"])
def test_nothing_is_left_of_ray(trainings: Trainings, run_name: str, end: str) -> None:
    before = ray_things()
    done = trainings.copy(run_name, seconds=0.02)
    process = trainings.start(done, *SCALED, python=("-c", FAILS) if end == "learner" else ("-m", "imagination"))
    while requests(done.journal)["step"] < 40:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    family, new = set(below(process.pid)), ray_things() - before
    assert len(family) > 5, "no Ray at work"
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
    while (things := left(new, family)) and time.monotonic() - begun < SECONDS:
        time.sleep(0.2)
    print(f"{end}: nothing left after {time.monotonic() - begun:.1f} s, exit code {process.returncode}")
    assert not things, [titles.get(int(thing), thing) if thing.isdigit() else thing for thing in things]
    assert process.returncode != 0


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")[:200]
    except OSError:
        return ""


def test_a_training_in_one_process_imports_nothing_of_ray(trainings: Trainings, run_name: str) -> None:
    done = trainings.copy(run_name)
    assert finished(trainings, done, PLAIN, "train.updates=1") == (0, "")


def test_without_ray_its_use_is_refused_in_a_line(trainings: Trainings, run_name: str) -> None:
    done = trainings.copy(run_name)
    code, error = finished(trainings, done, WITHOUT, "scale=ray")
    assert code == 2
    assert "ray" in error
    assert "imagination[scale]" in error
    assert not (done.run / "models" / "policy").exists()


def finished(trainings: Trainings, done: Trained, script: str, *words: str) -> tuple[int, str]:
    """Exit code and the line of its error, if any."""
    process = trainings.start(done, *words, python=("-c", script))
    _, errors = process.communicate(timeout=240)
    lines = [line for line in errors.splitlines() if line.startswith("error")]
    assert len(lines) <= 1
    assert "Traceback" not in errors, errors
    return process.returncode, "".join(lines)
