"""TextWorld: small text adventures, written and compiled on demand, as a real environment.

Games are real Inform 7 games (``.z8``), so the parser's many ways of saying no are real as well. The interpreter is a C
library that sampled commands can hang (NUL, a backslash), end (``quit``) or lead astray (``save`` and ``script`` write
files into the working directory); ``refusal`` keeps those from reaching it. Whatever is left is caught by
``real_envs.worker_pool``.

Two rules make an episode a function of its commands alone:

- A command is one sentence. What Inform treats as several (``.``, ``,``, ``then``), as a repetition (``again``) or as a
  request to the interpreter (``undo``, ``score``, ...) is answered as an unknown verb and changes nothing.
- The parser's questions ("What do you want to take?") are shown but need no answer: the next command is read afresh,
  never as the missing word. So an answer has to be a whole command.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from real_envs.env import StepResult, Task
from real_envs.files import write_atomically
from real_envs.panels import Panel
from real_envs.process_guard import end_with_parent
from real_envs.worker_pool import PooledTasks
from real_envs.world import FILE
from real_envs.worlds.generated import Game, GeneratedWorld, Progress, hints

REFUSAL = "That's not a verb I recognise."  # Inform's own answer to a verb it does not know
# What the parser says to what it does not understand, and to what is not there.
INVALID = (
    r"That's not a verb I recognise\.|I only understood you as far as|You can't see any such thing|I didn't understand"
    r"|You seem to want to talk|That noun did not make sense|You excepted something|I beg your pardon"
)
MAX_COMMAND = 100  # characters; the interpreter cuts silently at 198 bytes
_PLAIN = re.compile(r"[A-Za-z0-9' -]+")  # every object name is within this; quotes, backslashes, dots, commas are not
# Out-of-world verbs of Inform's standard rules and those of TextWorld's debugging; words that repeat or mend a command.
_META = re.compile(
    "quit|q|restart|restore|save|verify|version|script|transcript|notify|superbrief|short|verbose|long|brief|normal|nouns"
    "|pronouns|score|tw-.*|enable|disable|restrict|undo|again|g|oops|o"
)
_QUESTION = re.compile(r"^(Which|What|Who|Whom|Where)\b.*\?$", re.MULTILINE)
_STATUS = re.compile(r">?[^\S\n]*(-=[^\n]*=-)?-?\d+/-?\d+\s*$")  # ">    -= Studio =-0/3", the last line of every answer
_DROPPED = re.compile(r"(You scored -?\d+ out of a possible -?\d+, in \d+ turns?\.|Would you like to RESTART.*)")
# What the world model is told of a game's initial state; the rest is implied, as south_of by north_of.
_FACTS = frozenset({"at", "in", "on", "open", "closed", "locked", "match", "link", "north_of", "east_of"})
_DIRECTIONS = frozenset({"north", "south", "east", "west"})
_SEEDS_OF_A_RUN = 10_000  # games of different run seeds never share a game seed
_RESEED = 1_000_003  # a seed that gives no game goes on at seed + k * _RESEED
_DRAFT = ".building-"  # begins the names of folders in which games are made
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class GameSettings:
    """How big a game is: rooms, objects (distractors included) and the number of commands its quest takes."""

    rooms: int = 4
    objects: int = 6
    quest_length: int = 5

    def task_id(self, seed: int) -> str:
        return f"tw-r{self.rooms}-o{self.objects}-q{self.quest_length}-s{seed}"


def clean(feedback: str) -> str:
    """What the game said, without prompt, status line, move count, banner and layout.

    The number of moves is dropped because it is no state of the world that anyone should have to predict.
    """
    lines = _STATUS.sub("", feedback).split("\n")
    banner = max((i for i, line in enumerate(lines) if "$$" in line), default=-1)
    lines = [" ".join(line.split()) for line in lines[banner + 1 :]]
    lines = [line.removesuffix(">").rstrip() for line in lines]
    return "\n".join(line for line in lines if line and not _DROPPED.fullmatch(line))


def refusal(command: str) -> str | None:
    """Why a command must not reach the interpreter, or ``None`` if it may."""
    if len(command) > MAX_COMMAND:
        return f"longer than {MAX_COMMAND} characters"
    words = command.lower().split()
    if not words:
        return "empty"
    if not _PLAIN.fullmatch(command):
        return "not plain words"
    if _META.fullmatch(words[0]):
        return "meta-command"
    return "more than one sentence" if "then" in words else None


class TextWorldGame(Game):
    """One game at a time; not thread-safe, and dead after hostile commands.

    Args:
        privileged: ``policy_commands`` are a plan that solves the game from here, empty if there is none. Costs about
            half the speed.
        cached_games: how many started games to keep; starting one takes 25 ms, restarting it 4 ms.
    """

    def __init__(self, privileged: bool = False, cached_games: int = 8) -> None:
        super().__init__(privileged)
        self._cached_games = cached_games
        self._games: OrderedDict[str, Any] = OrderedDict()
        self._game: Any = None  # the one being played
        self._state: Mapping[str, Any] = {}
        self._score, self._max_score = 0, 1

    def _start(self, task: Task) -> str:
        """The objective, then the first room.

        Raises:
            OSError: there is no such game.
        """
        self._game = self._load(task.spec["path"])
        self._state = self._game.reset()
        self._score, self._max_score = 0, max(1, int(self._state["max_score"]))
        return clean(self._state["feedback"])

    def _act(self, action: str) -> StepResult:
        """Rewards are the game's points over its maximum. A game that is lost ends with reward 0."""
        if (why := refusal(action)) is not None:
            return StepResult(self._observation(REFUSAL), 0.0, False, False, {"refused": why})
        self._state, score, _ = self._game.step(action)
        won, lost = bool(self._state["won"]), bool(self._state["lost"])
        observation = self._observation(clean(self._state["feedback"]))
        reward = 0.0 if lost else (score - self._score) / self._max_score
        self._score = score
        if not (won or lost) and _QUESTION.search(observation.text):
            # An out-of-world command that does nothing: the parser drops its question and no turn passes.
            self._game.unwrapped._send("pronouns")
        return StepResult(observation, reward, won or lost, False)

    def close(self) -> None:
        super().close()
        while self._games:
            self._games.popitem()[1].close()

    def _load(self, path: str) -> Any:
        if path not in self._games:
            import textworld  # slow to import (0.5 s), and needed by nobody who only reads logs

            hidden = {"admissible_commands": True, "policy_commands": True, "inventory": True, "entities": True}
            infos = textworld.EnvInfos(feedback=True, max_score=True, **(hidden if self._privileged else {}))
            self._games[path] = textworld.start(path, infos)
            if len(self._games) > self._cached_games:
                self._games.popitem(last=False)[1].close()
        self._games.move_to_end(path)
        return self._games[path]

    def _hints(self) -> dict[str, object]:
        state = self._state
        entities = (name for name in state["entities"] if name not in _DIRECTIONS)
        return hints(state["admissible_commands"], state["policy_commands"], clean(state["inventory"] or ""), entities)


def _finished(seed: int, folder: Path, settings: GameSettings) -> str | None:
    """The start text of a game that was built before."""
    game_file, data_file = (folder / f"{settings.task_id(seed)}.{ending}" for ending in ("z8", "json"))
    if not (game_file.exists() and data_file.exists()):
        return None
    return str(json.loads(data_file.read_text())["metadata"]["start"])


def _build(seed: int, folder: Path, settings: GameSettings) -> str | None:
    """The start text of a seed's game, which is built; ``None`` if the seed gives no quest."""
    import textworld
    from textworld.generator.chaining import QuestGenerationError
    from textworld.generator.data import KnowledgeBase

    name = settings.task_id(seed)
    game_file, data_file = folder / f"{name}.z8", folder / f"{name}.json"
    options = textworld.GameOptions()
    options.kb = KnowledgeBase.default()  # to read its files anew takes a third of a game's time
    options.nb_rooms, options.nb_objects, options.quest_length = settings.rooms, settings.objects, settings.quest_length
    options.seeds = seed % 2**32  # that of a run may be as high, and each run has ten thousand
    options.grammar.only_last_action = True  # otherwise the objective spells out the walkthrough
    with tempfile.TemporaryDirectory(dir=folder, prefix=_DRAFT) as scratch:
        options.path = str(Path(scratch) / game_file.name)
        try:
            textworld.make(options)
        except QuestGenerationError:
            return None
        player = TextWorldGame()
        start = player.reset(Task(name, {"path": options.path})).text
        player.close()
        data = json.loads((Path(scratch) / data_file.name).read_text())
        data["metadata"]["start"] = start  # so that duplicates among finished games are found without playing them
        write_atomically(data_file, json.dumps(data))
        os.replace(options.path, game_file)  # last: a game that is there is complete
    return start


def generate_games(
    folder: str | Path,
    seeds: Sequence[int],
    settings: GameSettings | None = None,
    progress: Progress = lambda done, total: None,
    workers: int = 2,
) -> list[Task]:
    """One game per seed, in order, in ``folder``; games that exist are kept. About 1.5 s a game and process.

    No two of them start with the same observation. A seed that gives no quest, or a game that an earlier one equals,
    is replaced by a seed derived from it; the task's id holds the seed that was used.

    Raises:
        ValueError: seeds repeat, or a seed gave no new game after 20 derived ones.
    """
    if len(set(seeds)) != len(seeds):
        raise ValueError("seeds repeat")
    settings = settings or GameSettings()
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_DRAFT}*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    build = partial(_build, folder=folder, settings=settings)
    chosen: dict[int, int] = {}  # index into seeds -> the seed that gave its game
    known: set[str] = set()
    for attempt in range(_ATTEMPTS + 1):
        open_ = [i for i in range(len(seeds)) if i not in chosen]
        if not open_:
            break
        candidates = [seeds[i] + attempt * _RESEED for i in open_]
        before = {seed: _finished(seed, folder, settings) for seed in candidates}  # here: processes start in a second
        missing = [seed for seed in candidates if before[seed] is None]
        built = iter(_map(build, missing, min(workers, len(missing))))
        for i, seed in zip(open_, candidates, strict=True):
            start = next(built) if before[seed] is None else before[seed]
            if start is not None and start not in known:
                known.add(start)
                chosen[i] = seed
                progress(len(chosen), len(seeds))
    if len(chosen) < len(seeds):
        raise ValueError(f"no new game of {settings} from seeds {[s for i, s in enumerate(seeds) if i not in chosen]}")
    return [_task(folder, settings.task_id(chosen[i])) for i in range(len(seeds))]


def _map(build: Callable[[int], str | None], seeds: Sequence[int], workers: int) -> Iterable[str | None]:
    if workers <= 1:
        yield from map(build, seeds)
        return
    # Spawned, never forked: the caller may have loaded torch and started its threads.
    main = sys.modules["__main__"]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent) as executor:
        sys.modules["__main__"] = ModuleType("__main__")  # or each would run the caller's script again
        try:
            results = executor.map(build, seeds)
        finally:
            sys.modules["__main__"] = main
        yield from results


def _seed_of(name: str) -> int:
    return int(name.rpartition("-s")[2])


def _task(folder: Path, name: str) -> Task:
    return Task(name, {"path": str(folder / f"{name}.z8")}, world_facts=_world_facts(folder / f"{name}.json"))


def _world_facts(data_file: Path) -> tuple[str, ...]:
    """What TextWorld wrote down of a game's initial state, such as ``keycard at kitchen`` or ``safe closed``."""
    if not data_file.exists():
        return ()
    data = json.loads(data_file.read_text())
    names = {key: info["name"] for key, info in data["infos"] if info["name"]}
    return tuple(
        " ".join([arguments[0], fact["name"].replace("_", " "), *arguments[1:]])
        for fact in data["world"]
        if fact["name"] in _FACTS
        for arguments in [[names.get(one["name"], one["name"]) for one in fact["arguments"]]]
    )


class TextWorld(GeneratedWorld):
    """``env=textworld`` (a ``World``): Inform games, generated on demand, each with a seed of its own."""

    name: ClassVar[str] = "textworld"
    settings: ClassVar[type[GameSettings]] = GameSettings
    package: ClassVar[str] = "textworld"
    invalid: ClassVar[str] = INVALID

    def generate(
        self,
        folder: Path,
        counts: Mapping[str, int],
        seed: int,
        settings: GameSettings,
        progress: Progress,
        workers: int,
        panel: Panel | None = None,
    ) -> None:
        """See ``World``. All splits in one go, so that no game is in two of them, and first a panel, or the held-out
        games that this run has: more training games leave them held out.
        """
        first = 1 + seed * _SEEDS_OF_A_RUN
        kept = panel.tasks if panel else self._held_out(folder, first, settings)[: counts.get("heldout", 0)]
        fixed = [_seed_of(name) for name in kept]
        others = {split: count - len(fixed) * (split == "heldout") for split, count in counts.items()}
        wanted = len(fixed) + sum(others.values())
        seeds = [*fixed, *(number for number in range(first, first + wanted) if number not in fixed)][:wanted]
        names = iter([task.id for task in generate_games(folder, seeds, settings, progress, workers)])
        held = [next(names) for _ in fixed]
        splits = {split: [next(names) for _ in range(count)] for split, count in others.items()}
        splits |= {"heldout": [*held, *splits.get("heldout", [])]} if held else {}
        write_atomically(folder / FILE, json.dumps({"settings": asdict(settings), "splits": splits}, indent=1))

    def _held_out(self, folder: Path, first: int, settings: GameSettings) -> list[str]:
        """The held-out games of an earlier ``generate``, of these settings and of the seeds from ``first`` on."""
        known = json.loads((folder / FILE).read_text()) if (folder / FILE).exists() else {}
        held: list[str] = known["splits"].get("heldout", []) if known.get("settings") == asdict(settings) else []
        return held if all((_seed_of(name) - first) % _RESEED < _SEEDS_OF_A_RUN for name in held) else []

    def open(self, folder: Path, privileged: bool, workers: int) -> PooledTasks:
        return PooledTasks(self.drawn(folder)[1], partial(TextWorldGame, privileged), workers)

    def drawn(self, folder: Path) -> tuple[dict[str, Any], dict[str, list[Task]]]:
        folder = folder.resolve()
        data = json.loads((folder / FILE).read_text())
        return data["settings"], {k: [_task(folder, name) for name in names] for k, names in data["splits"].items()}
