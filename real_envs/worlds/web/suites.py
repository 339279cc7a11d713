"""Any suite of BrowserGym as a world: WebArena, WorkArena, AssistantBench and their like.

``env=browsergym env.options.suite=webarena`` plays what ``browsergym.webarena`` registers, when its servers and the
variables that it reads are there (see the suite's own manual). A task is one of the suite's ids, or an id and a seed
where seeds matter (``env.options.seeds``). ``pip install 'imagination[browsergym]' browsergym-webarena``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.panels import Panel
from real_envs.screens import FOLDER
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.worlds.generated import GeneratedWorld, Progress, TaskRequest
from real_envs.worlds.web.browser import INVALID, LANGUAGE, BrowserGame, BrowserLook
from real_envs.worlds.web.chromium import find_chromium, load_suite

STEP_TIMEOUT, RESET_TIMEOUT = 60.0, 120.0  # seconds; a page from far away may take its time


@dataclass(frozen=True, slots=True)
class BrowserSettings:
    """Which environments of BrowserGym, and how the browser waits."""

    #: ``browsergym.<suite>`` registers them, such as ``webarena``, ``workarena`` or ``miniwob``
    suite: str = "webarena"
    #: a regular expression that their ids match from the beginning, without ``browsergym/``; empty takes all
    match: str = ""
    seeds: int = 1  #: seeds an id, for suites where they make different tasks; 1 takes each id once
    actions: str = "bid+nav+tab+chat+infeas"  #: BrowserGym's sets of actions with ``+`` between them
    delay: float = 0.5  #: seconds after an action before the page is read
    screenshots: bool = True  #: whether a PNG file is kept for each turn

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+", self.suite):
            raise ValueError(f"suite wants a name such as webarena, got {self.suite!r}")
        if self.seeds < 1 or self.delay < 0:
            raise ValueError("seeds must be at least 1 and delay at least 0")
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match is no regular expression: {error}") from error


class BrowserGym(GeneratedWorld):
    """``env=browsergym`` (a ``World``)."""

    name: ClassVar[str] = "browsergym"
    settings: ClassVar[type[BrowserSettings]] = BrowserSettings
    package: ClassVar[str] = "browsergym-core"
    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE
    step_timeout: ClassVar[float] = STEP_TIMEOUT
    reset_timeout: ClassVar[float] = RESET_TIMEOUT
    elsewhere: ClassVar[bool] = False  # a number that is right on one page is nothing on another

    def generate(
        self,
        folder: Path,
        counts: Mapping[str, int],
        seed: int,
        settings: BrowserSettings,
        progress: Progress,
        workers: int,
        panel: Panel | None = None,
    ) -> None:
        find_chromium()  # now, and not at the first reset
        super().generate(folder, counts, seed, settings, progress, workers, panel)

    def draw(self, settings: BrowserSettings, request: TaskRequest) -> dict[str, list[tuple[str, int]]]:
        """Deals the suite's ids to the splits. With seeds, all of an id are in the same split.

        Raises:
            UserError: there is no Chromium, no such suite, or it has not so many tasks.
        """
        counts, panel = request.counts, request.panel
        ids = [name for name in load_suite(settings.suite) if re.match(settings.match, name)]
        tasks = [(name, k) for name in ids for k in range(settings.seeds)]
        rng = random.Random(derive_seed(f"browsergym/{settings.suite}", request.seed))
        order = {name: rng.random() for name in ids}
        tasks.sort(key=lambda task: (order[task[0]], task[1]))
        splits: dict[str, list[tuple[str, int]]] = {}
        for split, count in counts.items():
            taken = {name for chosen in (*splits.values(), panel.tasks if panel else ()) for name, _ in chosen}
            left = [task for task in tasks if task[0] not in taken]
            if len(left) < count:
                raise UserError(
                    f"env.options.suite={settings.suite} match={settings.match!r} has {len(left)} tasks left for "
                    f"games.{split}={count}"
                )
            splits[split] = left[:count]
            request.progress(sum(map(len, splits.values())), sum(counts.values()))
        return splits

    def task(self, drawn: Sequence[Any], settings: Mapping[str, Any]) -> Task:
        return browser_task(drawn)

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[BrowserGame]:
        chosen = BrowserSettings(**settings)
        look = BrowserLook(chosen.suite, chosen.actions, chosen.delay)
        return partial(BrowserGame, look, None, pictures_of(folder) if chosen.screenshots else None, privileged)


def pictures_of(folder: Path) -> Path:
    return folder.resolve() / FOLDER


def browser_task(drawn: Sequence[Any]) -> Task:
    """Such as ``miniwob.click-tab/s7``."""
    name, seed = drawn
    return Task(f"{name}/s{seed}", {"id": str(name), "seed": str(seed)})
