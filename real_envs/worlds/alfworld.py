"""ALFWorld: household tasks in text, played from the benchmark's own files by TextWorld's PDDL engine.

The games (Shridhar et al. 2021, arXiv 2010.03768) are the files ``game.tw-pddl`` that ``alfworld-download`` fetches,
in one folder a split. Things have coordinates for names there (``desk_bar__plus_02_...``); here, as in ALFWorld, they
are numbered by kind (``desk 1``), in the order of those coordinates. ``pip install 'imagination[alfworld]'``.

The text of a reset is the room and then the task. A solved task earns 1; there are no partial rewards.
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from real_envs.env import Agent, EnvFailure, StepResult, Task
from real_envs.errors import UserError
from real_envs.grouping import grouped
from real_envs.scripted_agents import CommandGrammar, expert, noisy
from real_envs.seeding import derive_seed
from real_envs.worlds.alfworld_plans import SPOT, AlfworldGoal, Facts, count_places, read_goal, search
from real_envs.worlds.alfworld_variations import NoVariation, vary
from real_envs.worlds.generated import Game, GeneratedWorld, TaskRequest, draw_distinct, hints, in_worker

GAME = "game.tw-pddl"
INVALID = r"Nothing happens\."
_RAW = re.compile(r"[A-Za-z]+_bar_\w+")  # desk_bar__plus_02_dot_32_bar_...: a kind and where it stands
_ARRIVAL = re.compile(r"You arrive at \S+\. ")
_IN = re.compile(r"\((inReceptacle|objectAtLocation) (\S+) (\S+)\)")
_PLACE, _OPENABLE, _OPENED = (re.compile(rf"\({kind} (\S+?)[ )]") for kind in ("receptacleType", "openable", "opened"))
_AT = re.compile(r"\(receptacleAtLocation (\S+) (\S+?)\)")
_NUMBERED = re.compile(r"[a-z]+ \d+")
_TRANSLATIONS = 512  # of a tenth of a megabyte

LANGUAGE = CommandGrammar.of(
    "8 go to {a} | 5 take {a} from {b} | 5 put {a} in/on {b} | 3 open {a} | 1 close {a} | 1 use {a} | "
    "1 examine {a} | 1 heat {a} with {b} | 1 cool {a} with {b} | 1 clean {a} with {b} | "
    "0.5 slice {a} with {b} | 0.5 inventory | 0.3 look | 0.5 move {a} to {b} | 0.5 put {a} in {b} | "
    "0.5 take {a}"
)


@dataclass(frozen=True, slots=True)
class AlfworldSettings:
    """Where the games are, and which of them train and judge."""

    data: str = ""  #: the folder with a folder for each split; empty takes ``$ALFWORLD_DATA/json_2.1.1``
    train: str = "train"  #: splits that are logged and dreamed in, with ``+`` between them
    heldout: str = "valid_seen"  #: splits that judge
    kind: str = ""  #: only tasks whose folder begins so, such as ``pick_and_place_simple``; empty takes all six kinds
    variations: int = 0  #: of each training game, further ones: things elsewhere in the room, and another one to fetch

    def __post_init__(self) -> None:
        if both := set(self.train.split("+")) & set(self.heldout.split("+")):
            raise ValueError(f"train and heldout share the split {sorted(both)[0]}")

    @property
    def folder(self) -> Path:
        """Raises ``UserError`` where nobody said where the games are."""
        home = os.environ.get("ALFWORLD_DATA")
        if not self.data and not home:
            raise UserError(
                "where are the games of ALFWorld? Set env.options.data to the folder that holds `train` and "
                "`valid_seen`, or ALFWORLD_DATA as `alfworld-download` does (pip install alfworld)"
            )
        return Path(self.data).expanduser().resolve() if self.data else Path(str(home)) / "json_2.1.1"


class Names:
    """Numbers in place of coordinates, both ways, for the game of a ``pddl_problem``."""

    def __init__(self, problem: str) -> None:
        count: Counter[str] = Counter()
        self._plain: dict[str, str] = {}
        for raw in sorted({match.lower() for match in _RAW.findall(problem)}):
            kind = raw.partition("_bar_")[0]
            if kind != "loc":
                count[kind] += 1
                self._plain[raw] = f"{kind} {count[kind]}"
        self._raw = {plain: raw for raw, plain in self._plain.items()}

    def plain(self, text: str) -> str:
        return _RAW.sub(lambda match: self._plain.get(match[0].lower(), match[0]), text)

    def raw(self, command: str) -> str:
        return _NUMBERED.sub(lambda match: self._raw.get(match[0], match[0]), command)

    @property
    def things(self) -> list[str]:
        return sorted(self._raw)


class Translations:
    """In place of the translation of a game, which the engine asks for twice at every reset, a second or two: a game
    that was translated before is known. The second one is for its planner, which is not asked here, so it is the first.
    """

    def __init__(self, translate: Callable[..., tuple[Any, str]]) -> None:
        self._translate = translate
        self._known: dict[tuple[str, str], tuple[Any, bytes]] = {}

    def __call__(self, domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> tuple[Any, str]:
        key = domain, problem
        if key not in self._known:
            while len(self._known) >= _TRANSLATIONS:
                self._known.pop(next(iter(self._known)))  # the oldest
            task, text = self._translate(domain, problem, verbose=verbose)
            self._known[key] = task, zlib.compress(text.encode(), 1)
        task, packed = self._known[key]
        return task, zlib.decompress(packed).decode()


@lru_cache(maxsize=1)
def remember_work() -> None:
    """What the engine works out again and again, in this process only once: translations of games, and the parse of its
    few templates and conditions, which it asks for with each possible command at each step."""
    import textworld.logic
    from textworld.envs.pddl import logic, textgen

    logic.fast_downward.pddl2sas = Translations(logic.fast_downward.pddl2sas)
    for parser in (textgen._PARSER, textworld.logic._PARSER):
        parser.parse = lru_cache(maxsize=4096)(parser.parse)


class AlfworldGame(Game):
    """A game from its file; ``policy_commands`` are what an expert does next, see ``real_envs.worlds.alfworld_plans``.

    Args:
        usual: how many things of a kind lay in places of another in the training tasks.
    """

    def __init__(self, privileged: bool = False, usual: Mapping[tuple[str, str], int] = MappingProxyType({})) -> None:
        super().__init__(privileged)
        self._usual = usual
        self._looked: set[str] = set()
        self._open = "", 0  # file and variation
        self._names = Names("")
        self._goal: AlfworldGoal | None = None
        self._state: Mapping[str, Any] = {}
        self._over = False

    def _start(self, task: Task) -> str:
        which = str(task.spec["path"]), int(task.spec.get("variation", 0))
        if which != self._open:
            self.close()
            import textworld

            remember_work()
            asked = textworld.EnvInfos(feedback=True, won=True, admissible_commands=self._privileged)
            game = read_game(*which)
            with tempfile.TemporaryDirectory() as folder:  # the engine reads it once
                file = Path(folder) / GAME
                file.write_text(json.dumps(game))
                self._simulator = textworld.start(str(file), asked)
            self._names, self._goal = Names(game["pddl_problem"]), read_goal(game["pddl_problem"])
            self._open = which
        self._state, self._over = self._simulator.reset(), False
        self._looked.clear()
        return self._text()

    def _act(self, action: str) -> StepResult:
        self._state, _, self._over = self._simulator.step(self._names.raw(" ".join(action.split())))
        reward = float(bool(self._state["won"]))
        return StepResult(self._observation(self._text()), reward, bool(self._over), False)

    def close(self) -> None:
        if self._simulator is not None:  # it loads a copy of the planner's library, which nobody else unloads: 2.4 MB
            import fast_downward

            fast_downward.close_lib(self._simulator.downward_lib)
        super().close()
        self._open = "", 0

    def _text(self) -> str:
        return clean(self._names.plain(self._state["feedback"]))

    def _plan(self) -> list[str]:
        """What an expert does next; nothing where no rule knows a way, or it is over."""
        if self._goal is None or self._over:
            return []
        facts = Facts((fact.name, *(argument.name for argument in fact.arguments)) for fact in self._state["_facts"])
        self._looked.update(facts.in_sight())
        return [self._names.plain(command) for command in search(self._goal, facts, self._looked, self._usual)]

    def _hints(self) -> dict[str, object]:
        admissible = [self._names.plain(command) for command in self._state["admissible_commands"]]
        return hints(admissible, self._plan(), entities=self._names.things)


def clean(text: str) -> str:
    """Without banner, layout, and the coordinates at which one arrives."""
    lines = (" ".join(_ARRIVAL.sub("", line).split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line and not line.startswith("-= Welcome"))


def read_game(path: str | Path, variation: int = 0) -> dict[str, Any]:
    """What is in the file, or a variation of it.

    Raises:
        UserError: the file is torn, or no game of ALFWorld.
        NoVariation: it has none.
    """
    try:
        game = dict(json.loads(Path(path).read_text()))
        game["pddl_problem"], game["grammar"] = str(game["pddl_problem"]), str(game.get("grammar", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no game of ALFWorld, or torn: {type(error).__name__}: {error}") from error
    return vary(game, variation) if variation else game


def world_facts(problem: str) -> tuple[str, ...]:
    """What each place holds at first, such as ``desk 1: mug 1, pen 2`` or ``drawer 1 (closed): nothing``, and which
    places one stands before at once (``at one spot: drawer 1, drawer 2``; to go from one to the other does nothing).

    By places, in the order in which the game tells it: that a model copies. From facts by things, such as ``mug 1 in
    desk 1``, it would have to gather what a place holds.
    """
    names, state = Names(problem), problem.partition("(:goal")[0]
    inside: dict[str, list[str]] = {place: [] for place in _PLACE.findall(state)}
    for kind, thing, place in _IN.findall(state):
        if kind == "inReceptacle":
            inside.setdefault(place, []).append(names.plain(thing))
    closed = set(_OPENABLE.findall(state)) - set(_OPENED.findall(state))
    spots = grouped(_AT.findall(state), lambda at: at[1]).values()
    beside = (", ".join(sorted(names.plain(place) for place, _ in spot)) for spot in spots if len(spot) > 1)
    lines = (
        f"{names.plain(place)}{' (closed)' * (place in closed)}: {', '.join(sorted({*things})) or 'nothing'}"
        for place, things in inside.items()
    )
    return (*sorted(lines), *(f"{SPOT}: {places}" for places in sorted(beside)))


class Alfworld(GeneratedWorld):
    """``env=alfworld`` (a ``World``)."""

    name: ClassVar[str] = "alfworld"
    settings: ClassVar[type[AlfworldSettings]] = AlfworldSettings
    package: ClassVar[str] = "textworld"
    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE
    elsewhere: ClassVar[bool] = False  # a reset of every game, half a second each, for a few first commands

    def __init__(self) -> None:
        try:
            import fast_downward  # noqa: F401  # without it games open, but nothing can be planned
        except ImportError as error:
            raise ImportError(f"{error}; run `pip install 'imagination[alfworld]'`") from error

    def draw(self, settings: AlfworldSettings, request: TaskRequest) -> dict[str, list[dict[str, Any]]]:
        """Draws games of the splits; the engine refuses some of the benchmark's files, which are passed over.

        Raises:
            UserError: a folder is missing, a file is torn, or a split has not so many games.
        """
        counts = request.counts
        files: dict[str, list[tuple[Path, int]]] = {}
        for split, count in counts.items():
            games = _games(settings, settings.heldout if split == "heldout" else settings.train)
            random.Random(derive_seed(f"alfworld/{split}", request.seed)).shuffle(games)
            more = settings.variations if split != "heldout" else 0
            files[split] = [(game, number) for number in range(more + 1) for game in games]
            if len(files[split]) < count:
                raise UserError(
                    f"{settings.folder} has {len(files[split])} games for '{split}', not games.{split}={count}"
                    + ("; env.options.variations makes more of them" if split == "train" else "")
                )

        def too_few(split: str, opened: int) -> str:
            return f"of {len(files[split])} games for '{split}' {opened} open, not games.{split}={counts[split]}"

        with in_worker(AlfworldGame) as start:
            refused: set[Path] = set()

            def name_of(game: tuple[Path, int]) -> str | None:
                """The game, where the engine opens its file."""
                file, number = game
                try:
                    read_game(file, number)
                    if not number:
                        start(Task(file.parent.name, {"path": str(file)}))
                except NoVariation:
                    return None
                except EnvFailure:  # such as KeyError: 'val1'
                    refused.add(file)
                return None if file in refused else str(game)

            opened = draw_distinct(request, lambda split, _: files[split], name_of, too_few)
        return {split: [_drawn(*game, settings.folder) for game in games] for split, games in opened.items()}

    def task(self, drawn: Mapping[str, Any], settings: Mapping[str, Any]) -> Task:
        path = self.settings(**settings).folder / drawn["path"]
        varied = {"variation": drawn["variation"]} if "variation" in drawn else {}
        return Task(drawn["id"], {"path": str(path), **varied}, world_facts=tuple(drawn["facts"]))

    def behaviours(self, elsewhere: Sequence[str]) -> Sequence[tuple[Agent, float]]:
        """Half of the episodes err seldom: a search is long, and who errs at every third step shows little of one."""
        careful = ((expert(self.language), 0.25), (noisy(0.05, 0.25, self.language), 0.25))
        return [*careful, *((agent, share / 2) for agent, share in super().behaviours(elsewhere))]

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[AlfworldGame]:
        if not privileged:
            return partial(AlfworldGame)
        train = self.drawn(folder)[1]["train"]
        return partial(AlfworldGame, True, count_places(fact for task in train for fact in task.world_facts))


def _drawn(game: Path, variation: int, folder: Path) -> dict[str, Any]:
    name = "/".join(("alfworld", *game.relative_to(folder).parts[:-1], *(str(k) for k in (variation,) if k)))
    facts = world_facts(read_game(game, variation)["pddl_problem"])
    varied = {"variation": variation} if variation else {}
    return {"id": name, "path": str(game.relative_to(folder)), "facts": facts, **varied}


def _games(settings: AlfworldSettings, splits: str) -> list[Path]:
    games: list[Path] = []
    for split in splits.split("+"):
        folder = settings.folder / split
        if not folder.is_dir():
            raise UserError(f"{folder} is missing: `alfworld-download` fetches it, or set env.options.data")
        games += sorted(p for p in folder.rglob(GAME) if p.relative_to(folder).parts[0].startswith(settings.kind))
    return games
