"""If these fail, a step function that a language model wrote can do more than compute, or takes a run with it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.lm.engine import EngineUnavailable
from real_envs.process_guard import MARK
from real_envs.trajectory import Turn
from tests.support.refusal import refused
from worldmodel.code.worker import StepWorker
from worldmodel.code.world_model import SOURCE, CodeWorldModel, load_world, save_world
from worldmodel.world_model import InvalidReason, PredictionInvalid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="refused elsewhere")

FINE = '{"observation": action, "reward": 1, "terminated": False}'
GOOD = f"def step(start, history, action):\n    return {FINE}\n"


def body(code: str) -> str:
    """A step function that does ``code`` where the action is "now", and answers otherwise."""
    lines = "\n        ".join(code.splitlines())
    head = "import os, sys\ndef step(start, history, action):\n    if action == 'now':"
    return f"{head}\n        {lines}\n    return {FINE}\n"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A file that must stay as it is, and the port of a server that nobody must reach."""
    file = tmp_path / "file"
    file.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        yield file, server.getsockname()[1]
        with pytest.raises(TimeoutError):
            server.accept()
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


NATIVE = "import ctypes\nc = ctypes.CDLL(None)\n"
ATTACKS = {
    "endless loop": ("while True: pass", "took longer than 0.5 s"),
    "endless loop in C": ("sum(iter(int, 1))", "took longer than 0.5 s"),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 22))", "MemoryError"),
    "memory at once": ("x = bytearray(1 << 40)", "MemoryError"),
    "write": ("open('{file}', 'w').write('x')", "PermissionError"),
    "new file": ("open('{file}2', 'w').write('x')", "PermissionError"),
    "read": ("return open('{file}').read()", "PermissionError"),
    "remove": ("os.remove('{file}')", "PermissionError"),
    "list": ("os.listdir('/')", "PermissionError"),
    "network": ("import socket", "ModuleNotFoundError"),
    "other modules": ("import sqlite3", "ModuleNotFoundError"),
    "our modules": ("import real_envs", "ModuleNotFoundError"),
    "fork": ("os.fork()", "PermissionError"),
    "exec": ("os.execv('/bin/sh', ['sh'])", "PermissionError"),
    "shell": ("os.system('true') and 1 / 0", "ZeroDivisionError"),
    "kill": ("os.kill(os.getppid(), 9)", "PermissionError"),
    "exit": ("os._exit(0)", "it ended"),
    "sys.exit": ("sys.exit(0)", "SystemExit: 0"),
    "crash": (f"{NATIVE}ctypes.string_at(0)", "it ended"),
    "exception": ("1 / 0", "ZeroDivisionError: division by zero (line 4)"),
    "recursion": ("return step(start, history, action)", "RecursionError"),
    "no dict": ("return 3", "returned a int"),
    "no reward": ("return {{'observation': '', 'terminated': False}}", "returned no observation"),
    "a reward of NaN": ("return {{'observation': '', 'reward': float('nan'), 'terminated': False}}", "finite number"),
    "a huge reward": ("return {{'observation': '', 'reward': 10 ** 400, 'terminated': False}}", "finite number"),
    "an end of 1": ("return {{'observation': '', 'reward': 0, 'terminated': 1}}", "true or false"),
    "half a character": ("return {{'observation': '\\ud800', 'reward': 0, 'terminated': False}}", "observation (text)"),
    "no JSON": ("return {{1, 2}}", "TypeError"),
    "a huge answer": ("return {{'observation': 'x' * 3_000_000, 'reward': 0, 'terminated': False}}", "bytes"),
    "deep JSON": ("os.write(0, b'[' * 500_000 + b'\\n')", "no answer"),
    "no answer": ("os.write(0, b'hello\\n')", "no answer"),
    "two answers": ("os.write(0, b'{{}}\\n{{}}\\n')", "no answer"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_goes_wrong_is_no_prediction_and_the_next_call_is_answered(name: str, outside: tuple[Path, int]) -> None:
    code, said = ATTACKS[name]
    model = CodeWorldModel(body(code.format(file=outside[0])), 0.5 if "loop" in name else 20.0, 128)
    begin = time.monotonic()
    with pytest.raises(PredictionInvalid) as caught:
        asyncio.run(model.predict("start", (), "now", 0))
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert caught.value.reason is InvalidReason.CODE
    assert time.monotonic() - begin < 10
    assert asyncio.run(model.predict("start", (), "go", 0)).observation == "go"
    model.close()


def test_native_code_has_no_more_rights(outside: tuple[Path, int]) -> None:
    """The kernel refuses, whatever the interpreter can be talked into: open, socket, a second filter, other limits."""
    file, _ = outside
    calls = f"[c.open(b'{file}', 1), c.socket(2, 1, 0), c.prctl(4, 0, 0, 0, 0), c.setrlimit(9, b' ' * 16), c.fork()]"
    worker = StepWorker(body(f"{NATIVE}action = str({calls})"), 5.0, 128)
    assert worker.call("", (), "now")[0] == "[-1, -1, -1, -1, -1]"


def test_it_knows_nothing_of_our_environment_and_of_calls_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    worker = StepWorker(body("action = ' '.join(sorted(os.environ))\nglobals()['seen'] = 1"), 5.0, 128)
    told = worker.call("", (), "now")[0]
    assert MARK in told
    assert "SECRET" not in told
    worker = StepWorker(
        "import random\nseen = []\ndef step(s, h, a):\n    seen.append(a)\n"
        "    return {'observation': f'{seen} {random.random()}', 'reward': 0, 'terminated': False}",
        5.0,
        128,
    )
    assert worker.call("", (), "a") == worker.call("", (Turn("b", "c", None, False),), "a")


def test_a_process_that_was_killed_is_started_again_and_one_that_is_closed_is_gone() -> None:
    worker = StepWorker(GOOD, 5.0, 128)
    worker.call("", (), "a")
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait()
    assert worker.call("", (), "b") == ("b", 1.0, False)
    process = worker._process
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_loop_whose_parent_was_killed_ends() -> None:
    script = (
        "import os, threading, time\nfrom worldmodel.code.worker import StepWorker\n"
        f"worker = StepWorker({body('while True: pass')!r}, 600.0, 128)\n"
        "worker.call('', (), 'go')\nprint(worker._process.pid, flush=True)\n"
        "threading.Thread(target=worker.call, args=('', (), 'now'), daemon=True).start()\n"
        "time.sleep(0.3)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    pid, deadline = int(done.stdout), time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(") ")[1][:1]:
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.1)


def test_where_nothing_confines_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldmodel.code.worker.platform.machine", lambda: "riscv64")
    refused(lambda: StepWorker(GOOD, 1.0, 128), "riscv64", "another worldmodel.kind", error=EngineUnavailable)


def test_code_of_somebody_else_needs_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a"))
    folder = tmp_path / "worldmodel"
    save_world(GOOD, {"exact": 1.0}, folder)
    assert (tmp_path / "a/imagination/code.key").stat().st_mode & 0o077 == 0
    assert load_world(folder, False, 1.0, 128).source == GOOD
    tokens = (SOURCE, "worldmodel.code.trust=true")
    (folder / SOURCE).write_text(GOOD + "\n")  # edited
    refused(lambda: load_world(folder, False, 1.0, 128), *tokens)
    assert load_world(folder, True, 1.0, 128).source == GOOD + "\n"
    (folder / SOURCE).write_text(GOOD)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "b"))  # another user, or machine
    refused(lambda: load_world(folder, False, 1.0, 128), *tokens)
    (folder / "world.json").write_text(json.dumps({"signature": "\N{SNOWMAN}"}))
    refused(lambda: load_world(folder, False, 1.0, 128), *tokens)
    (folder / "world.json").unlink()
    refused(lambda: load_world(folder, False, 1.0, 128), *tokens)
