"""If these fail, work on several runs loses results, hides errors, or goes on after it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imagination.runs.side_by_side import side_by_side, split_said
from imagination.settings import UserError
from tests.support.processes import gone_within
from tests.support.refusal import in_a_line, refused


def works(name: str, folder: Path) -> tuple[str, int, str | None]:
    """Waits for its neighbour, which is there only if both run at once."""
    print(f"== {name}")
    sys.stderr.write("\r 1/2\r 2/2\n")
    (folder / name).touch()
    until = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    print(f"{name} met {len(list(folder.iterdir())) - 1}")
    return name, os.getpid(), os.environ.get("OMP_NUM_THREADS")


class OddError(Exception):
    """One that pickle makes and cannot make again, as it does not know of ``where``."""

    def __init__(self, what: str, *, where: str) -> None:
        super().__init__(f"{what} at {where}")


def ends(how: str, folder: Path) -> str:
    if how == "mistake":
        raise UserError("no such thing")
    if how == "odd":
        raise OddError("lost", where="home")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / how).touch()
    return how


def sleeps(folder: Path, name: str) -> None:
    (folder / f"{name}.part").write_text(str(os.getpid()))
    (folder / f"{name}.part").rename(folder / f"{name}.pid")
    time.sleep(600)


def test_jobs_run_at_once_and_what_they_say_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    met = tmp_path / "met"
    met.mkdir()
    found = side_by_side(works, {"seed-1": ("b", met), "seed-0": ("a", met)}, tmp_path / "logs", at_once=2)
    assert [(title, name) for title, (name, _, _) in found.items()] == [("seed-1", "b"), ("seed-0", "a")]
    assert len({os.getpid(), *(process for _, process, _ in found.values())}) == 3
    assert all(int(threads or 0) >= 1 for _, _, threads in found.values())
    said = capsys.readouterr().out
    for line in ("seed-1: == b", "seed-0: a met 1", "seed-1: b met 1", "seed-0: done"):
        assert line in said.splitlines()
    assert "2/2" not in said  # a bar's
    assert (tmp_path / "logs" / "seed-0.log").read_bytes().count(b"\r 2/2\n") == 1


def test_one_that_fails_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = {how: (how, tmp_path) for how in ("odd", "killed", "mistake", "works")}
    refused(lambda: side_by_side(ends, jobs, tmp_path, at_once=2), "OddError: lost", error=RuntimeError)
    assert (tmp_path / "works").exists()  # started only after two had failed
    assert "in ends" in (tmp_path / "odd.log").read_text()  # where
    assert not (tmp_path / "mistake.log").read_text()  # a traceback helps nobody there
    said = capsys.readouterr().out
    for title, *tokens in (("killed", "-9"), ("mistake", "no such thing", str(tmp_path / "mistake.log"))):
        in_a_line(next(line for line in said.splitlines() if line.startswith(f"{title}: failed")), *tokens)


def test_a_users_mistake_stays_one(tmp_path: Path) -> None:
    jobs = {"a": ("mistake", tmp_path), "b": ("works", tmp_path)}
    refused(lambda: side_by_side(ends, jobs, tmp_path, at_once=2), "no such thing")


def test_one_at_a_time_happens_here(tmp_path: Path) -> None:
    (tmp_path / "neighbour").touch()
    found = side_by_side(works, {"a": ("a", tmp_path)}, tmp_path / "logs", at_once=3)
    assert found["a"][1] == os.getpid()
    assert not (tmp_path / "logs").exists()
    refused(lambda: side_by_side(works, {"a": ("a", tmp_path)}, tmp_path, at_once=-1), "jobs=-1")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_jobs_end_with_the_command_that_started_them(tmp_path: Path, stop: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\nfrom pathlib import Path\nfrom imagination.runs import side_by_side\n"
        "from tests.unit.runs.test_side_by_side import sleeps\n"
        f"here = Path({str(tmp_path)!r})\nside_by_side._GRACE = 0.5\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where a shell started us behind it
        "    side_by_side.side_by_side(sleeps, {n: (here, n) for n in 'ab'}, here, at_once=2)\n"
    )
    root = str(Path(__file__).parents[3])
    command = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": root}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        jobs = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
        assert len(jobs) == 2
        command.send_signal(stop)
        assert command.wait(60) != 0
        assert all(gone_within(job, 30) for job in jobs)
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "lines", "rest", "last"),
    [
        ("one\ntwo\nthr", ["one", "two"], "thr", "thr"),
        ("one\n\r 1/3\r 2/3", ["one"], "\r 2/3", "2/3"),
        ("\r 2/3\r 3/3\ndone\n", ["done"], "", "done"),
        ("fit:  50%\x1b[A\nnext\n\n", ["next"], "", "next"),
        ("\r 3/3\n", [], "", "3/3"),
        ("fit  3/30  10% 0:05\nnext\n", ["next"], "", "next"),
        ("", [], "", ""),
    ],
)
def test_lines_are_told_from_progress_bars(text: str, lines: list[str], rest: str, last: str) -> None:
    assert split_said(text) == (lines, rest, last)
