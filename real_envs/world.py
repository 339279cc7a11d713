"""A kind of environment by its name: all that ``imagine`` must know of a world, so that no stage names one.

A world is one file in ``real_envs/worlds``, one in ``configs/env/`` and one line in ``BUILT_IN``; a package of somebody
else needs no more than the entry point. What it brings is an object with the attributes of ``World``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol

from real_envs.env import Agent, TaskSet
from real_envs.errors import UserError

FILE = "games.json"  # in the folder of generated tasks, written last: a folder that holds it is complete


class World(Protocol):
    """One kind of environment.

    Attributes:
        name: as in ``env=textworld``; it is also written into logs (``meta["environment"]``).
        settings: the dataclass of what is particular to this world. Its fields are the keys of ``env.options``; it
            raises ``ValueError`` for values that make no sense.
        invalid: a regular expression of what the world answers to an action that it does not understand.
        elsewhere: whether commands that solve one task could be tried in another. To find them, each training task is
            reset once. ``True`` where a world does not say.
        refusal: optional, ``(start, history, action) -> str | None``: what it says to an action that it refuses by
            rules that the texts of an episode declare, as schemas of tools do. Dreams take it from there
            (``worldmodel.exact=schema``).
        user_answer: optional, ``(start, history, action, facts) -> (observation, reward, terminated) | None``: what the
            user of a task says to an action, by the task's facts; ``None`` where somebody else answers
            (``worldmodel.exact=user``).
        is_answered: optional, ``(start, history, action, facts) -> bool``: whether by the task's facts this action is
            not refused for sure. A world model that refuses it is asked again (``worldmodel.exact=user``).
        compose: optional, ``(settings, log, count, seed) -> list[Trajectory]``: at most so many episodes of new tasks,
            made of turns of the log, with what the tasks pay and the facts of their worlds (``imagine relabel
            hindsight.questions=100``). No real step is taken, and no held-out task is touched.
    """

    name: ClassVar[str]
    settings: ClassVar[type[Any]]
    invalid: ClassVar[str]

    def generate(
        self,
        folder: Path,
        counts: Mapping[str, int],
        seed: int,
        settings: Any,
        progress: Callable[[int, int], None],
        workers: int,
    ) -> None:
        """Make the tasks of all splits; no task is in two of them. Writes ``games.json``; what is there is kept.

        Args:
            counts: tasks by split, such as ``{"train": 6, "heldout": 6}``.
            seed: of the run; other seeds give other tasks.

        Raises:
            ValueError: there are not so many different tasks.
        """
        ...

    def open(self, folder: Path, privileged: bool, workers: int) -> TaskSet:
        """The tasks in ``folder``, which may have moved, and environments in worker processes to play them in.

        Args:
            privileged: observations also carry what scripted agents read (see ``real_envs.scripted_agents``).

        Raises:
            FileNotFoundError: there is no ``games.json``.
        """
        ...

    def behaviours(self, elsewhere: Sequence[str]) -> Sequence[tuple[Agent, float]]:
        """Scripted agents whose episodes are the log, each with its share; the shares total 1.

        Args:
            elsewhere: commands that solve other tasks, which some agents confuse with this one's.
        """
        ...


GROUP = "imagination.envs"
BUILT_IN = {
    "agentdojo": "real_envs.worlds.agentdojo:AgentDojo",
    "agentgym": "real_envs.worlds.servers.agentgym:AgentGym",
    "alfworld": "real_envs.worlds.alfworld:Alfworld",
    "bfcl": "real_envs.worlds.bfcl:Bfcl",
    "browsergym": "real_envs.worlds.web.suites:BrowserGym",
    "gymnasium": "real_envs.worlds.gymnasium_text:GymnasiumText",
    "mcp": "real_envs.worlds.servers.mcp:Mcp",
    "miniwob": "real_envs.worlds.web.miniwob:Miniwob",
    "openenv": "real_envs.worlds.servers.openenv:OpenEnv",
    "scienceworld": "real_envs.worlds.scienceworld:ScienceWorld",
    "search": "real_envs.worlds.search:Search",
    "textworld": "real_envs.worlds.textworld:TextWorld",
    "textworld_express": "real_envs.worlds.textworld_express:TextWorldExpress",
}


class UnknownWorld(UserError):
    """There is no world of that name, or what it needs is not installed. The message says what to do."""


def world_names() -> list[str]:
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def find_world(name: str) -> World:
    """The world of that name. A built-in one comes before an entry point of the same name.

    Raises:
        UnknownWorld: no such world, or its module cannot be imported.
    """
    target = BUILT_IN.get(name) or next((e.value for e in entry_points(group=GROUP) if e.name == name), None)
    if target is None:
        raise UnknownWorld(
            f"there is no environment '{name}'; known are {', '.join(world_names())}. "
            f"A package adds one through the entry point '{GROUP}'"
        )
    module, _, attribute = target.partition(":")
    try:
        made: World = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise UnknownWorld(f"env={name} cannot be played: {error}") from error
    return made
