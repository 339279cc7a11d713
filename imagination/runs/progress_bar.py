"""The one progress bar of all stages: a line on standard error that says how far, how fast, and how long yet.

Example of the line::

    train                     5/24  21% ██         2:41, 10:13 left, 47 turns/s, dream_success 0.42

A terminal and a notebook show it in place; a file gets a line every half minute and one at the end.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

IN_FILE, IN_NOTEBOOK = 30.0, 1.0  # seconds between two lines
PER_SECOND = 2  # redraws in a terminal
LINE = re.compile(r"\S.* \d+/\d+ +\d+% ")  # how a line of a bar is told from what else a log file holds


class Bar:
    """How far a stage is; ``unit`` is what ``count`` counts, such as turns, and ``every`` seconds between two lines."""

    def __init__(
        self, what: str, total: int, unit: str = "", every: float = IN_FILE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self._every, self._clock = every, clock
        self._done = self._first = self._counted = 0
        self._within = 0.0
        self._begin = clock()
        self._notes: Mapping[str, float] = {}
        self._over = threading.Event()
        self._ticker: threading.Thread | None = None
        self._live: Live | None = None

    def start(self, done: int = 0) -> None:
        """Shows the bar; ``done`` steps were done by an earlier process and say nothing of the speed of this one."""
        self._done = self._first = done
        self._begin = self._clock()
        if sys.stderr.isatty():
            self._live = Live(
                get_renderable=lambda: Text(self.line(blocks=True), no_wrap=True, overflow="ellipsis"),
                console=Console(file=sys.stderr),
                refresh_per_second=PER_SECOND,
            )
            self._live.start()
        else:
            self._over.clear()
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def stop(self) -> None:
        """Shows the last state and leaves it there."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._ticker is not None:
            self._over.set()
            self._ticker.join()
            self._ticker = None
            self._write("\n")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def advance(self, done: int, notes: Mapping[str, float] | None = None) -> None:
        """``done`` steps are done by now; ``notes`` are the numbers to show behind, such as the loss."""
        self._done, self._within = done, 0.0
        self._notes = notes or self._notes

    def step(self, *_: object) -> None:
        """One more step is done."""
        self.advance(self._done + 1)

    def within(self, share: float) -> None:
        """``share`` of the step after those that are done is done, too; for steps that take long."""
        self._within = share if self._done < self.total else 0.0

    def count(self, amount: int = 1) -> None:
        """So many more tokens or turns are done."""
        self._counted += amount

    def line(self, blocks: bool = False) -> str:
        """The bar as one line of text; ``blocks`` draws it, too."""
        done = self._done + self._within
        seconds, new = self._clock() - self._begin, done - self._first
        share = done / self.total if self.total else 1.0
        drawn = f"{'█' * int(10 * share):<10} " if blocks else ""
        parts = [_minutes(seconds)]
        if new and done < self.total:
            parts.append(f"{_minutes(seconds / new * (self.total - done))} left")
        if self._counted and seconds > 0:
            rate = self._counted / seconds
            parts.append(f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.1f} {self.unit}/s")
        parts += [f"{name} {value:.3g}" for name, value in self._notes.items()]
        counter = f"{self._done}/{self.total}"
        return f"{self.what:<20} {counter:>9} {share:4.0%} {drawn}{', '.join(parts)}"

    def _tick(self) -> None:
        notebook = _in_notebook()
        while not self._over.wait(IN_NOTEBOOK if notebook else self._every):
            self._write("\r" if notebook else "\n")

    def _write(self, end: str) -> None:
        width = 100 if _in_notebook() else 0  # to cover what stood there
        print(f"{self.line():<{width}}", end=end, file=sys.stderr, flush=True)


def _in_notebook() -> bool:
    return type(sys.stderr).__module__.startswith("ipykernel")


def _minutes(seconds: float) -> str:
    """``2:05``, or ``1:02:05`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
