"""Stages of ``imagine`` under a fault of the disk or the clock, each in a process of its own that is forked from one
which has imported everything: a stage that takes a second does not take ten.

``python -m tests.chaos.faulty`` is that process. It reads jobs as lines of JSON and answers each with its exit code.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("faults.c")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """
    Attributes:
        code: exit code; ``-9`` where it was killed.
        changes: of files below the run's folder; of a full disk, writes alone.
    """

    code: int
    err: str
    changes: int

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


class Faulty:
    """Runs stages, one after the other."""

    def __init__(self, scratch: Path) -> None:
        library = scratch / "faults.so"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
        self._scratch = scratch
        variables = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.faulty"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **variables}, cwd=scratch,
        )  # fmt: skip

    def run(self, words: list[str], folder: Path, mode: str = "count", at: int = 0) -> Done:
        """
        Args:
            words: as after ``imagine``.
            folder: below which faults happen.
            mode: ``full``, ``kill`` or ``clock``, see ``faults.c``; anything else only counts.
            at: the number of the write or change from which on it happens, from 1 on.
        """
        counter, err = self._scratch / "count", self._scratch / "err"
        counter.write_bytes(bytes(8))
        job = {
            "words": words,
            "err": str(err),
            "env": {"FAULT_MODE": mode, "FAULT_AT": str(at), "FAULT_FOLDER": str(folder), "FAULT_COUNT": str(counter)},
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        (changes,) = struct.unpack("q", counter.read_bytes())
        return Done(code, err.read_text(errors="replace"), changes)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def faulty(scratch: Path) -> Iterator[Faulty]:
    runner = Faulty(scratch)
    try:
        yield runner
    finally:
        runner.close()


def can_inject() -> bool:
    return sys.platform == "linux" and shutil.which("gcc") is not None


def _stage(job: dict[str, Any]) -> int:
    """In the forked process."""
    os.setsid()
    out = os.open(job["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.update(job["env"])
    if job["env"]["FAULT_MODE"] == "kill":  # the run itself, not a worker, which only breaks an episode
        ctypes.CDLL(None).fault_arm()
        del os.environ["FAULT_MODE"]
    else:
        ctypes.CDLL(None).fault_arm()
    from imagination.cli import main

    try:
        return main(job["words"])
    except BaseException:
        traceback.print_exc()
        return 1


def _serve() -> None:
    import lightning  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import textworld  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    from imagination.commands import clone, collect, evaluate, fit_world_model, report, train  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        if not (child := os.fork()):
            code = _stage(job)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
