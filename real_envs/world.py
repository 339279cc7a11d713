"""A kind of environment by its name: all that ``imagine`` must know of a world, so that no stage names one.

A world is one file here, one file in ``configs/env/`` and one line in ``real_envs.registry``; a package of somebody
else needs no more than the entry point. What it brings is an object with the attributes of ``World``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from real_envs.behaviours import Agent
from real_envs.env import TaskSet

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
            progress: called with tasks done and tasks in all.

        Raises:
            ValueError: there are not so many different tasks.
        """
        ...

    def open(self, folder: Path, privileged: bool, workers: int) -> TaskSet:
        """The tasks in ``folder``, which may have moved, and environments in worker processes to play them in.

        Args:
            privileged: observations also carry what scripted agents read (see ``real_envs.behaviours``).

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
