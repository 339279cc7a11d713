"""Any AgentGym server as a real environment, over its HTTP protocol; nothing needs to be installed for it.

``env=agentgym env.options.url=http://127.0.0.1:36001``. A worker process creates one environment on the server and
plays its episodes in it; it is closed when the worker ends, also after Ctrl-C or a failure. A task is a number of the
server's own. AgentGym knows one end, ``done``: a server's own step limit counts as the world's end.

An answer that the protocol does not allow is a failure of the episode, and so is ``{"error": ...}``: what an action
that is not understood brings is an observation.

Servers differ in how they name things. ``/create`` answers ``{"id": 3}``, ``{"env_idx": 3}`` or a bare ``3``, and later
requests carry the handle as ``id`` or ``env_idx``; texts are called ``observation`` or ``state``; ``/reset`` answers an
object, a text, or a list that begins with one. Errors come as ``{"error": ...}`` with HTTP status 200.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import httpx

from real_envs.chat_server import is_local
from real_envs.seeding import derive_seed
from real_envs.worlds.servers.client import (
    FAREWELL,
    ServerReply,
    ServerSession,
    ServerSettings,
    ServerWorld,
    begun,
    check_url,
    commands_of,
    crashed,
    field,
    fields_of,
    flag,
    number,
    text,
    timed_out,
)

_HANDLES = ("id", "env_idx")
_TEXTS = ("observation", "state")
_LARGEST = 16 * 2**20  # bytes of an answer
_MOST_TASKS = 1_000_000


@dataclass(frozen=True, slots=True)
class AgentGymSettings(ServerSettings):
    """Which server, how its messages are read, and which of its tasks are played.

    Attributes:
        train, heldout: the numbers of the tasks of each split, such as ``0-373+400``.
    """

    url: str = "http://127.0.0.1:36001"  #: ``http://host:port``, with a path where the server has one
    #: the field of ``/reset`` that takes a task's number: ``data_idx``, ``game``, ``session_id``, ``item_id``
    task: str = "data_idx"
    create: str = ""  #: fields that ``/create`` wants, ``name=text,name=text``
    reset: str = ""  #: other fields that ``/reset`` wants, such as ``world_type=Text``
    reward: str = "reward"  #: the field of what an action earned
    score: str = ""  #: the field of what the episode has earned so far, to be read instead of ``reward``
    train: str = "0-99"
    heldout: str = "100-199"

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        check_url(self.url, ("http", "https"))
        if not self.task or not (self.reward or self.score):
            raise ValueError("task and reward must not be empty")
        fields_of(self.create)
        fields_of(self.reset)
        both = set(numbers_of(self.train)) & set(numbers_of(self.heldout))
        if both:
            raise ValueError(f"train and heldout share tasks, such as {min(both)}")


def numbers_of(option: str) -> list[int]:
    """``0-3+7`` as 0, 1, 2, 3, 7.

    Raises:
        ValueError: it is not of that form, or names no tasks or more than a million.
    """
    ranges = []
    for part in option.replace(" ", "").split("+"):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and "-" not in last and part[-1] != "-"):
            raise ValueError(f"tasks are written first-last+first-last, got {option!r}")
        ranges.append(range(int(first), int(last or first) + 1))
    if not all(ranges) or sum(map(len, ranges)) > _MOST_TASKS:
        raise ValueError(f"tasks must be 1 to {_MOST_TASKS:,}, got {option!r}")
    return sorted({number for numbers in ranges for number in numbers})


class AgentGymSession:
    """An environment that ``/create`` made, until ``close`` (a ``ServerSession``).

    Args:
        left_open: a folder where the handle is written down while the environment is open, for ``close_left_open``.
    """

    def __init__(self, settings: AgentGymSettings, left_open: Path | None = None) -> None:
        self._settings, self._left_open = settings, left_open
        self._handle: dict[str, int | str] | None = None
        self._farewell: Callable[[], object] | None = None
        self._score = 0.0
        self._client: httpx.Client | None = None

    def start(self, spec: Mapping[str, str]) -> ServerReply:
        settings = self._settings
        handle = self._handle or self._create()
        if settings.task in handle:
            raise crashed(
                f"the server's handle is called {settings.task!r} like the task's number: set env.options.task"
            )
        wanted = {**fields_of(settings.reset), **handle, settings.task: int(spec["task"])}
        answer = self._ask("POST", "reset", wanted)
        self._score = 0.0
        if settings.score and isinstance(answer, dict) and settings.score in answer:
            self._score = number(answer[settings.score], settings.score)
        first = answer[0] if isinstance(answer, list) and answer else answer
        if first is None or (isinstance(first, dict) and not any(name in first for name in _TEXTS)):
            first = self._ask("GET", "observation", handle)  # a reset may say no more than that it was done
        if isinstance(first, str):
            return ServerReply(text(first, "observation"))
        goal = field(first, "task_description") if isinstance(first, dict) and "task_description" in first else ""
        parts = [text(goal, "task_description"), _text_of(first)]
        done = flag(first["done"], "done") if isinstance(first, dict) and "done" in first else False
        return ServerReply("\n".join(part for part in parts if part), 0.0, done, _commands_of(first))

    def act(self, action: str) -> ServerReply:
        settings = self._settings
        if self._handle is None:
            raise crashed("there is no environment on the server: start first")
        answer = self._ask("POST", "step", {**self._handle, "action": action})
        name = settings.score or settings.reward
        earned = number(field(answer, name), name)
        if settings.score:
            earned, self._score = earned - self._score, earned
        return ServerReply(
            _text_of(answer), earned / settings.solved, flag(field(answer, "done"), "done"), _commands_of(answer)
        )

    def close(self) -> None:
        self._handle = None
        if self._farewell is not None:
            farewell, self._farewell = self._farewell, None
            farewell()
        if self._client is not None:
            client, self._client = self._client, None
            client.close()

    def _create(self) -> dict[str, int | str]:
        answer = self._ask("POST", "create", fields_of(self._settings.create))
        handle = answer
        name = "env_idx"
        if isinstance(answer, dict):
            name = next((known for known in _HANDLES if known in answer), "id")
            handle = field(answer, name)
        if isinstance(handle, bool) or not isinstance(handle, (int, str)) or handle == "":
            raise crashed(f"the server's /create answered {answer!r}, which has no handle")
        self._handle = {name: handle}
        note = self._left_open / uuid.uuid4().hex if self._left_open else None
        # also at the exit of a worker whose parent died while it answered, which ends by an error
        self._farewell = weakref.finalize(self, _close, self._settings.url, self._handle, note)
        if note is not None:
            try:
                note.write_text(json.dumps(self._handle))  # not to disk: it outlives this process, not the machine
            except OSError as error:
                raise crashed(f"the handle cannot be written down: {error}") from error
        return self._handle

    def _ask(self, method: str, path: str, content: Mapping[str, object]) -> object:
        """The answer, read as JSON; raises ``EnvFailure`` where there is none in time, no HTTP 200, no JSON, or an
        error.
        """
        settings = self._settings
        what = f"/{path} at {settings.url}"
        if self._client is None:
            # A connection that is kept may be closed by the server just as the next action is sent: none is kept.
            self._client = httpx.Client(
                timeout=settings.timeout,
                limits=httpx.Limits(max_keepalive_connections=0),
                trust_env=not is_local(settings.url),
            )
        sent = {"params": content} if method == "GET" else {"json": content}
        deadline = time.monotonic() + settings.timeout
        body = bytearray()
        try:
            with self._client.stream(method, f"{settings.url.rstrip('/')}/{path}", **sent) as response:  # type: ignore[arg-type]
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > _LARGEST:
                        raise crashed(f"{what} answered more than {_LARGEST:,} bytes")
                    if time.monotonic() > deadline:  # the client's time-out is of each read
                        raise timed_out(f"{what} took longer than {settings.timeout:g} s")
                status = response.status_code
        except httpx.TimeoutException:
            raise timed_out(f"{what} took longer than {settings.timeout:g} s") from None
        except httpx.ConnectError as error:
            raise crashed(f"no AgentGym server answers at {settings.url} ({error})") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise crashed(f"the server dropped the connection in {what} ({error or type(error).__name__})") from None
        if status != 200:
            raise crashed(f"{what} answered HTTP {status} {body[:300].decode(errors='replace')}")
        try:
            answer: object = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise crashed(f"{what} answered no JSON ({error}): {body[:100].decode(errors='replace')!r}") from None
        if isinstance(answer, dict) and answer.get("error"):
            raise crashed(f"{what} answered the error {answer['error']!r}")
        return answer


def _text_of(answer: object) -> str:
    name = next((known for known in _TEXTS if isinstance(answer, dict) and known in answer), _TEXTS[0])
    return text(field(answer, name), name)


def _commands_of(answer: object) -> tuple[str, ...]:
    offered = answer.get("available_actions") if isinstance(answer, dict) else None
    if offered is None:
        return ()
    if not isinstance(offered, list):
        raise crashed(f"the server's 'available_actions' are {offered!r}, no list")
    return tuple(text(command, "available_actions") for command in offered)


def _close_handle(url: str, handle: Mapping[str, int | str]) -> bool:
    """Whether the server has heard it. What it answers changes nothing: some know no ``/close``."""
    try:
        httpx.post(f"{url.rstrip('/')}/close", json=dict(handle), timeout=FAREWELL, trust_env=not is_local(url))
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        return False
    return True


def _close(url: str, handle: Mapping[str, int | str], note: Path | None) -> None:
    if _close_handle(url, handle) and note is not None:
        note.unlink(missing_ok=True)


def close_left_open(url: str, folder: Path) -> None:
    """Closes the environments whose handles are still noted in ``folder``, and removes it.

    A worker that was killed, as all are at Ctrl-C, could not close its own.
    """
    for note in sorted(folder.glob("*")):
        try:
            handle = json.loads(note.read_text())
        except (OSError, ValueError):
            handle = None
        if isinstance(handle, dict):
            _close_handle(url, handle)
        note.unlink(missing_ok=True)
    with suppress(OSError):  # a worker that is just ending has noted something
        folder.rmdir()


class AgentGym(ServerWorld):
    """``env=agentgym`` (a ``World``)."""

    name: ClassVar[str] = "agentgym"
    settings: ClassVar[type[AgentGymSettings]] = AgentGymSettings
    session: ClassVar[type[AgentGymSession]] = AgentGymSession
    key: ClassVar[str] = "task"
    prefix: ClassVar[str] = "agentgym-"

    def for_workers(self, settings: AgentGymSettings) -> tuple[Callable[[], ServerSession], Callable[[], None]]:
        left_open = Path(tempfile.mkdtemp(prefix="imagination-agentgym-"))
        return partial(AgentGymSession, settings, left_open), partial(close_left_open, settings.url, left_open)

    def check(self, session: ServerSession, settings: AgentGymSettings, folder: Path) -> None:
        begun(session.start({"task": str(numbers_of(settings.train)[0])}))
        session.act(commands_of(settings.commands)[0])

    def candidates(self, settings: AgentGymSettings, seed: int) -> Callable[[str, int], list[int]]:
        def shuffled(split: str, count: int) -> list[int]:
            numbers = numbers_of(_option(settings, split))
            random.Random(derive_seed(f"agentgym/{split}", seed)).shuffle(numbers)
            return numbers

        return shuffled

    def too_few(self, settings: AgentGymSettings, split: str, count: int, enough: int) -> str:
        return (
            f"env.options.{split}={_option(settings, split)} has too few tasks that start differently for "
            f"games.{split}={count}: {enough} found; name more, or take them as they are by env.options.distinct=false"
        )


def _option(settings: AgentGymSettings, split: str) -> str:
    return settings.train if split == "train" else settings.heldout
