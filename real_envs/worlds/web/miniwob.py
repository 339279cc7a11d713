"""MiniWoB++: small web tasks in families, played by BrowserGym in the system's Chromium.

The pages (Shi et al. 2017; Liu et al., ICLR 2018, arXiv 1802.08802) come with the wheel ``miniwob`` and are opened from
the disk. A task is a family and a seed; held-out tasks are seeds, and starts, that are never logged.
``pip install 'imagination[miniwob]'`` and ``apt-get install chromium-headless-shell`` (or ``chromium``).

The text of a reset is the goal and then the page; a solved task earns 1. Beside BrowserGym's own way of playing, pages
show no animations and an action is followed by a shorter wait, so that a step takes a third of a second.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.worlds.generated import GeneratedWorld, Progress
from real_envs.worlds.web.browser import INVALID, LANGUAGE, BrowserGame, BrowserLook
from real_envs.worlds.web.chromium import KeptBrowser, find_chromium, load_suite
from real_envs.worlds.web.miniwob_experts import RULES, plan
from real_envs.worlds.web.page import Element
from real_envs.worlds.web.suites import RESET_TIMEOUT, browser_task, pictures_of

# Each has a rule in ``miniwob_experts``, hundreds of different starts, and pages that tell all that matters.
FAMILIES = (
    "choose-list click-button click-checkboxes click-checkboxes-transfer click-collapsible-nodelay click-dialog-2 "
    "click-link click-option click-scroll-list click-tab click-tab-2-medium enter-date enter-password enter-text "
    "enter-time find-word login-user multi-layouts read-table simple-arithmetic unicode-test"
)
_TRIES = 20  # seeds drawn for each task, before a family is said to have no more that differ
_SHOWN = (  # what tells two starts apart
    "() => document.body.innerText + '|' + "
    "[...document.querySelectorAll('input, textarea, select')].map(e => e.type + e.value + e.checked).join('|')"
)
_ZOOMED = (240, 315)  # pixels of a screenshot in which the task is: 160 x 210 by 1.5
_TIMEOUT = 2000  # ms; no element of these pages comes later


@dataclass(frozen=True, slots=True)
class MiniwobSettings:
    """Which families, and how the browser waits."""

    #: names with spaces between them; any of MiniWoB++ can be played, those of ``RULES`` have experts
    families: str = FAMILIES
    delay: float = 0.1  #: seconds after an action before the page is read
    screenshots: bool = True  #: whether a PNG file is kept for each turn

    def __post_init__(self) -> None:
        if not self.families.split():
            raise ValueError("families must not be empty")
        if self.delay < 0:
            raise ValueError("delay must be at least 0")


class Miniwob(GeneratedWorld):
    """``env=miniwob`` (a ``World``)."""

    name: ClassVar[str] = "miniwob"
    settings: ClassVar[type[MiniwobSettings]] = MiniwobSettings
    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE
    step_timeout: ClassVar[float] = 20.0
    reset_timeout: ClassVar[float] = RESET_TIMEOUT
    elsewhere: ClassVar[bool] = False  # see ``BrowserGym``

    def __init__(self) -> None:
        set_address()

    def draw(
        self, settings: MiniwobSettings, counts: Mapping[str, int], seed: int, progress: Progress
    ) -> dict[str, list[tuple[str, int]]]:
        """Draws seeds for the families in turn, until enough of them start differently from all others.

        Raises:
            UserError: there is no Chromium, a family is unknown, or it has not so many different starts.
        """
        with ThreadPoolExecutor(1) as thread:  # Playwright shares a thread with no event loop, such as a notebook's
            return thread.submit(_draw, settings.families.split(), counts, seed, progress).result()

    def task(self, drawn: Sequence[Any], settings: Mapping[str, Any]) -> Task:
        return browser_task(drawn)

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[BrowserGame]:
        return partial(make_game, MiniwobSettings(**settings), pictures_of(folder), privileged)


def make_game(settings: MiniwobSettings, screens: Path, privileged: bool = False) -> BrowserGame:
    look = BrowserLook("miniwob", "bid", settings.delay, _TIMEOUT, where=False, crop=_ZOOMED, still=True)
    return BrowserGame(look, _plan, screens if settings.screenshots else None, privileged)


def set_address() -> None:
    """Tells BrowserGym where the pages are, unless ``MINIWOB_URL`` does; raises ``ImportError``."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or spec.origin is None or importlib.util.find_spec("browsergym") is None:
        missing = "browsergym" if spec else "miniwob"
        raise ImportError(f"No module named '{missing}'; run `pip install 'imagination[miniwob]'`")
    os.environ.setdefault("MINIWOB_URL", f"file://{Path(spec.origin).parent}/html/miniwob/")


def _plan(task: Task, goal: str, page: Sequence[Element]) -> list[str]:
    return plan(task.spec["id"].partition(".")[2], goal, page)


def _draw(
    families: Sequence[str], counts: Mapping[str, int], seed: int, progress: Progress
) -> dict[str, list[tuple[str, int]]]:
    executable = find_chromium()
    known = load_suite("miniwob")
    if unknown := [family for family in families if f"miniwob.{family}" not in known]:
        raise UserError(
            f"env.options.families: MiniWoB++ has no '{unknown[0]}'; with experts there are {', '.join(sorted(RULES))}"
        )
    kept = KeptBrowser(executable)
    try:
        context = kept.launch(headless=True).new_context()
        starts = {family: _Starts(family, seed, context.new_page()) for family in families}
        splits: dict[str, list[tuple[str, int]]] = {}
        for split, count in counts.items():
            splits[split] = []
            for k in range(count):
                family = families[k % len(families)]
                splits[split].append((f"miniwob.{family}", starts[family].another()))
                progress(sum(map(len, splits.values())), sum(counts.values()))
    finally:
        kept.end()
    return splits


class _Starts:
    """Seeds of a family whose pages differ from each other; opens them without BrowserGym's ceremony."""

    def __init__(self, family: str, seed: int, page: Any) -> None:
        tasks = importlib.import_module("browsergym.miniwob").ALL_MINIWOB_TASKS
        self._family, self._page = family, page
        self._task = next(task for task in tasks if task.subdomain == family)
        self._rng = random.Random(derive_seed(f"miniwob/{family}", seed))
        self._known: set[str] = set()

    def another(self) -> int:
        """Raises ``UserError`` where the family has no more starts."""
        for _ in range(_TRIES):
            number = self._rng.randrange(2**31)
            goal, _ = self._task(seed=number).setup(self._page)
            start = f"{goal}|{self._page.evaluate(_SHOWN)}"
            if start not in self._known:
                self._known.add(start)
                return number
        raise UserError(
            f"MiniWoB++'s {self._family} has hardly more than {len(self._known)} different starts: lower games.train "
            "and games.heldout, or leave it out of env.options.families"
        )
