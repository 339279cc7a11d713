"""Any AgentGym server as a real environment, over its HTTP protocol; nothing needs to be installed for it.

``env=agentgym env.options.url=http://127.0.0.1:36001``. A worker process creates one environment on the server and
plays its episodes in it; it is closed when the worker ends, also after Ctrl-C or a failure. A task is a number of the
server's own. AgentGym knows one end, ``done``: a server's own step limit counts as the world's end.

An answer that the protocol does not allow is a failure of the episode, and so is ``{"error": ...}``: what an action
that is not understood brings is an observation.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import ClassVar

from real_envs.agentgym_session import AgentGymSession, AgentGymSettings, close_left_open, numbers_of
from real_envs.behaviours import Agent, mixture
from real_envs.env import EnvFailure, Task
from real_envs.errors import UserError
from real_envs.files import write_atomically
from real_envs.servers import INVALID, LANGUAGE, ServerGame, ServerTasks, begun, commands_of
from real_envs.streams import stream_seed
from real_envs.world import FILE


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
        made_by = {"settings": {**asdict(settings), "url": ""}, "seed": seed, "counts": dict(counts)}
        path = folder / FILE
        known = json.loads(path.read_text()) if path.exists() else {}
        session = AgentGymSession(settings)
        try:
            begun(session.start({"task": str(numbers_of(settings.train)[0])}))
            session.act(commands_of(settings.commands)[0])
            if known.get("made_by") == made_by:
                splits = known["splits"]
            else:
                splits = _draw(session, counts, seed, settings, progress)
        except EnvFailure as failure:
            raise UserError(
                f"{failure}; start a server there, or set env.options.url and the other env.options"
            ) from None
        finally:
            session.close()
        data = {"made_by": made_by, "url": settings.url, "splits": splits}
        if data != known:
            write_atomically(path, json.dumps(data, indent=1))

    def open(self, folder: Path, privileged: bool, workers: int) -> ServerTasks:
        data = json.loads((folder / FILE).read_text())
        settings = AgentGymSettings(**{**data["made_by"]["settings"], "url": data["url"]})
        splits = {
            split: [Task(f"agentgym-{number}", {"task": str(number)}) for number in numbers]
            for split, numbers in data["splits"].items()
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
    starts: set[str] = set()
    splits: dict[str, list[int]] = {split: [] for split in counts}
    for split, count in counts.items():
        option = settings.train if split == "train" else settings.heldout
        numbers = numbers_of(option)
        random.Random(stream_seed(f"agentgym/{split}", seed)).shuffle(numbers)
        for number in numbers:
            if len(splits[split]) == count:
                break
            start = begun(session.start({"task": str(number)})).text if settings.distinct else str(number)
            if start not in starts:
                starts.add(start)
                splits[split].append(number)
                progress(sum(map(len, splits.values())), sum(counts.values()))
        if len(splits[split]) < count:
            raise UserError(
                f"env.options.{split}={option} has too few tasks that start differently for games.{split}={count}: "
                f"{len(splits[split])} found; name more, or take them as they are by env.options.distinct=false"
            )
    return splits
