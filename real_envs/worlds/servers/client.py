"""What worlds behind a server share: an episode over a session, checked answers, and something for scripted agents.

A server is somebody else's program. Whatever it answers that the protocol does not allow is a failure of the episode
(``EnvFailure``), never an observation: a policy must not learn from a broken reply.
"""

from __future__ import annotations

import asyncio
import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from real_envs.env import EnvFailure, StepResult, Task
from real_envs.errors import UserError
from real_envs.panels import Panel
from real_envs.scripted_agents import CommandGrammar
from real_envs.trajectory import StopReason
from real_envs.worker_pool import PooledTasks, SyncEnv
from real_envs.worlds.generated import (
    Game,
    GeneratedWorld,
    Progress,
    Splits,
    TaskRequest,
    draw_distinct,
    hints,
    write_tasks,
)

UNKNOWN = "Unknown action."
# As the known servers answer what they do not understand; another server's words are told from no others.
INVALID = (
    r"Unknown (?:action|command)|Invalid (?:action|command)|No known action matches|Nothing happen|"
    r"Could not (?:find|execute)|not (?:a valid|recognized as an) action"
)
# Of servers whose own commands are few; most of it is not understood.
LANGUAGE = CommandGrammar.of("2 take {a} | 2 go to {a} | 2 open {a} | 1 use {a} | 1 put {a} in {b} | 1 go {d}")
_JOINTS = re.compile(r"\b(?:to|from|into|in|on|onto|with|at|using)\b")
_LONGEST = 300  # letters of a failure's detail
FAREWELL = 3.0  # seconds that closing may take: a server that hangs must not hold up the next episode


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A server's answer. ``commands`` are those that it offers now, where it offers any."""

    text: str
    reward: float | None = 0.0
    done: bool = False
    commands: tuple[str, ...] = ()


class ServerSession(Protocol):
    """One environment of a server. Both methods raise ``EnvFailure`` and nothing else for the server's faults."""

    def start(self, spec: Mapping[str, str]) -> ServerReply:
        """A new episode of the task, also where another one was under way."""
        ...

    def act(self, action: str) -> ServerReply: ...

    def close(self) -> None:
        """Frees what the server holds; never raises, and ``start`` may follow."""
        ...


class ServerGame(Game):
    """An episode over a session.

    Args:
        make: the session; it must be picklable.
        commands: for scripted agents, where the server offers none; a server has no plan to give.
    """

    def __init__(self, make: Callable[[], ServerSession], commands: Sequence[str], privileged: bool = False) -> None:
        super().__init__(privileged)
        self._simulator = self._session = make()
        self._commands = tuple(commands)
        self._offered: Sequence[str] = ()

    def _start(self, task: Task) -> str:
        return self._heard(lambda: begun(self._session.start(task.spec))).text

    def _act(self, action: str) -> StepResult:
        # half a surrogate pair, which a sampled text may hold, is no text that can be sent
        answer = self._heard(lambda: self._session.act(action.encode("utf-8", "replace").decode()))
        return StepResult(self._observation(answer.text), answer.reward, answer.done, False)

    def _heard(self, ask: Callable[[], ServerReply]) -> ServerReply:
        try:
            answer = ask()
        except EnvFailure:
            self._session.close()  # the worker ends with this failure, and the server would keep the session for ever
            raise
        self._offered = answer.commands or self._commands
        return answer

    def close(self) -> None:
        self._running = False
        self._session.close()

    def _hints(self) -> dict[str, object]:
        return hints_of(self._offered)


def hints_of(commands: Sequence[str]) -> dict[str, object]:
    """``hints`` from commands alone: the things are what the commands name after their verbs."""
    named = {part.strip() for command in commands for part in _JOINTS.split(command.partition(" ")[2])}
    return hints(commands, entities=sorted(named - {""}))


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


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Which server, and what every one of them needs."""

    url: str = ""
    solved: float = 1.0  #: the total reward of a solved task; rewards are divided by it
    #: what scripted agents choose from where the server offers none, ``look|go north|take key``
    commands: str = "look|inventory"
    distinct: bool = True  #: only tasks whose starts differ are different; false where what differs is hidden
    timeout: float = 30.0  #: seconds for an answer

    def __post_init__(self) -> None:
        if not commands_of(self.commands):
            raise ValueError("commands must not be empty")
        if not self.solved > 0 or not self.timeout > 0:
            raise ValueError("solved and timeout must be more than 0")


class ServerWorld(GeneratedWorld):
    """Base of a ``World`` behind a server: tasks are numbers. It may move: ``url`` makes no task.

    Attributes:
        session: the class of its sessions, made of the settings; picklable.
        key: of the number in ``Task.spec``.
        prefix: of the number in ``Task.id``.
        address: settings that say where the server is.
        advice: what to do where it cannot be played.
    """

    invalid: ClassVar[str] = INVALID
    language: ClassVar[CommandGrammar] = LANGUAGE
    elsewhere: ClassVar[bool] = False  # there is no plan to take commands from
    session: ClassVar[Any]
    key: ClassVar[str]
    prefix: ClassVar[str]
    address: ClassVar[tuple[str, ...]] = ("url",)
    advice: ClassVar[str] = "start a server there, or set env.options.url and the other env.options"

    def check(self, session: Any, settings: Any, folder: Path) -> None:
        """Whether the server can be played as the settings say, asked also where nothing is drawn.

        What else is to be known of it is written into the ``folder`` of the tasks.

        Raises:
            EnvFailure, UserError: it cannot.
        """
        raise NotImplementedError

    def candidates(self, settings: Any, seed: int) -> Callable[[str, int], Iterable[int]]:
        """The numbers of tasks that are tried for a split of so many, in their order."""
        raise NotImplementedError

    def too_few(self, settings: Any, split: str, count: int, enough: int) -> str:
        """What to say of a split in which only ``enough`` of ``count`` tasks start differently."""
        raise NotImplementedError

    def draw_from(self, session: Any, settings: Any, request: TaskRequest) -> Splits:
        """The tasks of each split, by the server: candidates until enough of them start differently from all others."""

        def start_of(number: int) -> str:
            return begun(session.start({self.key: str(number)})).text if settings.distinct else str(number)

        def too_few(split: str, enough: int) -> str:
            return self.too_few(settings, split, request.counts[split], enough)

        return draw_distinct(request, self.candidates(settings, request.seed), start_of, too_few)

    def generate(
        self,
        folder: Path,
        counts: Mapping[str, int],
        seed: int,
        settings: Any,
        progress: Progress,
        workers: int,
        panel: Panel | None = None,
    ) -> None:
        """See ``World``.

        Raises:
            UserError: no server answers, it cannot be played so, or has not so many different starts; or a panel is
                asked for.
        """
        if panel is not None:
            raise UserError("games.panel: tasks of a server have no panels, as nobody knows which version it runs")
        session, request = self.session(settings), TaskRequest(counts, seed, progress)
        address = {name: getattr(settings, name) for name in self.address}
        try:
            self.check(session, settings, folder)
            write_tasks(folder, settings, request, partial(self.draw_from, session, settings, request), **address)
        except EnvFailure as failure:
            raise UserError(f"{failure}; {self.advice}") from None
        finally:
            session.close()

    def task(self, drawn: Any, settings: Mapping[str, Any]) -> Task:
        return Task(f"{self.prefix}{drawn}", {self.key: str(drawn)})

    def for_workers(self, settings: Any) -> tuple[Callable[[], ServerSession], Callable[[], None] | None]:
        """What makes the sessions of workers, picklable; and what is called in the end, see ``ServerTasks``."""
        return partial(self.session, settings), None

    def open(self, folder: Path, privileged: bool, workers: int) -> ServerTasks:
        options, splits = self.drawn(folder)
        settings = self.settings(**options)
        make, at_end = self.for_workers(settings)
        game = partial(ServerGame, make, commands_of(settings.commands), privileged)
        return ServerTasks(splits, game, workers, settings.timeout, at_end)


def begun(answer: ServerReply) -> ServerReply:
    """The answer to a reset; raises ``EnvFailure`` where no episode can begin with it."""
    if answer.done:
        raise crashed("the server's reset says that the episode is over")
    if not answer.text.strip():
        raise crashed("the server's reset has no text")
    return answer


def crashed(detail: str) -> EnvFailure:
    return EnvFailure(StopReason.ENV_CRASHED, in_a_line(detail))


def timed_out(detail: str) -> EnvFailure:
    return EnvFailure(StopReason.ENV_TIMEOUT, in_a_line(detail))


def in_a_line(detail: str) -> str:
    line = " ".join(detail.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def field(answer: object, name: str) -> object:
    """Raises ``EnvFailure`` where the answer is no object, or has no such field."""
    if not isinstance(answer, dict):
        raise crashed(f"the server answered {answer!r}, which is no object with '{name}'")
    if name not in answer:
        raise crashed(f"the server's answer has no '{name}', only {', '.join(map(str, answer)) or 'nothing'}")
    return answer[name]


def text(value: object, name: str) -> str:
    """Raises ``EnvFailure`` where it is no text."""
    if not isinstance(value, str):
        raise crashed(f"the server's '{name}' is {value!r}, no text")
    return value.encode("utf-8", "replace").decode()


def number(value: object, name: str) -> float:
    """Raises ``EnvFailure`` where it is no finite number. ``true`` and ``false`` are 1 and 0."""
    try:
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int beyond all floats
        pass
    raise crashed(f"the server's '{name}' is {value!r}, no finite number")


def flag(value: object, name: str) -> bool:
    """Raises ``EnvFailure`` where it is neither true nor false."""
    if not isinstance(value, bool):
        raise crashed(f"the server's '{name}' is {value!r}, neither true nor false")
    return value


def commands_of(option: str) -> tuple[str, ...]:
    """``look|go north`` as commands."""
    return tuple(command.strip() for command in option.split("|") if command.strip())


def fields_of(option: str) -> dict[str, str]:
    """``kind=text,world=2`` as fields of a request; raises ``ValueError`` where it is not of that form."""
    if option and not re.fullmatch(r"\w+=[^,]*(,\w+=[^,]*)*", option):
        raise ValueError(f"fields are written name=text,name=text, got {option!r}")
    return dict(pair.split("=", 1) for pair in option.split(",")) if option else {}


def check_url(url: str, schemes: Sequence[str]) -> None:
    """Raises ``ValueError`` where it is no address of that kind."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        good = False
    if not good:
        raise ValueError(f"url wants {' or '.join(f'{scheme}://host:port' for scheme in schemes)}, got {url!r}")
