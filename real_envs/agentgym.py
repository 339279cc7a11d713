"""Any AgentGym server as a real environment, over its HTTP protocol; nothing needs to be installed for it.

``env=agentgym env.options.url=http://127.0.0.1:36001``. A worker process creates one environment on the server and
plays its episodes in it; it is closed when the worker ends, also after Ctrl-C or a failure. A task is a number of the
server's own. AgentGym knows one end, ``done``: a server's own step limit counts as the world's end.

An answer that the protocol does not allow is a failure of the episode, and so is ``{"error": ...}``: what an action
that is not understood brings is an observation.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from real_envs.agentgym_session import AgentGymSession, AgentGymSettings, close_left_open, numbers_of
from real_envs.behaviours import Agent, mixture
from real_envs.env import Task
from real_envs.servers import (
    INVALID,
    LANGUAGE,
    ServerGame,
    ServerTasks,
    begun,
    commands_of,
    read_server_tasks,
    write_server_tasks,
)
from real_envs.streams import stream_seed
from real_envs.task_file import draw_distinct


class AgentGym:
    """``env=agentgym`` (a ``World``)."""

    name: ClassVar[str] = "agentgym"
    settings: ClassVar[type[AgentGymSettings]] = AgentGymSettings
    invalid: ClassVar[str] = INVALID
    elsewhere: ClassVar[bool] = False  # there is no plan to take commands from

    def generate(
        self,
        folder: Path,
        counts: Mapping[str, int],
        seed: int,
        settings: AgentGymSettings,
        progress: Callable[[int, int], None],
        workers: int,
    ) -> None:
        """Draws tasks until enough of them start differently from all others. A server may move: ``url`` makes no task.

        Raises:
            UserError: no server answers, it does not keep the protocol, or has not so many different starts.
        """
        session = AgentGymSession(settings)

        def check() -> None:
            begun(session.start({"task": str(numbers_of(settings.train)[0])}))
            session.act(commands_of(settings.commands)[0])

        draw = partial(_draw, session, counts, seed, settings, progress)
        write_server_tasks(folder, settings, seed, counts, session, check, draw)

    def open(self, folder: Path, privileged: bool, workers: int) -> ServerTasks:
        settings, drawn = read_server_tasks(folder, AgentGymSettings)
        splits = {
            split: [Task(f"agentgym-{number}", {"task": str(number)}) for number in numbers]
            for split, numbers in drawn.items()
        }
        left_open = Path(tempfile.mkdtemp(prefix="imagination-agentgym-"))
        make = partial(AgentGymSession, settings, left_open)
        game = partial(ServerGame, make, commands_of(settings.commands), privileged)
        return ServerTasks(
            splits, game, workers, settings.timeout, at_end=partial(close_left_open, settings.url, left_open)
        )

    def behaviours(self, elsewhere: Sequence[str]) -> Sequence[tuple[Agent, float]]:
        return mixture(elsewhere, LANGUAGE)


def _draw(
    session: AgentGymSession,
    counts: Mapping[str, int],
    seed: int,
    settings: AgentGymSettings,
    progress: Callable[[int, int], None],
) -> dict[str, list[int]]:
    def candidates(split: str, _: int) -> list[int]:
        numbers = numbers_of(option[split])
        random.Random(stream_seed(f"agentgym/{split}", seed)).shuffle(numbers)
        return numbers

    def start_of(number: int) -> str:
        return begun(session.start({"task": str(number)})).text if settings.distinct else str(number)

    def too_few(split: str, found: int) -> str:
        return (
            f"env.options.{split}={option[split]} has too few tasks that start differently for "
            f"games.{split}={counts[split]}: {found} found; name more, or take them as they are by "
            "env.options.distinct=false"
        )

    option = {split: settings.train if split == "train" else settings.heldout for split in counts}
    return draw_distinct(counts, candidates, start_of, progress, too_few)
