"""Ends processes together with all that they started: browsers, servers, Java machines.

A process that is killed cannot end its own children, and a parent that is killed cannot end anything. So each worker
leads a process group of its own and has a *mark* in its environment, which whatever it starts inherits; and beside the
parent runs one small process, the guard, that ends the groups it was told of when the parent is gone, however it went.
The mark finds those that left the group as well, such as a browser that was started detached (where there is /proc).

The guard runs this file as a script, before which nothing of ours is imported: it takes some 10 MB and no time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "IMAGINATION_WORKER"
_GRACE = 5.0  # seconds in which a worker whose parent is gone may close its environment
_ROUNDS = 20  # a process may be started while we look for it


def end_with_parent() -> None:
    """From now on a process of ``multiprocessing`` ends as soon as the one that started it is gone, however it went."""
    import multiprocessing.connection  # here, as the guard itself needs little
    import threading

    parent = multiprocessing.parent_process()

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])  # type: ignore[union-attr]
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def end_tree(leader: int, mark: str) -> None:
    """Kill the group that ``leader`` leads or led, and all processes with the mark.

    ``leader`` must not have been waited for: until then its number is nobody else's.
    """
    _kill_group(leader)
    end_marked(mark)


def end_marked(mark: str) -> None:
    """Kill all processes with the mark."""
    for _ in range(_ROUNDS):
        leftovers = marked(mark)
        if not leftovers:
            return
        for process in leftovers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """Living processes that were started with the mark in their environment; none where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def has_ended(process: int) -> bool:
    """Whether a child has ended, which is left to be waited for."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


class ProcessGuard:
    """Tells the guard of this process what to end when this process is gone; started when first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: dict[int, str] = {}
        os.register_at_fork(after_in_child=self._begin_anew)

    def watch(self, leader: int, mark: str) -> None:
        self._watched[leader] = mark
        self._tell(f"+{leader} {mark}\n")

    def forget(self, leader: int) -> None:
        """``leader`` is about to be waited for: its number may soon be another process's."""
        if self._watched.pop(leader, None) is not None:
            self._tell(f"-{leader}\n")

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.poll() is None and self._write(self._process, line):
            return
        self._process = subprocess.Popen(  # the first, or somebody killed the last one
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and a closed terminal are not for it
        )
        for leader, mark in self._watched.items():
            self._write(self._process, f"+{leader} {mark}\n")

    def _write(self, process: subprocess.Popen[bytes], line: str) -> bool:
        assert process.stdin is not None
        try:
            process.stdin.write(line.encode())
            process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _begin_anew(self) -> None:
        """In a fork: the guard and what it watches are the parent's, and must not wait for the fork's end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process, self._watched = None, {}


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS denies it where only zombies are left
        os.killpg(leader, signal.SIGKILL)


def _leader_lives(leader: int) -> bool:
    try:
        os.kill(leader, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _serve() -> None:
    """The guard's side: keep the list until the parent is gone, give workers time to close, end what is left."""
    watched: dict[int, str] = {}
    for line in sys.stdin:
        leader, _, mark = line[1:].strip().partition(" ")
        if line.startswith("+"):
            watched[int(leader)] = mark
        else:
            watched.pop(int(leader), None)
    deadline = time.monotonic() + _GRACE
    while watched:
        late = time.monotonic() > deadline
        for leader, mark in list(watched.items()):
            if late or not _leader_lives(leader):
                end_tree(leader, mark)
                del watched[leader]
        time.sleep(0.05)


if __name__ == "__main__":
    _serve()
