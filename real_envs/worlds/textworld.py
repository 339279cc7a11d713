"""TextWorld: small text adventures, written and compiled on demand, as a real environment.

Games are real Inform 7 games (``.z8``), so the parser's many ways of saying no are real as well. The interpreter is a C
library that sampled commands can hang (NUL, a backslash), end (``quit``) or lead astray (``save`` and ``script`` write
files into the working directory); ``refusal`` keeps those from reaching it. Whatever is left is caught by
``real_envs.worker_pool``, which is how ``TextWorldTasks.make_env`` plays.

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
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from real_envs.env import Agent, StepResult, Task
from real_envs.files import write_atomically
from real_envs.scripted_agents import mixture
from real_envs.trajectory import Observation
from real_envs.worker_pool import PooledTasks

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


class TextWorldGame:
    """One game at a time, in this process; not thread-safe and, against hostile commands, best run in a worker.

    Args:
        privileged: also give ``admissible_commands``, ``policy_commands`` (a plan that solves the game from here, empty
            if there is none), ``inventory`` and ``entities`` in ``Observation.privileged``. Costs about half the speed.
        cached_games: how many started games to keep; starting one takes 25 ms, restarting it 4 ms.
    """

    def __init__(self, privileged: bool = False, cached_games: int = 8) -> None:
        self._privileged = privileged
        self._cached_games = cached_games
        self._games: OrderedDict[str, Any] = OrderedDict()
        self._game: Any = None  # the game being played; None before reset and after the end
        self._score = 0
        self._max_score = 1
        self._hidden: Mapping[str, object] = {}

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task.spec["path"]``; the text is the objective, then the first room. ``seed`` changes nothing.

        Raises:
            OSError: there is no such game.
        """
        self._game = None
        game = self._load(task.spec["path"])
        state = game.reset()
        self._game, self._score, self._max_score = game, 0, max(1, int(state["max_score"]))
        return self._observe(state)

    def step(self, action: str) -> StepResult:
        """Rewards are the game's points over its maximum. A game that is lost ends with reward 0.

        Raises:
            RuntimeError: no reset, or the game is over.
        """
        if self._game is None:
            raise RuntimeError("the game is not running: reset first")
        if (why := refusal(action)) is not None:
            return StepResult(Observation(REFUSAL, self._hidden), 0.0, False, False, {"refused": why})
        state, score, _ = self._game.step(action)
        won, lost = bool(state["won"]), bool(state["lost"])
        observation = self._observe(state)
        reward = 0.0 if lost else (score - self._score) / self._max_score
        self._score = score
        if won or lost:
            self._game = None
            return StepResult(observation, reward, True, False)
        if _QUESTION.search(observation.text):
            # An out-of-world command that does nothing: the parser drops its question and no turn passes.
            self._game.unwrapped._send("pronouns")
        return StepResult(observation, reward, False, False)

    def close(self) -> None:
        self._game = None
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

    def _observe(self, state: Mapping[str, Any]) -> Observation:
        if self._privileged:
            self._hidden = {
                "admissible_commands": list(state["admissible_commands"]),
                "policy_commands": list(state["policy_commands"]),
                "inventory": clean(state["inventory"] or ""),
                "entities": [name for name in state["entities"] if name not in _DIRECTIONS],
            }
        return Observation(clean(state["feedback"]), self._hidden)


def _finished(seed: int, folder: Path, settings: GameSettings) -> str | None:
    """The start text of a game that was built before; ``None`` if there is none."""
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
    options.seeds = seed
    options.grammar.only_last_action = True  # otherwise the objective spells out the walkthrough
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
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
    progress: Callable[[int, int], None] | None = None,
    workers: int = 2,
) -> list[Task]:
    """One game per seed, in order, in ``folder``; games that exist are kept. About 1.5 s a game and process.

    No two of them start with the same observation. A seed that gives no quest, or a game that an earlier one equals,
    is replaced by a seed derived from it; the task's id holds the seed that was used. ``progress(done, total)``.

    The processes are spawned, so a script that calls this needs the usual ``if __name__ == "__main__"``.

    Raises:
        ValueError: seeds repeat, or a seed gave no new game after 20 derived ones.
    """
    if len(set(seeds)) != len(seeds):
        raise ValueError("seeds repeat")
    settings = settings or GameSettings()
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
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
                if progress is not None:
                    progress(len(chosen), len(seeds))
    if len(chosen) < len(seeds):
        raise ValueError(f"no new game of {settings} from seeds {[s for i, s in enumerate(seeds) if i not in chosen]}")
    return [_task(folder, settings.task_id(chosen[i])) for i in range(len(seeds))]


def _map(build: Callable[[int], str | None], seeds: Sequence[int], workers: int) -> Iterable[str | None]:
    if workers <= 1:
        yield from map(build, seeds)
        return
    # Spawned, never forked: the caller may have loaded torch and started its threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield from executor.map(build, seeds)


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


class TextWorldTasks(PooledTasks):
    """Games by split, and isolated environments to play them in."""

    def __init__(self, splits: Mapping[str, Sequence[Task]], privileged: bool = False, workers: int = 2) -> None:
        super().__init__(splits, partial(TextWorldGame, privileged=privileged), workers)

    @classmethod
    def generate(
        cls,
        folder: str | Path,
        seeds: Mapping[str, Sequence[int]],
        settings: GameSettings | None = None,
        progress: Callable[[int, int], None] | None = None,
        privileged: bool = False,
        workers: int = 2,
    ) -> TextWorldTasks:
        """Build the games of all splits in one go, so that no game is in two of them, and write ``games.json``."""
        settings = settings or GameSettings()
        tasks = generate_games(folder, [s for split in seeds.values() for s in split], settings, progress, workers)
        rest = iter(tasks)
        splits = {split: [next(rest) for _ in of_split] for split, of_split in seeds.items()}
        manifest = {"settings": asdict(settings), "splits": {k: [task.id for task in v] for k, v in splits.items()}}
        write_atomically(Path(folder) / "games.json", json.dumps(manifest, indent=1))
        return cls(splits, privileged, workers)

    @classmethod
    def load(cls, folder: str | Path, privileged: bool = False, workers: int = 2) -> TextWorldTasks:
        """The task set whose ``games.json`` lies in ``folder``, which may have moved.

        Raises:
            FileNotFoundError: no manifest: generation did not finish.
        """
        folder = Path(folder).resolve()
        manifest = json.loads((folder / "games.json").read_text())
        splits = {k: [_task(folder, name) for name in names] for k, names in manifest["splits"].items()}
        return cls(splits, privileged, workers)


class TextWorld:
    """``env=textworld`` (a ``World``): Inform games, generated on demand, each with a seed of its own."""

    name: ClassVar[str] = "textworld"
    settings: ClassVar[type[GameSettings]] = GameSettings
    invalid: ClassVar[str] = INVALID

    def generate(
        self,
        folder: Path,
        counts: Mapping[str, int],
        seed: int,
        settings: GameSettings,
        progress: Callable[[int, int], None],
        workers: int,
    ) -> None:
        first, seeds = 1 + seed * _SEEDS_OF_A_RUN, {}
        for split, count in counts.items():
            seeds[split] = list(range(first, first + count))
            first += count
        TextWorldTasks.generate(folder, seeds, settings, progress, workers=workers)

    def open(self, folder: Path, privileged: bool, workers: int) -> TextWorldTasks:
        return TextWorldTasks.load(folder, privileged, workers)

    def behaviours(self, elsewhere: Sequence[str]) -> Sequence[tuple[Agent, float]]:
        return mixture(elsewhere)
