"""The process in which a step function runs: it may compute, and read and write the one socket to its parent.

This file runs as a script, before which nothing of ours is imported. The limits are the kernel's, not Python's, because
no Python code can be kept from reaching the interpreter's insides: a filter of system calls (seccomp) that lets through
memory, clocks, random bytes and the descriptors that are open already. Files, sockets, processes and signals are none
of these. Linux only; the parent refuses elsewhere (``worker.py``).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import random
import struct
import sys
import types
from typing import Any

# What a step function may import: nothing can be opened later.
MODULES = (
    *("bisect", "collections", "copy", "dataclasses", "enum", "functools", "heapq", "itertools", "json", "math"),
    *("operator", "random", "re", "string", "textwrap", "typing"),
)
# By machine: the kernel's name for it, and the numbers of read, write, mmap, mprotect, munmap, brk, rt_sigaction,
# rt_sigprocmask, rt_sigreturn, mremap, madvise, getpid, exit, gettimeofday, futex, clock_gettime, exit_group and
# getrandom.
CALLS = {
    "x86_64": (0xC000003E, (0, 1, 9, 10, 11, 12, 13, 14, 15, 25, 28, 39, 60, 96, 202, 228, 231, 318)),
    "aarch64": (0xC00000B7, (63, 64, 222, 226, 215, 214, 134, 135, 139, 216, 233, 172, 93, 169, 98, 113, 94, 278)),
}
_SOCKET = 0  # the descriptor; 1 and 2 are /dev/null
_LONGEST = 200  # characters of an error
_CPU = 3600  # seconds of a process, for one that goes on between calls, where nobody waits for it
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of BPF
_KILL, _DENY, _ALLOW = 0x80000000, 0x00050001, 0x7FFF0000  # end the process; EPERM; let through


def confine(megabytes: int) -> None:
    """Gives up for good what a step function does not need. Raises ``OSError``: the kernel will not."""
    import resource  # not on Windows, where ``MODULES`` are read

    limits = {resource.RLIMIT_AS: megabytes << 20, resource.RLIMIT_CPU: _CPU}
    for limit, most in (limits | {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}).items():
        resource.setrlimit(limit, (most, most))
    machine, allowed = CALLS[platform.machine()]
    steps = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    steps += [(_IF_EQUAL, len(allowed) - k, 0, call) for k, call in enumerate(allowed)]
    steps += [(_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0)):
        if libc.prctl(*map(ctypes.c_ulong, words)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def answer(code: types.CodeType, request: dict[str, Any]) -> str:
    """What the step function returns, or its error, as JSON. Each call starts anew, and none leans on another."""
    world = types.ModuleType("world")
    sys.modules["world"] = world  # dataclasses look there
    random.seed(0)
    try:
        exec(code, world.__dict__)
        return json.dumps({"answer": world.step(request["start"], request["history"], request["action"])})
    except BaseException as error:  # its sys.exit, too
        trace, line = error.__traceback__, 0
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == code.co_filename else line
            trace = trace.tb_next
        return json.dumps({"error": f"{type(error).__name__}: {str(error)[:_LONGEST]} (line {line})"})


def _send(text: str) -> None:
    data = text.encode() + b"\n"
    while data:
        data = data[os.write(_SOCKET, data) :]


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    requests = os.fdopen(_SOCKET, "rb", closefd=False)
    try:
        confine(int(sys.argv[1]))
    except OSError as error:
        _send(json.dumps({"error": str(error)}))
        return
    _send(json.dumps({"answer": "ready"}))
    source = json.loads(requests.readline())
    code: types.CodeType | str = ""
    for line in requests:
        try:
            code = code or compile(source, "world.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            _send(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            continue
        assert isinstance(code, types.CodeType)
        _send(answer(code, json.loads(line)))


if __name__ == "__main__":
    main()
