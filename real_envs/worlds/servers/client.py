"""What worlds behind a server share: an episode over a session, checked answers, and something for scripted agents.

A server is somebody else's program. Whatever it answers that the protocol does not allow is a failure of the episode
(``EnvFailure``), never an observation: a policy must not learn from a broken reply.
"""

from __future__ import annotations

import asyncio
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from real_envs.env import EnvFailure, StepResult, Task
from real_envs.errors import UserError
from real_envs.scripted_agents import Language
from real_envs.trajectory import Observation, StopReason
from real_envs.worker_pool import PooledTasks, SyncEnv
from real_envs.worlds.generated import read_tasks, write_tasks

S = TypeVar("S")
UNKNOWN = "Unknown action."
# As the known servers answer what they do not understand; another server's words are told from no others.
INVALID = (
    r"Unknown (?:action|command)|Invalid (?:action|command)|No known action matches|Nothing happen|"
    r"Could not (?:find|execute)|not (?:a valid|recognized as an) action"
)
# Of servers whose own commands are few; most of it is not understood.
LANGUAGE = Language({"take {a}": 2, "go to {a}": 2, "open {a}": 2, "use {a}": 1, "put {a} in {b}": 1, "go {d}": 1})
_JOINTS = re.compile(r"\b(?:to|from|into|in|on|onto|with|at|using)\b")
_LONGEST = 300  # letters of a failure's detail


@dataclass(frozen=True, slots=True)
class Said:
    """A server's answer. ``commands`` are those that it offers now, where it offers any."""

    text: str
    reward: float | None = 0.0
    done: bool = False
    commands: tuple[str, ...] = ()


class Session(Protocol):
    """One environment of a server. Both methods raise ``EnvFailure`` and nothing else for the server's faults."""

    def start(self, spec: Mapping[str, str]) -> Said:
        """A new episode of the task, also where another one was under way."""
        ...

    def act(self, action: str) -> Said: ...

    def close(self) -> None:
        """Frees what the server holds; never raises, and ``start`` may follow."""
        ...


class ServerGame:
    """One episode at a time over a session (a ``SyncEnv``; play it in a worker).

    Args:
        make: the session; it must be picklable.
        commands: for scripted agents, where the server offers none.
        privileged: also give them in ``Observation.privileged``; a server has no plan to give.
    """

    def __init__(self, make: Callable[[], Session], commands: Sequence[str], privileged: bool = False) -> None:
        self._session, self._commands, self._privileged = make(), tuple(commands), privileged
        self._running = False

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the task that ``task.spec`` names; ``seed`` changes nothing.

        Raises:
            EnvFailure: the server cannot be reached, takes too long or answers nonsense.
        """
        self._running = False
        try:
            said = begun(self._session.start(task.spec))
        except EnvFailure:
            self._session.close()  # the worker ends with this failure, and the server would keep the session for ever
            raise
        self._running = True
        return self._observe(said)

    def step(self, action: str) -> StepResult:
        """
        Raises:
            EnvFailure: as ``reset``.
            RuntimeError: no reset, or the episode is over.
        """
        if not self._running:
            raise RuntimeError("no episode is running: reset first")
        try:
            # half a surrogate pair, which a sampled text may hold, is no text that can be sent
            said = self._session.act(action.encode("utf-8", "replace").decode())
        except EnvFailure:
            self._running = False
            self._session.close()
            raise
        self._running = not said.done
        return StepResult(self._observe(said), said.reward, said.done, False)

    def close(self) -> None:
        self._running = False
        self._session.close()

    def _observe(self, said: Said) -> Observation:
        return Observation(said.text, hidden(said.commands or self._commands) if self._privileged else {})


def hidden(commands: Sequence[str]) -> dict[str, object]:
    """What scripted agents read, from commands alone: the things are what the commands name after their verbs."""
    named = {part.strip() for command in commands for part in _JOINTS.split(command.partition(" ")[2])}
    return {
        "admissible_commands": list(commands),
        "policy_commands": [],
        "inventory": "",
        "entities": sorted(named - {""}),
    }


class ServerTasks(PooledTasks):
    """Tasks whose workers wait longer than ``timeout``, after which a session gives up on its server by itself.

    A session that gives up can still free what the server holds; a worker that is killed cannot.

    Args:
        timeout: seconds that a session waits for an answer.
        at_end: called once, when the tasks are closed or, after Ctrl-C, when the process ends.
    """

    def __init__(
        self,
        splits: Mapping[str, Sequence[Task]],
        factory: Callable[[], SyncEnv],
        workers: int,
        timeout: float,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        # a step may be followed by a farewell; a reset may make an environment anew, twice, and the process before it
        super().__init__(splits, factory, workers, step_timeout=timeout + 15, reset_timeout=4 * timeout + 45)
        # of the pool, which environments hold on to: these tasks may be forgotten before
        self._at_end = weakref.finalize(self.pool, at_end) if at_end else None

    async def close(self) -> None:
        await super().close()
        if self._at_end is not None:
            await asyncio.to_thread(self._at_end)


def write_server_tasks(
    folder: Path,
    settings: Any,
    seed: int,
    counts: Mapping[str, int],
    session: Session,
    check: Callable[[], object],
    draw: Callable[[], dict[str, list[int]]],
) -> None:
    """Writes the numbers that ``draw`` gives; see ``write_tasks``. A server may move: ``settings.url`` makes no task.

    Args:
        session: closed in the end.
        check: whether the server can be played as the settings say, asked also where nothing is drawn.

    Raises:
        UserError: it cannot, or it has not so many tasks.
    """
    try:
        check()
        write_tasks(folder, settings, seed, counts, draw, url=settings.url)
    except EnvFailure as failure:
        raise UserError(f"{failure}; start a server there, or set env.options.url and the other env.options") from None
    finally:
        session.close()


def read_server_tasks(folder: Path, settings: type[S]) -> tuple[S, dict[str, list[int]]]:
    """The settings that ``write_server_tasks`` was given, and the numbers by split."""
    data = read_tasks(folder)
    return settings(**{**data["made_by"]["settings"], "url": data["url"]}), data["splits"]


def begun(said: Said) -> Said:
    """The answer to a reset, if an episode can begin with it.

    Raises:
        EnvFailure: it cannot.
    """
    if said.done:
        raise crashed("the server's reset says that the episode is over")
    if not said.text.strip():
        raise crashed("the server's reset has no text")
    return said


def crashed(detail: str) -> EnvFailure:
    return EnvFailure(StopReason.ENV_CRASHED, in_a_line(detail))


def timed_out(detail: str) -> EnvFailure:
    return EnvFailure(StopReason.ENV_TIMEOUT, in_a_line(detail))


def in_a_line(detail: str) -> str:
    line = " ".join(detail.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def field(answer: object, name: str) -> object:
    """
    Raises:
        EnvFailure: the answer is no object, or has no such field.
    """
    if not isinstance(answer, dict):
        raise crashed(f"the server answered {answer!r}, which is no object with '{name}'")
    if name not in answer:
        raise crashed(f"the server's answer has no '{name}', only {', '.join(map(str, answer)) or 'nothing'}")
    return answer[name]


def text(value: object, name: str) -> str:
    """
    Raises:
        EnvFailure: it is no text.
    """
    if not isinstance(value, str):
        raise crashed(f"the server's '{name}' is {value!r}, no text")
    return value.encode("utf-8", "replace").decode()


def number(value: object, name: str) -> float:
    """
    Raises:
        EnvFailure: it is no finite number. ``true`` and ``false`` are 1 and 0.
    """
    try:
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int beyond all floats
        pass
    raise crashed(f"the server's '{name}' is {value!r}, no finite number")


def flag(value: object, name: str) -> bool:
    """
    Raises:
        EnvFailure: it is neither true nor false.
    """
    if not isinstance(value, bool):
        raise crashed(f"the server's '{name}' is {value!r}, neither true nor false")
    return value


def commands_of(option: str) -> tuple[str, ...]:
    """``look|go north`` as commands."""
    return tuple(command.strip() for command in option.split("|") if command.strip())


def fields_of(option: str) -> dict[str, str]:
    """``kind=text,world=2`` as fields of a request.

    Raises:
        ValueError: it is not of that form.
    """
    if option and not re.fullmatch(r"\w+=[^,]*(,\w+=[^,]*)*", option):
        raise ValueError(f"fields are written name=text,name=text, got {option!r}")
    return dict(pair.split("=", 1) for pair in option.split(",")) if option else {}


def check_url(url: str, schemes: Sequence[str]) -> None:
    """
    Raises:
        ValueError: it is no address of that kind.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        good = False
    if not good:
        raise ValueError(f"url wants {' or '.join(f'{scheme}://host:port' for scheme in schemes)}, got {url!r}")
