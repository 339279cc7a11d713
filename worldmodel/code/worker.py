"""Calls a step function in a process that can do nothing else (``confined.py``), and starts it anew where it broke."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from policy.lm.engine import EngineUnavailable
from real_envs.process_guard import MARK, ProcessGuard
from real_envs.trajectory import Turn
from worldmodel.code import confined
from worldmodel.world_model import InvalidReason, PredictionInvalid

_START = 60.0  # seconds until a new process is ready, on a busy machine
_BYTES = 1 << 20  # of an answer
# Of our environment, which may hold keys, only what an interpreter may need to start; sets of texts have one order in
# all processes.
_KEPT = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
_KEPT |= {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1"}
_GUARD = ProcessGuard()  # ends a process in an endless loop whose parent was killed


class StepWorker:
    """One process, started at the first call. Threads may share it; they take turns.

    Args:
        seconds: time limit of a call.
        megabytes: memory limit of the process.

    Raises:
        EngineUnavailable: this system cannot confine the process.
    """

    def __init__(self, source: str, seconds: float, megabytes: int) -> None:
        if sys.platform != "linux" or platform.machine() not in confined.CALLS:
            raise EngineUnavailable(
                "worldmodel.kind=code runs what a model wrote only where Linux confines it (x86_64, aarch64), not on "
                f"{sys.platform} {platform.machine()}: set another worldmodel.kind"
            )
        self._source, self._seconds, self._megabytes = source, seconds, megabytes
        self._one = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._read = b""

    def call(self, start: str, history: Sequence[Turn], action: str) -> tuple[str, float, bool]:
        """Observation, reward and end.

        Raises:
            PredictionInvalid: the function raised an error, took too long, ended its process, or returned another type.
            EngineUnavailable: the process cannot be confined.
        """
        turns = [
            {"action": t.action, "observation": t.observation, "reward": t.reward or 0.0, "terminated": t.terminated}
            for t in history
        ]
        request = {"start": start, "history": turns, "action": action}
        with self._one:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            try:
                self._send(request, self._seconds)
                reply = self._receive(self._seconds)
            except TimeoutError:
                self._end()
                raise _invalid(f"took longer than {self._seconds:g} s") from None
            except (OSError, ValueError, RecursionError) as error:
                self._end()
                raise _invalid(f"broke its process, or wrote what is no answer: {error}") from None
            except BaseException:  # the answer is still to come, and must not be taken for the next one's
                self._end()
                raise
        return _outcome(reply)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket, self._read, mark = ours, b"", secrets.token_hex(8)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-s", "-S", confined.__file__, str(self._megabytes)],
                    env=_KEPT | {MARK: mark},
                    cwd="/",
                    start_new_session=True,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            _GUARD.watch(self._process.pid, mark)
            reply = self._receive(_START)
            if "answer" not in reply:
                raise OSError(str(reply.get("error")))
            self._send(self._source, self._seconds)
        except (OSError, ValueError) as error:
            self._end()
            raise EngineUnavailable(
                f"worldmodel.kind=code: no process could be confined ({error}); seccomp and {self._megabytes} MB are "
                "needed, or another worldmodel.kind"
            ) from error

    def _send(self, message: object, seconds: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(seconds)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next line. It is JSON and never a pickle, whose reader would run what it says."""
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            part = self._socket.recv(1 << 16)
            if not part:
                raise OSError("it ended")
            self._read += part
            if len(self._read) > _BYTES:
                raise ValueError(f"more than {_BYTES:,} bytes")
        line, _, self._read = self._read.partition(b"\n")
        if self._read:
            raise ValueError("two answers to one call")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ValueError("no object")
        return reply

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()  # it could start no others
            _GUARD.forget(self._process.pid)
            self._process.wait()
        self._process, self._socket = None, None

    def close(self) -> None:
        """Ends the process; another call would start one again."""
        with self._one:
            self._end()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was refused before it had one
            self._end()


def _invalid(what: str) -> PredictionInvalid:
    """``what`` may hold any text of the function's, and comes into logs and prompts: one line, escaped."""
    return PredictionInvalid(f"the step function {ascii(what)[1:-1]}", InvalidReason.CODE)


def _outcome(reply: dict[str, Any]) -> tuple[str, float, bool]:
    if "error" in reply:
        raise _invalid(f"raised {str(reply['error'])[:400]}")
    answer = reply.get("answer")
    if not isinstance(answer, dict):
        raise _invalid(f"returned a {type(answer).__name__}, not a dict")
    text, reward, ended = (answer.get(key) for key in ("observation", "reward", "terminated"))
    try:
        if not isinstance(text, str) or isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ValueError
        text.encode()  # no halves of characters, which no file can hold
        if not isinstance(ended, bool) or not abs(float(reward)) < float("inf"):
            raise ValueError
    except (ValueError, OverflowError):
        raise _invalid(
            "returned no observation (text), reward (a finite number) and terminated (true or false): "
            f"{repr(answer)[:300]}"
        ) from None
    return text, float(reward), ended
