"""If these fail, two stages write into one run at the same time, or a run that nobody writes to cannot go on."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from imagination.cli import main
from imagination.runs import lock
from imagination.runs.lock import is_locked, locked
from imagination.runs.run_folder import RunFolder
from imagination.settings import UserError
from tests.support.refusal import mistaken, refused

ROOT = Path(__file__).parents[3]
HOLD = (
    "import sys, time; from pathlib import Path; from imagination.runs.lock import locked\n"
    "with locked(Path(sys.argv[1]), 'train'):\n    print('held', flush=True); time.sleep(60)"
)


@contextmanager
def other_process(folder: Path, code: str = HOLD) -> Iterator[subprocess.Popen[str]]:
    """Another process that has locked ``folder`` when this is entered; it is killed in the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE", 0.0)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_stage_is_refused_and_told_who_is_there_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "mine", 0)
    with other_process(run.path) as holder:
        before, where = files(tmp_path), ["run=mine", f"output={tmp_path}"]
        for stage in ("fit-world-model", "import", "pretrain", "train"):
            mistaken(capsys, [stage, *where, "seed=7"], f"process {holder.pid}", socket.gethostname(), "train", "since")
        assert is_locked(run.path)
        assert main(["list", f"output={tmp_path}"]) == 0
        assert main(["train", *where, "--dry-run"]) == 0
        assert files(tmp_path) == before
        assert main(["report", *where, "machine_price=1"]) == 0
        assert not (run.path / "config.yaml").exists(), "settings of a run at work are those of who writes it"
    assert not is_locked(run.path)


def test_the_lock_of_a_killed_process_is_free_and_one_process_may_lock_again_within(tmp_path: Path) -> None:
    with other_process(tmp_path) as holder:
        refused(lambda: ExitStack().enter_context(locked(tmp_path, "clone")), str(tmp_path))
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with locked(tmp_path, "demo"), locked(tmp_path, "clone"):
            written = json.loads((tmp_path / ".lock").read_text())
            assert (written["pid"], written["stage"]) == (os.getpid(), "demo")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_that_stays_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    code = HOLD.replace("    print(", "    import os; pid = os.fork(); pid or time.sleep(30)\n    pid and print(")
    with other_process(tmp_path, code) as holder:
        assert is_locked(tmp_path)
        holder.kill()
        holder.wait()
        until = time.monotonic() + 15  # the child, which sleeps for 30 s, may not have come to run yet
        while is_locked(tmp_path) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_locked(tmp_path)


def test_a_run_that_is_refused_before_it_began_leaves_no_folder_and_another_leaves_all(tmp_path: Path) -> None:
    def work(folder: Path, *names: str) -> None:
        with locked(folder, "train"):
            RunFolder(folder, 0)
            for name in names:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text("x")
            raise UserError("no episode")

    def fail(folder: Path, *names: str) -> None:
        refused(lambda: work(folder, *names), "no episode")

    fail(tmp_path / "sweep" / "a")
    assert list(tmp_path.iterdir()) == []
    fail(tmp_path / "sweep" / "a", "log/shard")
    assert (tmp_path / "sweep" / "a" / "log" / "shard").exists()
    fail(tmp_path / "sweep" / "b")
    fail(tmp_path / "sweep" / "a")
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["a"]
    assert (tmp_path / "sweep" / "a" / "summary.json").exists()


def test_a_file_where_the_folder_would_be_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for words in (["run=file", f"output={tmp_path}"], ["run=a", f"output={tmp_path / 'file'}"]):
        mistaken(capsys, ["train", *words], str(tmp_path / "file"))
    mistaken(capsys, ["train", f"run={'a' * 300}", f"output={tmp_path}"], "too long")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_one_of_two_that_begin_a_run_at_once_leaves_the_folder_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither saw a folder when it began."""
    with other_process(tmp_path / "mine"):
        exists = Path.exists
        monkeypatch.setattr(Path, "exists", lambda path: path.name != "mine" and exists(path))
        refused(lambda: ExitStack().enter_context(locked(tmp_path / "mine", "import")), "train")
        monkeypatch.undo()
        assert (tmp_path / "mine" / ".lock").exists()


def test_a_disk_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with locked(tmp_path, "train"), locked(tmp_path, "train"):
        (tmp_path / "made").touch()
    (line,) = capsys.readouterr().err.splitlines()
    assert "No locks available" in line
