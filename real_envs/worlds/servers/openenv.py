"""Any OpenEnv server as a real environment, over its WebSocket, by the client of ``openenv-core``.

``pip install 'imagination[openenv]'``, then ``env=openenv env.options.url=ws://127.0.0.1:8000``. An episode has a
socket of its own, hence a session of its own; it is closed when the episode is over or the worker ends. A task is a
seed, passed to ``reset``. OpenEnv knows one end, ``done``: a server's own step limit counts as the world's end.

Every worker needs a session: the server's environment has to set ``SUPPORTS_CONCURRENT_SESSIONS``, and its
``max_concurrent_envs`` has to be ``collect.workers`` or more.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from real_envs.errors import UserError
from real_envs.seeding import derive_seed
from real_envs.worlds.servers.client import (
    FAREWELL,
    UNKNOWN,
    ServerReply,
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

_TRIES = 30  # seeds drawn for each task, before the server is said to have no more that start differently
_PATIENCE = (0.1, 0.3, 1.0)  # seconds until a full server is asked again: sessions just closed are still being freed
_CODE = re.compile(r"\(code: (\w+)\)$")  # the client puts an error's code at the end of its message


@dataclass(frozen=True, slots=True)
class OpenEnvSettings(ServerSettings):
    """Which server, and how its messages are read."""

    url: str = "ws://127.0.0.1:8000"  #: ``ws://host:port`` or ``http://host:port``
    action: str = "message"  #: the field of an action that takes the text
    fixed: str = ""  #: other fields that an action needs, ``name=text,name=text``
    text: str = ""  #: the fields of an observation that are its text, joined by ``+``; empty takes all that are text
    commands: str = "look|inventory|help"

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        check_url(self.url, ("ws", "wss", "http", "https"))
        if not self.action:
            raise ValueError("action must not be empty")
        fields_of(self.fixed)


def _client_modules() -> tuple[Any, Any]:
    """``env_client`` and ``sync_client`` of ``openenv.core`` without what that imports itself: servers and their web
    pages (gradio), eight seconds of every worker's start, of which clients need nothing."""
    package = "openenv.core"
    loaded = package in sys.modules
    if not loaded:
        spec = importlib.util.find_spec(package)
        assert spec is not None, "OpenEnv() looked for it"
        sys.modules[package] = importlib.util.module_from_spec(spec)  # a place for its submodules; not executed
    try:
        client, blocking = (importlib.import_module(f"{package}.{name}") for name in ("env_client", "sync_client"))
    finally:
        if not loaded:
            del sys.modules[package]  # whoever imports it later gets the whole of it
    return client, blocking


@cache
def _client_class() -> Any:
    """The package's client, which gives the server's answer as it came: its own ones fill in what is missing."""
    client, blocking = _client_modules()
    base: Any = client.EnvClient

    class Client(base):  # type: ignore[misc, unused-ignore]
        _ws: Any

        async def disconnect(self) -> None:
            socket = self._ws
            try:
                await asyncio.wait_for(super().disconnect(), FAREWELL)
            except TimeoutError:
                self._ws = None
                socket.transport.abort()

        def sync(self) -> Any:
            return blocking.SyncEnvClient(self)

        def _step_payload(self, action: dict[str, str]) -> dict[str, str]:
            return action

        def _parse_result(self, payload: object) -> object:
            return payload

        def _parse_state(self, payload: object) -> object:
            return payload

    return Client


class _Refused(Exception):
    """The server does not take the fields of an action."""


class _Full(Exception):
    """The server has no session left."""


class OpenEnvSession:
    """An environment of the server, on a socket that lasts for an episode (a ``ServerSession``)."""

    def __init__(self, settings: OpenEnvSettings) -> None:
        self._settings = settings
        self._fixed = fields_of(settings.fixed)
        self._client: Any = None

    def start(self, spec: Mapping[str, str]) -> ServerReply:
        for wait in (*_PATIENCE, None):
            self.close()
            limit, self._client = self._settings.timeout, None
            client = _client_class()(
                self._settings.url, connect_timeout_s=limit, message_timeout_s=limit, mode="simulation"
            )
            self._client = client.sync()
            try:
                self._call("connect")
                return self._read(self._call("reset", seed=int(spec["seed"])), reset=True)
            except _Full:
                if wait is None:
                    break
                time.sleep(wait)
            except _Refused:
                raise crashed(f"the server at {self._settings.url} refuses a reset with a seed") from None
        raise crashed(
            f"the server at {self._settings.url} has no session left: it needs SUPPORTS_CONCURRENT_SESSIONS and "
            "max_concurrent_envs of collect.workers or more"
        )

    def act(self, action: str) -> ServerReply:
        """Text that the server's type of action does not take, such as words for a number, is an unknown action."""
        try:
            return self.attempt(action)
        except _Refused:
            return ServerReply(UNKNOWN)

    def attempt(self, action: str) -> ServerReply:
        """``act``, but raises ``_Refused`` for an action without the fields or values that the server wants."""
        try:
            answer = self._read(self._call("step", {**self._fixed, self._settings.action: action}))
        except _Full:
            raise crashed(f"the server at {self._settings.url} closed the session") from None
        if answer.done:
            self.close()
        return answer

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.close()

    def _call(self, method: str, *arguments: object, **named: object) -> Any:
        """What the client's method returns.

        Raises:
            _Full, _Refused: the server says so.
            EnvFailure: anything else that can go wrong between the client and the server.
        """
        from websockets.exceptions import ConnectionClosedOK, WebSocketException

        url = self._settings.url
        try:
            return getattr(self._client, method)(*arguments, **named)
        except TimeoutError:
            raise timed_out(f"{method} at {url} took longer than {self._settings.timeout:g} s") from None
        except ConnectionError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise timed_out(f"{url} did not open a socket within {self._settings.timeout:g} s") from None
            raise crashed(f"no OpenEnv server answers at {url} ({error.__cause__ or error})") from None
        except ConnectionClosedOK:  # in good order and without an answer: a full server does so
            raise _Full from None
        except WebSocketException as error:
            raise crashed(f"the server at {url} dropped the connection in {method} ({error})") from None
        except RuntimeError as error:
            code = _CODE.search(str(error))
            if code and code[1] == "CAPACITY_REACHED":
                raise _Full from None
            if code and code[1] == "VALIDATION_ERROR":
                raise _Refused from None
            raise crashed(f"{method} at {url}: {error}") from None
        except (ValueError, AttributeError) as error:  # the client takes for granted that it is JSON, and an object
            raise crashed(f"the server at {url} answered {method} with no OpenEnv message ({error})") from None

    def _read(self, answer: object, reset: bool = False) -> ServerReply:
        seen = field(answer, "observation")
        if not isinstance(seen, dict):
            raise crashed(f"the server's 'observation' is {seen!r}, no object")
        wanted = (
            self._settings.text.split("+") if self._settings.text else [k for k in seen if isinstance(seen[k], str)]
        )
        if not wanted:
            raise crashed(f"the server's observation has no text among {', '.join(seen) or 'nothing'}")
        parts = [_lines(field(seen, name), name) for name in wanted]
        reward = field(answer, "reward")
        earned = None if reward is None else number(reward, "reward") / self._settings.solved
        done = flag(field(answer, "done"), "done")
        return ServerReply("\n".join(part for part in parts if part), 0.0 if reset else earned, done)


def _lines(value: object, name: str) -> str:
    return "\n".join(text(line, name) for line in value) if isinstance(value, list) else text(value, name)


class OpenEnv(ServerWorld):
    """``env=openenv`` (a ``World``)."""

    name: ClassVar[str] = "openenv"
    settings: ClassVar[type[OpenEnvSettings]] = OpenEnvSettings
    session: ClassVar[type[OpenEnvSession]] = OpenEnvSession
    key: ClassVar[str] = "seed"
    prefix: ClassVar[str] = "openenv-s"

    def __init__(self) -> None:
        if importlib.util.find_spec("openenv") is None:
            raise ImportError("No module named 'openenv'; run `pip install 'imagination[openenv]'`")

    def check(self, session: OpenEnvSession, settings: OpenEnvSettings, folder: Path) -> None:
        begun(session.start({"seed": "0"}))
        command = commands_of(settings.commands)[0]
        try:
            session.attempt(command)
        except _Refused:
            raise UserError(
                f"the server at {settings.url} refuses the action {settings.action}={command!r}: name the field of its "
                "text in env.options.action, others that it needs in env.options.fixed (GET /schema lists them), and "
                "commands that it takes in env.options.commands"
            ) from None

    def candidates(self, settings: OpenEnvSettings, seed: int) -> Callable[[str, int], Iterable[int]]:
        rng = random.Random(derive_seed("openenv", seed))
        return lambda split, count: (rng.randrange(2**31) for _ in range(_TRIES * count))

    def too_few(self, settings: OpenEnvSettings, split: str, count: int, enough: int) -> str:
        return (
            f"the server has too few different starts for games.{split}={count}: {enough} found among "
            f"{_TRIES * count} seeds; env.options.distinct=false takes seeds as tasks, however they start"
        )
