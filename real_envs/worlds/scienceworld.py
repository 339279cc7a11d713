"""ScienceWorld: thirty families of elementary science in a simulated house, as a real environment.

The simulator (Wang et al., EMNLP 2022, arXiv 2203.07540) runs in Java; ``pip install 'imagination[scienceworld]'``
brings a Java runtime along. A task is a variation of a family; the benchmark's folds of variations are kept.

The text of a reset is the task and then the room. A reward is what an action added to the score, which is 1 when the
task is solved; an action that fails the task ends the episode and earns nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from real_envs.env import StepResult, Task
from real_envs.errors import UserError
from real_envs.scripted_agents import CommandGrammar
from real_envs.seeding import derive_seed
from real_envs.worlds.generated import Game, GeneratedWorld, TaskRequest, hints, with_java, without_layout

EXTRA = "scienceworld"
INVALID = r"No known action matches that input\.|Ambiguous request:|Unknown action\."
_NO_LIMIT = 1_000_000  # steps of the simulator's own; episodes are cut by the rollout, as in every world
_META = re.compile(r"reset\b.*|teleport\b.*")  # would start again, or leave the rules
_PLACE = re.compile(r"\b(?:room|location) is called the (.+?)\.")
_DOOR = re.compile(r"door to (.+)|(.+) door")
_HANDS = ("pick up {}", "focus on {}", "look at {}", "activate {}", "open {}", "read {}")

LANGUAGE = CommandGrammar.of(
    "4 open door to {a} | 6 go to {a} | 3 focus on {a} | 5 pick up {a} | 5 move {a} to {b} | 3 open {a} | "
    "1 close {a} | 2 look at {a} | 1 look in {a} | 2 activate {a} | 1 deactivate {a} | 2 use {a} on {b} | "
    "2 pour {a} into {b} | 1 mix {a} | 1 connect {a} to {b} | 1 read {a} | 0.5 inventory | 0.5 look around | "
    "0.5 wait1 | 0.5 take {a}",
    look="look around",
)


@dataclass(frozen=True, slots=True)
class ScienceSettings:
    """Which families, how hard, and which fold judges."""

    families: str = ""  #: such as ``find-living-thing+boil``, as the benchmark names them; empty takes all thirty
    #: ``easy`` opens doors and containers and more; as the benchmark names them, empty for none
    simplifications: str = "easy"
    #: the variations of held-out tasks: ``dev`` to choose by, ``test`` to report
    heldout_fold: Literal["dev", "test"] = "test"


class ScienceGame(Game):
    """A variation with a Java machine of its own.

    ``admissible_commands`` are what may be done with what is in reach; a few of these are refused, as listing exactly
    those that are not takes a tenth of a second. ``policy_commands`` are what is left of the gold path.
    """

    def __init__(self, privileged: bool = False) -> None:
        super().__init__(privileged)
        self._plans: dict[tuple[str, int, str], list[str]] = {}  # finding one can take a second and more
        self._score = 0.0
        self._plan: list[str] = []
        self._room = ""

    def _start(self, task: Task) -> str:
        if self._simulator is None:
            self._simulator = with_java("scienceworld", EXTRA).ScienceWorldEnv("", envStepLimit=_NO_LIMIT)
        which = (task.spec["family"], int(task.spec["variation"]), task.spec["simplifications"])
        unknown = self._privileged and which not in self._plans
        self._simulator.load(*which, generateGoldPath=unknown)
        text, _ = self._simulator.reset()
        if unknown:
            self._plans[which] = list(self._simulator.get_gold_action_sequence())
        self._plan = self._plans.get(which, [])
        self._score, self._room = 0.0, _room(text)
        return without_layout(f"{self._simulator.get_task_description()}\n{text}")

    def _act(self, action: str) -> StepResult:
        command = " ".join(action.encode("utf-8", "replace").decode().split())
        if _META.fullmatch(command.lower()):
            return StepResult(self._observation("No known action matches that input."), 0.0, False, False)
        server = self._simulator.server  # the package's own step lists all valid commands, a tenth of a second each
        text = str(server.step(command))
        score = float(server.getScore())
        ended = bool(server.getCompleted()) or score < 0
        reward = max(score, 0.0) - self._score if score >= 0 else 0.0
        self._score = max(score, 0.0)
        self._follow(command)
        return StepResult(self._observation(without_layout(text)), reward, ended, False)

    def _follow(self, command: str) -> None:
        """What is left of the plan: its next command was done, a walk aside is taken back, anything else is ignored."""
        if not self._privileged:
            return
        before, self._room = self._room, _room(str(self._simulator.server.freeActionLook())) or self._room
        if self._plan and command == self._plan[0]:
            self._plan = self._plan[1:]
        elif before != self._room:
            self._plan = [f"go to {before}", *self._plan]

    def _hints(self) -> dict[str, object]:
        things = [str(name) for name in self._simulator.server.getPossibleObjects() if name not in ("agent", "air")]
        rooms = sorted({match[1] or match[2] for match in map(_DOOR.fullmatch, things) if match})
        here = [name for name in things if name not in rooms and not _DOOR.fullmatch(name) and name != self._room]
        commands = [f"{verb} {room}" for room in rooms for verb in ("go to", "open door to")]
        commands += [form.format(name) for name in here for form in _HANDS]
        commands += [f"move {a} to {b}" for a in here for b in here if a != b and b.endswith(("box", "pot"))]
        inventory = without_layout(str(self._simulator.inventory()))
        return hints([*commands, "look around", "inventory"], self._plan, inventory, sorted({*here, *rooms}))


def _room(text: str) -> str:
    match = _PLACE.search(text)
    return match[1] if match else ""


class ScienceWorld(GeneratedWorld):
    """``env=scienceworld`` (a ``World``)."""

    name: ClassVar[str] = "scienceworld"
    settings: ClassVar[type[ScienceSettings]] = ScienceSettings
    package: ClassVar[str] = "scienceworld"
    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE
    in_order: ClassVar[bool] = False

    def __init__(self) -> None:
        with_java("scienceworld", EXTRA)

    def draw(self, settings: ScienceSettings, request: TaskRequest) -> dict[str, list[dict[str, str]]]:
        """Draws variations of the folds, from every family as many as from the others while it has some.

        Raises:
            UserError: there is no such family or simplification, or the families have not so many variations.
        """
        counts, panel = request.counts, request.panel
        folds = {split: settings.heldout_fold if split == "heldout" else "train" for split in counts}
        variations = _variations(settings, set(folds.values()))
        alike = {(task["family"], int(task["variation"])) for task in (panel.alike if panel else ())}
        for family, numbers in variations.get("train", {}).items():
            numbers[:] = [number for number in numbers if (family, number) not in alike]
        splits: dict[str, list[dict[str, str]]] = {}
        for split, count in counts.items():
            splits[split] = _draw(variations[folds[split]], count, derive_seed(f"scienceworld/{split}", request.seed))
            if len(splits[split]) < count:
                raise UserError(
                    f"{settings.families or 'all families'} have {len(splits[split])} variations in the fold "
                    f"{folds[split]}, not games.{split}={count}"
                )
            request.progress(sum(map(len, splits.values())), sum(counts.values()))
        return splits

    def task(self, drawn: Mapping[str, str], settings: Mapping[str, Any]) -> Task:
        spec = {**drawn, "simplifications": settings["simplifications"]}
        return Task(f"sw-{drawn['family']}-{drawn['variation']}", spec)

    def game(self, settings: Mapping[str, Any], folder: Path, privileged: bool) -> partial[ScienceGame]:
        return partial(ScienceGame, privileged)


def _variations(settings: ScienceSettings, folds: set[str]) -> dict[str, dict[str, list[int]]]:
    """Per fold and family, the benchmark's variations.

    Raises:
        UserError: there is no such family or simplification.
    """
    with closing(with_java("scienceworld", EXTRA).ScienceWorldEnv("", envStepLimit=_NO_LIMIT)) as java:
        known = list(java.get_task_names())
        families = settings.families.split("+") if settings.families else known
        if unknown := [name for name in families if name not in known]:
            raise UserError(f"ScienceWorld has no family '{unknown[0]}'; it has {', '.join(known)}")
        easier = {"easy", *java.get_possible_simplifications()}
        if strange := [name for name in settings.simplifications.split(",") if name and name not in easier]:
            raise UserError(f"ScienceWorld has no simplification '{strange[0]}'; it has {', '.join(sorted(easier))}")
        by_fold: dict[str, dict[str, list[int]]] = {fold: {} for fold in folds}
        for family in families:
            java.load(family, 0, "")
            for fold in folds:
                by_fold[fold][family] = list(getattr(java, f"get_variations_{fold}")())
        return by_fold


def _draw(variations: Mapping[str, Sequence[int]], count: int, order: int) -> list[dict[str, str]]:
    rng = random.Random(order)
    left = {family: rng.sample(list(numbers), len(numbers)) for family, numbers in variations.items()}
    drawn: list[dict[str, str]] = []
    while len(drawn) < count and any(left.values()):
        for family, numbers in left.items():
            if numbers and len(drawn) < count:
                drawn.append({"family": family, "variation": str(numbers.pop())})
    return drawn
