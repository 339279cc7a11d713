"""``imagine serve`` of a tiny fitted run, a process on a free port, as other people start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imagination.commands.fit_world_model import fit_world_model
from tests.support.tiny import tiny_settings, write_log

# What of ``tiny_settings`` a fitted world model needs to be told again.
AS_FITTED = ["worldmodel.context=256", "dream.max_tokens=96", "dream.max_turns=5", "vocab_size=512"]
AS_FITTED += ["dream.min_confidence=0", "dream.min_outcome_confidence=0"]


@dataclass(frozen=True)
class ServedRun:
    """
    Attributes:
        address: host and port.
        lines: what it printed until it answered.
        log: a file of what it says on standard error.
    """

    process: subprocess.Popen[str]
    address: str
    lines: list[str]
    log: Path


def fit_tiny_run(folder: Path, steps: int | None = None) -> None:
    """A log of the corridors and a world model of it in ``folder``.

    Args:
        steps: of the fit; more than the few of ``tiny_settings`` make dreams that are mostly right.
    """
    config = tiny_settings()
    config.fit.steps = steps or config.fit.steps
    write_log(folder)
    fit_world_model(config, folder)


@contextmanager
def imagine_serve(folder: Path, *words: str, seconds: float = 200.0) -> Iterator[ServedRun]:
    """
    Args:
        folder: of the run; what the server says goes into a file beside it.
        words: settings, as on the command line.
        seconds: after which the process is killed, whatever it does.
    """
    # a shell that has put the tests in the background has made all of them deaf to SIGINT
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script += "from imagination.cli import main; sys.exit(main())"
    command = ["-c", script, "serve", f"run={folder.name}"]
    log = folder.parent / f"{folder.name}-serve.log"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, *command, f"output={folder.parent}", "serve.port=0", *AS_FITTED, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "measured:" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], log.read_text(encoding="utf-8")[-3000:]
        found = re.search(r"http://([\w.]+:\d+);", lines[0])
        assert found, lines
        yield ServedRun(process, found[1], lines, log)
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
