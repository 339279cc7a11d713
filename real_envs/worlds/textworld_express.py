"""TextWorldExpress: families of small text games with endless instances, as a real environment.

Coin, map reader, text-world common sense, sorting, arithmetic and cooking (Jansen and Côté, EACL 2023), each with the
official folds: seeds 0 to 9,999 train, 10,000 to 19,999 develop, 20,000 to 29,999 test. The games run in Java;
``pip install 'imagination[textworld-express]'`` brings a Java runtime along.

The text of a reset is the task and then the first room. A reward is what an action added to the game's score, which is
1 when the task is solved; an action that fails the task ends the episode and earns nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from real_envs.env import EnvFailure, StepResult, Task
from real_envs.errors import UserError
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.worlds.generated import (
    Game,
    GeneratedWorld,
    TaskRequest,
    draw_distinct,
    hints,
    in_worker,
    with_java,
    without_layout,
)

EXTRA = "textworld-express"
INVALID = r"Unknown action: "
FOLDS = {"train": range(10_000), "dev": range(10_000, 20_000), "test": range(20_000, 30_000)}
_NO_LIMIT = 1_000_000  # steps of the game's own; episodes are cut by the rollout, as in every world
_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_NAMED = re.compile(r"(?:take|open|close|read|eat|examine|drop|prepare|slice|dice|chop|cook|put) (?!door )(.+)")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_REFUSED = 8  # games in a row that cannot be made, after which none of these parameters is tried any more
_WHY = re.compile(r"(?<=RuntimeException: ).+|(?<=ValueError: ).+")  # what the game says of its parameters
_TRIES = 30  # seeds drawn for each task, before the game is said to have no more that differ

LANGUAGE = CommandGrammar.of(
    "5 take {a} | 5 put {a} in {b} | 4 open {a} | 2 close {a} | 6 move {d} | 4 open door to {d} | "
    "1 read {a} | 1 eat {a} | 0.5 look around | 0.5 inventory | 0.3 go {d} | 0.5 take {a} from {b} | "
    "0.3 use {a} on {b}",
    look="look around",
)


@dataclass(frozen=True, slots=True)
class ExpressSettings:
    """Which game, how hard, and which fold judges."""

    game: Literal["coin", "mapreader", "twc", "sorting", "arithmetic", "cookingworld"] = "coin"  #: of the six
    #: ``numLocations=5,includeDoors=0`` and so on, as the game names them; of ``numLocations=2..9`` each task draws its
    #: own; empty takes the game's defaults
    params: str = ""
    #: the fold of held-out tasks: ``dev`` to choose by, ``test`` to report
    heldout_fold: Literal["dev", "test"] = "test"
    #: the fold of training tasks; ``dev`` where another run has been trained on ``train``
    train_fold: Literal["train", "dev"] = "train"

    def __post_init__(self) -> None:
        if self.params and not re.fullmatch(r"\w+=\d+(\.\.\d+)?(,\w+=\d+(\.\.\d+)?)*", self.params):
            raise ValueError(f"params wants name=number,name=number..number, got {self.params!r}")

    def task(self, fold: str, seed: int) -> Task:
        """An instance by its seed. The id says all that makes it, so that equal ids are equal games."""
        rng = random.Random(derive_seed(f"{self.game}/{fold}", seed))
        params = _RANGE.sub(lambda ends: str(rng.randint(*sorted(map(int, ends.groups())))), self.params)
        size = "-" + params.replace("=", "").replace(",", "-") if params else ""
        spec = {"game": self.game, "params": params, "fold": fold, "seed": str(seed)}
        return Task(f"twx-{self.game}{size}-{fold}-s{seed}", spec)


class TextWorldExpressGame(Game):
    """A game with a Java machine of its own; ``policy_commands`` are what is left of the gold path, empty where the
    episode has left it."""

    def __init__(self, privileged: bool = False) -> None:
        super().__init__(privileged)
        self._loaded: tuple[str, str] | None = None
        self._score = 0.0
        self._plan: list[str] = []
        self._infos: Mapping[str, Any] = {}

    def _start(self, task: Task) -> str:
        if self._simulator is None:
            express = with_java("textworld_express", EXTRA)
            self._simulator = express.TextWorldExpressEnv(envStepLimit=_NO_LIMIT)
            self._loaded = None
        game = (task.spec["game"], task.spec["params"])
        if game != self._loaded:
            self._loaded = None
            self._simulator.load(gameName=game[0], gameParams=game[1])
            self._loaded = game
        text, self._infos = self._simulator.reset(
            seed=int(task.spec["seed"]), gameFold=task.spec["fold"], generateGoldPath=self._privileged
        )
        self._plan = list(self._simulator.getGoldActionSequence()) if self._privileged else []
        self._score = 0.0
        return without_layout(f"{self._infos['taskDescription']}\n{text}")

    def _act(self, action: str) -> StepResult:
        text, _, _, self._infos = self._simulator.step(action.encode("utf-8", "replace").decode())
        won, lost = bool(self._infos["tasksuccess"]), bool(self._infos["taskfailure"])
        score = 1.0 if won else float(self._infos["score"])
        reward = 0.0 if lost else score - self._score
        self._score = score
        self._plan = self._after(action, text)
        return StepResult(self._observation(without_layout(text)), reward, won or lost, False)

    def _after(self, action: str, text: str) -> list[str]:
        """What is left of the plan: its next command was done, a step aside is taken back, anything else is ignored."""
        if self._plan and action == self._plan[0]:
            return self._plan[1:]
        verb, _, direction = action.partition(" ")
        if self._plan and verb == "move" and direction in _OPPOSITE and text.startswith("You are in"):
            return [f"move {_OPPOSITE[direction]}", *self._plan]
        return self._plan

    def _hints(self) -> dict[str, object]:
        valid = sorted(self._infos["validActions"])
        named = (_NAMED.fullmatch(command) for command in valid)
        entities = sorted({name for match in named if match for name in re.split(r" (?:in|on) ", match[1])})
        plan = self._plan if self._plan and self._plan[0] in valid else []
        return hints(valid, plan, without_layout(self._infos["inventory"]), entities)


class TextWorldExpress(GeneratedWorld):
    """``env=textworld_express`` (a ``World``)."""

    name: ClassVar[str] = "textworld_express"
    settings: ClassVar[type[ExpressSettings]] = ExpressSettings
    package: ClassVar[str] = "textworld-express"
    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE

    def __init__(self) -> None:
        with_java("textworld_express", EXTRA)

    def draw(self, settings: ExpressSettings, request: TaskRequest) -> dict[str, list[dict[str, Any]]]:
        counts = request.counts
        folds = {"train": settings.train_fold, "heldout": settings.heldout_fold}

        def candidates(split: str, count: int) -> list[Task]:
            fold = folds.get(split, split)
            seeds, name = list(FOLDS[fold]), f"{settings.game}/{request.seed}/{split}"
            random.Random(name).shuffle(seeds)
            return [settings.task(fold, number) for number in seeds[: _TRIES * count]]

        def too_few(split: str, number: int) -> str:
            return (
                f"{settings.game} with '{settings.params}' has too few different games for {counts[split]} in split "
                f"'{split}': {number} found among {_TRIES * counts[split]} seeds"
            )

        with in_worker(TextWorldExpressGame) as start:
            in_a_row = 0  # games that cannot be made

            def start_of(task: Task) -> str | None:
                """None where the sampled parameters contradict each other, such as a distance that few rooms have."""
                nonlocal in_a_row
                try:
                    text = start(task)
                except EnvFailure as failure:
                    why = _WHY.search(str(failure))
                    if why is None:  # such as a time-out: or a slow machine would draw other games
                        raise
                    in_a_row += 1
                    if in_a_row < _REFUSED:
                        return None
                    what = f"{settings.game} cannot be made with params '{settings.params}'"
                    raise UserError(f"{what}: {why[0]}") from None
                in_a_row = 0
                return text

            drawn = draw_distinct(request, candidates, start_of, too_few)
        return {split: [{"id": t.id, "spec": dict(t.spec)} for t in tasks] for split, tasks in drawn.items()}

    def task(self, drawn: Mapping[str, Any], settings: Mapping[str, Any]) -> Task:
        return Task(drawn["id"], drawn["spec"])

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[TextWorldExpressGame]:
        return partial(TextWorldExpressGame, privileged)
