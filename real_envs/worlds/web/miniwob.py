"""MiniWoB++: small web tasks in families, played by BrowserGym in the system's Chromium.

The pages (Shi et al. 2017; Liu et al., ICLR 2018, arXiv 1802.08802) come with the wheel ``miniwob`` and are opened from
the disk. A task is a family and a seed; held-out tasks are seeds, and starts, that are never logged.
``pip install 'imagination[miniwob]'`` and ``apt-get install chromium-headless-shell`` (or ``chromium``).

The text of a reset is the goal and then the page; a solved task earns 1. Beside BrowserGym's own way of playing, pages
show no animations and an action is followed by a shorter wait, so that a step takes a third of a second.

Experts have a rule a family, which looks at nothing but the goal and what the page shows now, so it also knows how to
go on after somebody's mistakes. It gives the calls that are left as far as the page tells them.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.worlds.generated import GeneratedWorld, TaskRequest
from real_envs.worlds.web.browser import INVALID, LANGUAGE, BrowserGame, BrowserLook
from real_envs.worlds.web.chromium import KeptBrowser, find_chromium, load_suite
from real_envs.worlds.web.page import Element
from real_envs.worlds.web.suites import RESET_TIMEOUT, browser_task, pictures_of

Rule = Callable[[str, Sequence[Element]], list[str]]


def plan(family: str, goal: str, page: Sequence[Element]) -> list[str]:
    """Calls that solve the page from here; none where the family has no rule, or the rule does not know what to do."""
    rule = RULES.get(family)
    return rule(goal, page) if rule else []


def _find(page: Sequence[Element], name: str, *roles: str) -> Element | None:
    """The first element with a number that has this name, and one of these roles if there are any."""
    return next((e for e in page if e.number is not None and e.name == name and (not roles or e.role in roles)), None)


def _of(page: Sequence[Element], *roles: str) -> list[Element]:
    return [e for e in page if e.number is not None and e.role in roles]


def _click(element: Element | None) -> list[str]:
    return [f"click('{element.number}')"] if element else []


def _fill(element: Element, text: str) -> list[str]:
    shown = element.value or ""
    hidden = set(shown) == {"•"} and len(shown) == len(text)  # a password
    return [] if shown == text or hidden else [f"fill('{element.number}', {text!r})"]


def _submit(page: Sequence[Element], *names: str) -> list[str]:
    return _click(next(filter(None, (_find(page, name) for name in names or ("Submit",))), None))


def _match(pattern: str, goal: str) -> tuple[str, ...]:
    match = re.search(pattern, goal)
    return tuple(match.groups()) if match else ("",) * re.compile(pattern).groups


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def _named(goal: str, page: Sequence[Element]) -> list[str]:
    return _click(_find(page, (_quoted(goal) or [""])[0]))


def _dialog(goal: str, page: Sequence[Element]) -> list[str]:
    label = (_quoted(goal) or [""])[0]
    return _click(_find(page, "Close" if label == "x" else label, "button"))


def _tab(goal: str, page: Sequence[Element]) -> list[str]:
    (name,) = _match(r"(Tab #\d+)", goal)
    return _click(_find(page, name, "tab"))


def _link_behind_tabs(goal: str, page: Sequence[Element]) -> list[str]:
    """Opens one tab, or section, after the other until the link is there."""
    link = _find(page, (_quoted(goal) or [""])[0], "clickable", "link")
    if link:
        return _click(link)
    tabs = _of(page, "tab")
    opened = next((k for k, tab in enumerate(tabs) if {"selected", "expanded"} & set(tab.states)), -1)
    return _click(tabs[(opened + 1) % len(tabs)]) if tabs else []


def _section(goal: str, page: Sequence[Element]) -> list[str]:
    opened = any("expanded" in e.states for e in _of(page, "tab"))
    return _submit(page) if opened else _click(next(iter(_of(page, "tab")), None))


def _wanted(goal: str) -> list[str]:
    (names,) = _match(r"Select (.*?)(?: from the (?:scroll )?list)? and click", goal)
    return [] if names == "nothing" else names.split(", ")


def _boxes(goal: str, page: Sequence[Element]) -> list[str]:
    wanted = set(_wanted(goal))
    wrong = [e for e in _of(page, "checkbox") if (e.name in wanted) != ("checked" in e.states)]
    return [*(call for e in wrong for call in _click(e)), *_submit(page)]


def _radio(goal: str, page: Sequence[Element]) -> list[str]:
    radio = next((_find(page, name, "radio") for name in _wanted(goal)), None)
    return [*([] if radio and "checked" in radio.states else _click(radio)), *_submit(page)]


def _choice(goal: str, page: Sequence[Element]) -> list[str]:
    return [*_chosen(page, (_wanted(goal) or [""])[0]), *_submit(page)]


def _chosen(page: Sequence[Element], name: str) -> list[str]:
    box = next(iter(_of(page, "combobox")), None)
    return [] if box is None or box.value == name else [f"select_option('{box.number}', {name!r})"]


def _choices(goal: str, page: Sequence[Element]) -> list[str]:
    box, wanted = next(iter(_of(page, "listbox")), None), _wanted(goal)
    selected = [e.name for e in _of(page, "option") if "selected" in e.states]
    chosen = [] if box is None or set(selected) == set(wanted) else [f"select_option('{box.number}', {wanted!r})"]
    return [*chosen, *_submit(page)]


def _typed(text: str, page: Sequence[Element], *buttons: str) -> list[str]:
    """The same text into all fields."""
    fields = _of(page, "textbox")
    return [*(call for field in fields for call in _fill(field, text)), *_submit(page, *buttons)] if text else []


def _text(goal: str, page: Sequence[Element]) -> list[str]:
    return _typed((_quoted(goal) or [""])[0], page)


def _letters(goal: str, page: Sequence[Element]) -> list[str]:
    return _typed("".join(e.name for e in page if e.role == "text"), page)


def _login(goal: str, page: Sequence[Element]) -> list[str]:
    fields = zip(_of(page, "textbox"), _quoted(goal), strict=False)
    return [*(call for field, text in fields for call in _fill(field, text)), *_submit(page, "Login")]


def _date(goal: str, page: Sequence[Element]) -> list[str]:
    month, day, year = _match(r"(\d+)/(\d+)/(\d+)", goal)
    return [*(call for field in _of(page, "Date") for call in _fill(field, f"{year}-{month}-{day}")), *_submit(page)]


def _time(goal: str, page: Sequence[Element]) -> list[str]:
    hour, minute, half = _match(r"(\d+):(\d+) ([AP])M", goal)
    at = f"{int(hour or 0) % 12 + 12 * (half == 'P'):02d}:{minute}"
    return [*(call for field in _of(page, "InputTime") for call in _fill(field, at)), *_submit(page)]


def _cell(goal: str, page: Sequence[Element]) -> list[str]:
    (key,) = _match(r"value of (.*) into", goal)
    at = next((k for k, e in enumerate(page[:-1]) if e.role == "text" and e.name == key), None)
    return _typed("" if at is None else page[at + 1].name, page)


def _word(goal: str, page: Sequence[Element]) -> list[str]:
    (number,) = _match(r"the (\d+)\w\w word", goal)
    words = " ".join(e.name for e in page if e.role == "text").split()
    return _typed(words[int(number) - 1].strip(".,") if number and len(words) >= int(number) else "", page)


def _sum(goal: str, page: Sequence[Element]) -> list[str]:
    a, sign, b = _match(r"(-?\d+) ([-+x]) (-?\d+)", " ".join(e.name for e in page if e.role == "text"))
    if not sign:
        return []
    x, y = int(a), int(b)
    return _typed(str(x + y if sign == "+" else x - y if sign == "-" else x * y), page)


def _form(goal: str, page: Sequence[Element]) -> list[str]:
    choice, button = _match(r'Choose (.*) from the dropdown, then click the button labeled "(.*)"', goal)
    return [*_chosen(page, choice), *_click(_find(page, button, "button"))]


def _film(goal: str, page: Sequence[Element]) -> list[str]:
    """Each field has its label before or after it."""
    wanted = _match(r"for (.*) movies directed by (.*) from year (\d+)", goal)
    texts = dict(zip(("genre", "director", "year"), wanted, strict=True))
    names = [e.name.lower().replace("date", "year") for e in page if e.role == "text"]
    labels = [kind for name in names for kind in texts if kind in name]
    filled = [_fill(e, texts[kind]) for e, kind in zip(_of(page, "textbox"), labels, strict=False)]
    return [*(call for calls in filled for call in calls), *_submit(page, "Search", "Submit", "Go!")]


def _contact(goal: str, page: Sequence[Element]) -> list[str]:
    name, what = _match(r"Find (\S+) in the contact book and click on their (.*)\.", goal)
    if not any(e.role == "text" and e.name == name for e in page):
        return _click(_find(page, ">", "link"))
    label = {"phone number": "Phone:", "email": "Email:", "address": "Address:"}.get(what, "")
    at = next((k for k, e in enumerate(page) if e.name == label), len(page))
    return _click(next(iter(_of(page[at:], "link")), None))


def _focus(goal: str, page: Sequence[Element]) -> list[str]:
    number, fields = int(_match(r"the (\d+)", goal)[0] or 0), _of(page, "textbox")
    return _click(fields[number - 1]) if 0 < number <= len(fields) else []


RULES: dict[str, Rule] = {
    "choose-list": _choice,
    "click-button": _named,
    "click-checkboxes": _boxes,
    "click-checkboxes-large": _boxes,
    "click-checkboxes-transfer": _boxes,
    "click-collapsible-2-nodelay": _link_behind_tabs,
    "click-collapsible-nodelay": _section,
    "click-dialog-2": _dialog,
    "click-link": _named,
    "click-option": _radio,
    "click-scroll-list": _choices,
    "click-tab": _tab,
    "click-tab-2": _link_behind_tabs,
    "click-tab-2-medium": _link_behind_tabs,
    "enter-date": _date,
    "enter-password": _text,
    "enter-text": _text,
    "enter-time": _time,
    "find-word": _word,
    "focus-text-2": _focus,
    "form-sequence-3": _form,
    "login-user": _login,
    "multi-layouts": _film,
    "phone-book": _contact,
    "read-table": _cell,
    "simple-arithmetic": _sum,
    "text-transform": _letters,
    "unicode-test": _named,
}


# Each has a rule, hundreds of different starts, and pages that tell all that matters.
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
    package: ClassVar[str] = "miniwob"
    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE
    step_timeout: ClassVar[float] = 20.0
    reset_timeout: ClassVar[float] = RESET_TIMEOUT
    elsewhere: ClassVar[bool] = False  # see ``BrowserGym``

    def __init__(self) -> None:
        set_address()

    def draw(self, settings: MiniwobSettings, request: TaskRequest) -> dict[str, list[tuple[str, int]]]:
        """Draws seeds for the families in turn, until enough of them start differently from all others.

        Raises:
            UserError: there is no Chromium, a family is unknown, or it has not so many different starts.
        """
        with ThreadPoolExecutor(1) as thread:  # Playwright shares a thread with no event loop, such as a notebook's
            return thread.submit(_draw, settings.families.split(), request).result()

    def task(self, drawn: Sequence[Any], settings: Mapping[str, Any]) -> Task:
        return browser_task(drawn)

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[BrowserGame]:
        return partial(make_game, MiniwobSettings(**settings), pictures_of(folder), privileged)


def make_game(settings: MiniwobSettings, screens: Path, privileged: bool) -> BrowserGame:
    local = os.environ.get("MINIWOB_URL", "file:").startswith("file:")
    look = BrowserLook("miniwob", "bid", settings.delay, _TIMEOUT, False, _ZOOMED, still=True, offline=local)
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


def _draw(families: Sequence[str], request: TaskRequest) -> dict[str, list[tuple[str, int]]]:
    executable = find_chromium()
    known = load_suite("miniwob")
    if unknown := [family for family in families if f"miniwob.{family}" not in known]:
        raise UserError(
            f"env.options.families: MiniWoB++ has no '{unknown[0]}'; with experts there are {', '.join(sorted(RULES))}"
        )
    kept = KeptBrowser(executable)
    try:
        context = kept.launch(headless=True).new_context()
        starts = {family: _Starts(family, request.seed, context.new_page()) for family in families}
        for name, number in request.panel.tasks if request.panel else ():
            if (family := name.removeprefix("miniwob.")) in starts:
                starts[family].is_new(number)
        splits: dict[str, list[tuple[str, int]]] = {}
        for split, count in request.counts.items():
            splits[split] = []
            for k in range(count):
                family = families[k % len(families)]
                splits[split].append((f"miniwob.{family}", starts[family].another()))
                request.progress(sum(map(len, splits.values())), sum(request.counts.values()))
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

    def is_new(self, number: int) -> bool:
        """Whether no seed before has started so; it is known from now on."""
        goal, _ = self._task(seed=number).setup(self._page)
        start = f"{goal}|{self._page.evaluate(_SHOWN)}"
        known = start in self._known
        self._known.add(start)
        return not known

    def another(self) -> int:
        """Raises ``UserError`` where the family has no more starts."""
        for _ in range(_TRIES):
            number = self._rng.randrange(2**31)
            if self.is_new(number):
                return number
        raise UserError(
            f"MiniWoB++'s {self._family} has hardly more than {len(self._known)} different starts: lower games.train "
            "and games.heldout, or leave it out of env.options.families"
        )
