"""A web page in a browser as a game of text: BrowserGym plays it, ``real_envs.worlds.web.page`` tells it.

Which pages there are is a world's business: ``real_envs.worlds.web.suites`` and ``real_envs.worlds.web.miniwob``.

The text of a reset is the goal and then the page. A reward is BrowserGym's; a solved task earns 1.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_envs.env import StepResult, Task
from real_envs.screens import AFTER, BEFORE, Place, keep
from real_envs.scripted_agents import CommandGrammar
from real_envs.worlds.generated import Game, hints
from real_envs.worlds.web.chromium import KeptBrowser, find_chromium, load_suite
from real_envs.worlds.web.page import REFUSALS, ActionError, Element, Numbers, page_text, parse_action, read_page

INVALID = "Error: (?:" + "|".join(REFUSALS) + ")"
_LONGEST_WAIT = 1000.0  # ms of a noop
_FORBIDDEN = frozenset({"upload_file", "mouse_upload_file"})  # they read files of whoever trains
_BID = re.compile(r"[\"']?\bbid\b[\"']? *[:=]? *[\"']?\w+[\"']?")
_PREFIX = re.compile(r"(?:(?:Locator|Page|Keyboard|Mouse)\.\w+: |Error: )+")

LANGUAGE = CommandGrammar.of(
    "10 click('{a}') | 2 fill('{a}', 'yes') | 0.5 dblclick('{a}') | 0.5 hover('{a}') | 0.5 focus('{a}') | "
    "1 clear('{a}') | 1 press('{a}', 'Enter') | 1 select_option('{a}', 'yes') | 0.5 scroll(0, 200) | "
    "0.3 noop(0) | 0.5 click({a}) | 0.5 click '{a}' | 0.5 type('{a}', 'yes') | 0.5 submit()",
    directions=(),
    look="noop(0)",
)

Plan = Callable[[Task, str, Sequence[Element]], Sequence[str]]  # task, goal, page: what is left to do


@dataclass(frozen=True, slots=True)
class BrowserLook:
    """How a worker's browser plays, for ``BrowserGame``."""

    suite: str  # ``browsergym.<suite>`` registers the pages
    actions: str  # BrowserGym's sets of actions with ``+`` between them
    delay: float  # seconds after an action before the page is read
    timeout: int | None = None  # ms that an action may wait for its element; ``None`` leaves it to the task
    where: bool = True  # whether a page's text begins with its title and address
    crop: tuple[int, int] | None = None  # width and height of what is kept of a screenshot, in its pixels
    still: bool = False  # without animations
    offline: bool = False  # whether pages reach this machine alone


class BrowserGame(Game):
    """An episode in a browser.

    Args:
        plan: what an expert would do, for ``policy_commands``; ``None`` where nobody knows.
        screens: the folder for PNG files; ``None`` keeps none.
    """

    def __init__(self, look: BrowserLook, plan: Plan | None, screens: Path | None, privileged: bool) -> None:
        super().__init__(privileged)
        self._look, self._plan, self._screens = look, plan, screens
        self._task = Task("")
        self._goal, self._address = "", ""
        self._screen, self._first = "", False  # the last picture, and whether no turn has been played yet
        self._numbers, self._elements = Numbers(), list[Element]()
        self._boxes: dict[str, Place] = {}  # of the elements in sight, by BrowserGym's ids
        self._head = ""
        self._browser: KeptBrowser | None = None
        self._calls: dict[str, tuple[int, ...]] = {}

    def _start(self, task: Task) -> str:
        """Raises ``UserError`` where the browser does not start."""
        super().close()  # the episode before; the browser stays
        if self._browser is None:
            self._browser = KeptBrowser(find_chromium(), self._look.still, self._look.offline)
            load_suite(self._look.suite)
            importlib.import_module("browsergym.core")._set_global_playwright(self._browser)
        import gymnasium
        from browsergym.core.action.highlevel import HighLevelActionSet

        actions = HighLevelActionSet(subsets=self._look.actions.split("+"), multiaction=False, strict=False)
        self._calls = _calls(actions)
        self._simulator = gymnasium.make(
            f"browsergym/{task.spec['id']}",
            action_mapping=actions.to_python_code,
            pre_observation_delay=self._look.delay,
            slow_mo=0,
            disable_env_checker=True,
        ).unwrapped
        seen, _ = self._simulator.reset(seed=int(task.spec["seed"]))
        if self._look.timeout is not None:  # from here on: what a page takes to open says nothing about an action
            self._simulator.context.set_default_timeout(self._look.timeout)
        self._task, self._goal = task, " ".join(str(seen["goal"]).split())
        self._address = ""
        self._read(seen)
        self._shoot(seen)
        self._first = True
        return self._text(f"Goal: {self._goal}")

    def _act(self, action: str) -> StepResult:
        try:
            here = {element.number for element in self._elements if element.number is not None}
            call = parse_action(action, self._numbers, here, self._calls, _LONGEST_WAIT)
        except ActionError as error:
            return StepResult(self._observation(self._text(f"Error: {error}")), 0.0, False, False, self._info())
        before, place = self._screen, self._place(call)
        seen, reward, terminated, truncated, _ = self._simulator.step(call)
        self._read(seen)
        wrong = _short(str(seen["last_action_error"]))
        observation = self._observation(self._text(f"Error: {wrong}" if wrong else ""))
        self._shoot(seen)
        return StepResult(
            observation, float(reward), bool(terminated), bool(truncated and not terminated), self._info(before, place)
        )

    def close(self) -> None:
        super().close()
        if self._browser is not None:
            self._browser.end()
            self._browser = None

    def _read(self, seen: Mapping[str, Any]) -> None:
        address = f"{seen['url'].partition('#')[0]} {seen['active_page_index'][0]}"
        if address != self._address:  # another document, whose elements have BrowserGym's ids anew
            self._address, self._numbers = address, Numbers()
        properties = seen["extra_element_properties"]
        self._elements = read_page(seen["axtree_object"], properties, self._numbers)
        self._boxes = {bid: Place(*found["bbox"]) for bid, found in properties.items() if found["bbox"]}
        if self._look.where:
            title = seen["open_pages_titles"][int(seen["active_page_index"][0])]
            self._head = f"Page: {title} ({seen['url']})"

    def _text(self, first: str) -> str:
        return "\n".join(part for part in (first, self._head, page_text(self._elements)) if part)

    def _hints(self) -> dict[str, object]:
        plan = self._plan(self._task, self._goal, self._elements) if self._plan else ()
        numbers = (str(e.number) for e in self._elements if e.number is not None)
        return hints(admissible(self._elements, self._goal), plan, entities=numbers)

    def _shoot(self, seen: Mapping[str, Any]) -> None:
        if self._screens is not None:
            pixels = seen["screenshot"]
            width, height = self._look.crop or (pixels.shape[1], pixels.shape[0])
            self._screen = keep(pixels[:height, :width].copy(), self._screens)

    def _place(self, call: str) -> Place | None:
        """Where the element was that a call of BrowserGym's names first, in the picture before the call."""
        parsed = ast.parse(call, mode="eval").body
        assert isinstance(parsed, ast.Call)
        assert isinstance(parsed.func, ast.Name)
        place = next(iter(self._calls[parsed.func.id]), None)
        if place is None or place >= len(parsed.args):
            return None
        return self._boxes.get(str(ast.literal_eval(parsed.args[place])))

    def _info(self, before: str | None = None, place: Place | None = None) -> dict[str, float | str | bool]:
        """The turn's picture, and where its action went; the first turn also tells the picture of the start."""
        if self._screens is None:
            return {}
        info: dict[str, float | str | bool] = {AFTER: self._screen, **(place.info if place else {})}
        if self._first:
            info[BEFORE] = self._screen if before is None else before
        self._first = False
        return info


def admissible(elements: Sequence[Element], goal: str) -> list[str]:
    """Calls that the page takes: clicks, choices, and texts of the goal for fields."""
    words = re.findall(r'"([^"]+)"', goal) or [word.strip(".,!?") for word in goal.split()[-4:]]
    calls: list[str] = []
    menu: int | None = None  # whose options follow; those of a list can be clicked as well
    for element in elements:
        if element.number is None:
            continue
        if element.role == "option" and menu is not None:
            calls.append(f"select_option('{menu}', {element.name!r})")
            continue
        menu = element.number if element.role == "combobox" else None
        if element.role in ("textbox", "searchbox"):
            calls += [f"fill('{element.number}', {word!r})" for word in dict.fromkeys(words)]
        if "disabled" not in element.states:
            calls.append(f"click('{element.number}')")
    return calls or [LANGUAGE.look]


def _calls(actions: Any) -> dict[str, tuple[int, ...]]:
    """The calls of a set of actions, each with the places of its arguments that name elements."""
    from browsergym.core.action import functions

    arguments_of = {}
    for name in actions.action_set:
        if name not in _FORBIDDEN:
            parameters = inspect.signature(getattr(functions, name)).parameters
            arguments_of[name] = tuple(k for k, argument in enumerate(parameters) if argument.endswith("bid"))
    return arguments_of


def _short(error: str) -> str:
    """What went wrong, in a few words that are the same in every episode."""
    if not error:
        return ""
    kind, _, detail = error.partition(": ")
    if kind == "TimeoutError":
        return "the element cannot be acted on"
    if kind in ("TypeError", "NameError", "SyntaxError"):
        return "the action has other arguments"
    line = next((line.strip() for line in detail.splitlines() if line.strip()), kind)
    return _BID.sub("the element", _PREFIX.sub("", line))[:120]
