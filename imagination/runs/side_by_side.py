"""Work on several runs at once: each in a process of its own, with its share of the cores.

More threads in one process help little: the models of the demo are small, and much of a stage is Python.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from imagination.runs.machine import cores
from imagination.runs.progress_bar import LINE
from imagination.settings import UserError
from real_envs.errors import hides_traceback
from real_envs.process_guard import end_with_parent

_LOOK = 0.5  # seconds between two looks at what the processes print
_GRACE = 15.0  # seconds that a process has to end by itself once it should


def side_by_side(
    work: Callable[..., Any], jobs: Mapping[str, tuple[Any, ...]], folder: Path, at_once: int = 0
) -> dict[str, Any]:
    """Results of ``work(*jobs[title])`` by title, in the order of ``jobs``, which is that of their start.

    One at a time happens here. More get processes of their own, in which ``work`` must be importable and whose results
    are pickled. What a process prints goes to ``<folder>/<title>.log`` and, without its progress bars, to standard
    output. A job that fails does not stop the others. Ctrl-C stops all, and they end if this process is killed.

    Args:
        at_once: how many; 0 for as many as there are cores, but one where there is a GPU, which they would share.

    Raises:
        UserError: ``at_once`` is negative, or a process ended without a result, such as for want of memory.
        Exception: the first that a job raised, after all others have ended.
    """
    if at_once < 0:
        raise UserError(f"jobs={at_once}: give how many runs to work on at once, or 0 for as many as there are cores")
    from torch import cuda  # here, as the processes that start with this module may not need it

    count = min(at_once or (1 if cuda.is_available() else cores()), len(jobs))
    if count <= 1:
        return {title: work(*arguments) for title, arguments in jobs.items()}
    folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, cores() // count)
    print(f"== {count} at once, threads each: {threads}; what they say: {folder}/*.log", flush=True)
    waiting, started = list(jobs.items()), list[_Job]()
    try:
        with _environment("OMP_NUM_THREADS", str(threads)), _display() as progress:  # read when a process loads torch
            while waiting or any(job.runs for job in started):
                while waiting and sum(job.runs for job in started) < count:
                    title, arguments = waiting.pop(0)
                    started.append(_Job(title, folder, partial(work, *arguments), progress))
                wait([job.process.sentinel for job in started if job.runs], _LOOK)
                for job in started:
                    job.look()
    finally:
        _end([job.process for job in started if job.process.is_alive()])
    for job in started:
        if job.error:
            raise job.error
    return {job.title: job.result for job in started}


class _Job:
    """One process, what it prints, and in the end its result or error."""

    def __init__(self, title: str, folder: Path, work: Callable[[], Any], progress: Progress) -> None:
        self.title, self.log = title, folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', title)}.log"
        self.result: Any = None
        self.error: Exception | None = None
        self.runs = True
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe(duplex=False)
        self.log.touch()
        self._printed, self._rest = self.log.open(newline="", errors="replace"), ""
        self._printed.seek(0, os.SEEK_END)
        self.process = context.Process(target=_child, args=(child_end, self.log, work))
        self.process.start()
        child_end.close()
        self._progress, self._task = progress, progress.add_task(title, total=None, last="")

    def look(self) -> None:
        """Passes on what was printed since, and takes the result of a process that has one."""
        if not self.runs:
            return
        over = not self.process.is_alive() or self._pipe.poll()
        self._pass_on()
        if over:
            try:
                self.result, self.error = self._pipe.recv()
            except EOFError:
                self.process.join()
                code = self.process.exitcode
                killed = ", as processes do that the system kills for want of memory; try jobs=1" if code == -9 else ""
                self.error = UserError(f"its process ended with exit code {code}{killed}; see {self.log}")
            self.process.join()  # it has nothing left to do, but for an end of its own workers
            self._pass_on()
            self._printed.close()
            self.runs = False
            self._print(f"failed: {self.error}; see {self.log}" if self.error else "done")
            self._progress.update(self._task, visible=False)

    def _pass_on(self) -> None:
        lines, self._rest, last = split_said(self._rest + self._printed.read())
        for line in lines:
            self._print(line)
        if last:
            self._progress.update(self._task, last=last)

    def _print(self, line: str) -> None:
        self._progress.console.print(f"{self.title}: {line}", markup=False, highlight=False, soft_wrap=True)


def split_said(text: str) -> tuple[list[str], str, str]:
    """Whole lines that are no progress bar's, what is left of an unfinished line, and what was said last.

    A bar writes lines of its own form, returns to the start of its line (``\\r``) or moves the cursor (an escape).
    """
    *lines, rest = text.split("\n")
    plain = [line for line in lines if line.strip() and not {"\r", "\x1b"} & set(line) and not LINE.match(line)]
    parts = [part.strip() for line in (*lines, rest) for part in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).split("\r")]
    last = next((part for part in reversed(parts) if part), "")
    if "\r" in rest:  # what stood there before is overwritten
        rest = "\r" + rest.rpartition("\r")[2]
    return plain, rest, last


def _child(pipe: Connection, log: Path, work: Callable[[], Any]) -> None:
    """What a process does; its result or error goes into ``pipe``, and all that it prints into ``log``."""
    end_with_parent()
    with log.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # or what is said would come when it is over
    try:
        pipe.send((work(), None))
    except Exception as error:
        if not hides_traceback(error):
            traceback.print_exc()
        pipe.send((None, error if _survives(error) else RuntimeError(f"{type(error).__name__}: {error}")))


def _survives(error: Exception) -> bool:
    """Whether an error can be told to another process; one with arguments of its own cannot always."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # whatever it is: the error is told in words instead
        return False


def _end(processes: list[SpawnProcess]) -> None:
    """Gives processes the time to end by themselves, as they do after the Ctrl-C that they also get, then ends them."""
    until = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.join()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable that is not set."""
    unset = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if unset:
            del os.environ[name]


def _display() -> Progress:
    """A line for each process with the last words of its progress bar, where there is a terminal."""
    console = Console()
    last = TextColumn("{task.fields[last]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    title = TextColumn("{task.description}", markup=False)
    return Progress(SpinnerColumn(), title, TimeElapsedColumn(), last, console=console, disable=not console.is_terminal)
