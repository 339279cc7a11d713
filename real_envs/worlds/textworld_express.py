"""TextWorldExpress: families of small text games with endless instances, as a real environment.

Coin, map reader, text-world common sense, sorting, arithmetic and cooking (Jansen and Côté, EACL 2023), each with the
official folds: seeds 0 to 9,999 train, 10,000 to 19,999 develop, 20,000 to 29,999 test. The games run in Java;
``pip install 'imagination[textworld-express]'`` brings a Java runtime along.

The text of a reset is the task and then the first room. A reward is what an action added to the game's score, which is
1 when the task is solved; an action that fails the task ends the episode and earns nothing.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from real_envs.env import StepResult, Task
from real_envs.scripted_agents import Language
from real_envs.trajectory import Observation
from real_envs.worker_pool import WorkerPool
from real_envs.worlds.generated import GeneratedWorld, with_java, without_layout

EXTRA = "textworld-express"
INVALID = r"Unknown action: "
FOLDS = {"train": range(10_000), "dev": range(10_000, 20_000), "test": range(20_000, 30_000)}
_NO_LIMIT = 1_000_000  # steps of the game's own; episodes are cut by the rollout, as in every world
_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_NAMED = re.compile(r"(?:take|open|close|read|eat|examine|drop|prepare|slice|dice|chop|cook|put) (?!door )(.+)")
_TRIES = 30  # seeds drawn for each task, before the game is said to have no more that differ

LANGUAGE = Language(
    {
        "take {a}": 5,
        "put {a} in {b}": 5,
        "open {a}": 4,
        "close {a}": 2,
        "move {d}": 6,
        "open door to {d}": 4,
        "read {a}": 1,
        "eat {a}": 1,
        "look around": 0.5,
        "inventory": 0.5,
        "go {d}": 0.3,
        "take {a} from {b}": 0.5,
        "use {a} on {b}": 0.3,
    },
    look="look around",
)


@dataclass(frozen=True, slots=True)
class ExpressSettings:
    """Which game, how hard, and which fold judges.

    Attributes:
        game: of the six.
        params: ``numLocations=5,includeDoors=0`` and so on, as the game names them; empty takes its defaults.
        heldout_fold: the fold of held-out tasks: ``dev`` to choose by, ``test`` to report.
        train_fold: the fold of training tasks; ``dev`` where another run has been trained on ``train``.
    """

    game: Literal["coin", "mapreader", "twc", "sorting", "arithmetic", "cookingworld"] = "coin"
    params: str = ""
    heldout_fold: Literal["dev", "test"] = "test"
    train_fold: Literal["train", "dev"] = "train"

    def __post_init__(self) -> None:
        if self.params and not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", self.params):
            raise ValueError(f"params wants name=number,name=number, got {self.params!r}")

    def task(self, fold: str, seed: int) -> Task:
        """An instance by its seed. The id says all that makes it, so that equal ids are equal games."""
        size = "-" + self.params.replace("=", "").replace(",", "-") if self.params else ""
        spec = {"game": self.game, "params": self.params, "fold": fold, "seed": str(seed)}
        return Task(f"twx-{self.game}{size}-{fold}-s{seed}", spec)


class TextWorldExpressGame:
    """One game at a time, in this process, with a Java machine of its own (a ``SyncEnv``; play it in a worker).

    Args:
        privileged: also give ``admissible_commands``, ``policy_commands`` (what is left of the gold path; empty where
            the episode has left it), ``inventory`` and ``entities`` in ``Observation.privileged``.
    """

    def __init__(self, privileged: bool = False) -> None:
        self._privileged = privileged
        self._java: Any = None
        self._loaded: tuple[str, str] | None = None
        self._running = False
        self._score = 0.0
        self._plan: list[str] = []

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the instance that ``task.spec`` names. ``seed`` changes nothing.

        Raises:
            ValueError: the game does not know one of the parameters.
        """
        self._running = False
        if self._java is None:
            express = with_java("textworld_express", EXTRA)
            self._java = express.TextWorldExpressEnv(envStepLimit=_NO_LIMIT)
        game = (task.spec["game"], task.spec["params"])
        if game != self._loaded:
            self._loaded = None
            self._java.load(gameName=game[0], gameParams=game[1])
            self._loaded = game
        text, infos = self._java.reset(
            seed=int(task.spec["seed"]), gameFold=task.spec["fold"], generateGoldPath=self._privileged
        )
        self._plan = list(self._java.getGoldActionSequence()) if self._privileged else []
        self._running, self._score = True, 0.0
        return self._observe(f"{infos['taskDescription']}\n{text}", infos)

    def step(self, action: str) -> StepResult:
        """
        Raises:
            RuntimeError: no reset, or the game is over.
        """
        if not self._running:
            raise RuntimeError("the game is not running: reset first")
        text, _, _, infos = self._java.step(action.encode("utf-8", "replace").decode())
        won, lost = bool(infos["tasksuccess"]), bool(infos["taskfailure"])
        score = 1.0 if won else float(infos["score"])
        reward = 0.0 if lost else score - self._score
        self._score, self._running = score, not (won or lost)
        self._plan = self._after(action, text)
        return StepResult(self._observe(text, infos), reward, won or lost, False)

    def close(self) -> None:
        self._running = False
        if self._java is not None:
            self._java.close()
            self._java = None

    def _after(self, action: str, text: str) -> list[str]:
        """What is left of the plan: its next command was done, a step aside is taken back, anything else is ignored."""
        if self._plan and action == self._plan[0]:
            return self._plan[1:]
        verb, _, direction = action.partition(" ")
        if self._plan and verb == "move" and direction in _OPPOSITE and text.startswith("You are in"):
            return [f"move {_OPPOSITE[direction]}", *self._plan]
        return self._plan

    def _observe(self, text: str, infos: Mapping[str, Any]) -> Observation:
        hidden: dict[str, object] = {}
        if self._privileged:
            valid = sorted(infos["validActions"])
            named = (_NAMED.fullmatch(command) for command in valid)
            hidden = {
                "admissible_commands": valid,
                "policy_commands": self._plan if self._plan and self._plan[0] in valid else [],
                "inventory": without_layout(infos["inventory"]),
                "entities": sorted({name for match in named if match for name in re.split(r" (?:in|on) ", match[1])}),
            }
        return Observation(without_layout(text), hidden)


class TextWorldExpress(GeneratedWorld):
    """``env=textworld_express`` (a ``World``)."""

    name: ClassVar[str] = "textworld_express"
    settings: ClassVar[type[ExpressSettings]] = ExpressSettings
    invalid: ClassVar[str] = INVALID
    language: ClassVar[Language] = LANGUAGE

    def __init__(self) -> None:
        with_java("textworld_express", EXTRA)

    def draw(
        self, settings: ExpressSettings, counts: Mapping[str, int], seed: int, progress: Callable[[int, int], None]
    ) -> dict[str, list[dict[str, Any]]]:
        """Draws instances of the folds until enough of them start differently from all others.

        Raises:
            ValueError: a fold has not so many.
        """
        drawn = asyncio.run(_draw(settings, counts, seed, progress))
        return {split: [{"id": t.id, "spec": dict(t.spec)} for t in tasks] for split, tasks in drawn.items()}

    def task(self, drawn: Mapping[str, Any], settings: Mapping[str, Any]) -> Task:
        return Task(drawn["id"], drawn["spec"])

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[TextWorldExpressGame]:
        return partial(TextWorldExpressGame, privileged=privileged)


async def _draw(
    settings: ExpressSettings, counts: Mapping[str, int], seed: int, progress: Callable[[int, int], None]
) -> dict[str, list[Task]]:
    """Tasks by split whose first observations all differ: an instance that looks like another is not a new task."""
    pool = WorkerPool(TextWorldExpressGame, workers=1)
    env = pool.make_env()
    known: set[str] = set()
    splits: dict[str, list[Task]] = {split: [] for split in counts}
    folds = {"train": settings.train_fold, "heldout": settings.heldout_fold}
    try:
        for split, count in counts.items():
            seeds = _shuffled(folds.get(split, split), f"{settings.game}/{seed}/{split}")
            for _ in range(_TRIES * count):
                if len(splits[split]) == count:
                    break
                task = settings.task(*next(seeds))
                start = (await env.reset(task, 0)).text
                if start not in known:
                    known.add(start)
                    splits[split].append(task)
                    progress(sum(map(len, splits.values())), sum(counts.values()))
            if len(splits[split]) < count:
                raise ValueError(
                    f"{settings.game} with '{settings.params}' has too few different games for {count} in split "
                    f"'{split}': {len(splits[split])} found among {_TRIES * count} seeds"
                )
    finally:
        await env.close()
        await pool.close()
    return splits


def _shuffled(fold: str, name: str) -> Iterator[tuple[str, int]]:
    """The fold and its seeds in an order that the name decides."""
    seeds = list(FOLDS[fold])
    random.Random(name).shuffle(seeds)
    return ((fold, seed) for seed in seeds)
