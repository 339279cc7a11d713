"""The web application: every protocol over the same sessions, the page to play by hand, metrics, and its port."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from imagination.report.page import render_play_page
from imagination.serving.http import Gate, endpoint, json_response, read_body, read_object
from imagination.serving.openenv import OpenEnvSocket, schema
from imagination.serving.sessions import DreamSession, DreamWorld, Refusal, Refused, Sessions, SessionStep
from real_envs.errors import UserError

_NEAREST = 3  # logged transitions beside a dreamed one
_QUERY_CHARS = 20_000  # of each text of a query for them
# Until the head of a request must have arrived, on a connection that is kept as well: clients close theirs after 5 s
# (httpx), and a server that does it at the same time hangs up on a request.
_HEAD_SECONDS = 20.0
_SHUTDOWN_SECONDS = 5  # for steps under way, after Ctrl-C


def make_app(world: DreamWorld, gate: Gate) -> ASGIApp:
    """The application; it has to run on one event loop, that of the world's engine."""
    sessions = Sessions(world, gate.settings)
    registry = CollectorRegistry()  # its own: a process may have several servers
    registry.register(ServerMetrics(sessions, gate))
    about = f"dreams of the world model {world.version} of run {world.name}, {len(world.tasks)} tasks"
    page = render_play_page(world.name, gate.settings.action_chars)

    async def play_page(request: Request) -> Response:
        return HTMLResponse(page)

    async def health(request: Request) -> Response:
        return json_response({"status": "healthy"})

    async def prometheus(request: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def metadata(request: Request) -> Response:
        return json_response({"name": world.name, "description": about, "version": world.version})

    async def tasks(request: Request) -> Response:
        return json_response({"tasks": world.tasks})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(sessions))
        try:
            yield
        finally:
            sweeping.cancel()
            await sessions.close_all()

    routes = [
        Route("/", play_page),  # it uses OpenEnv's socket, and the next two
        Route("/tasks", tasks),
        Route("/nearest", endpoint(partial(_nearest, sessions), sessions.counts.refused, status=400), methods=["POST"]),
        Route("/health", health),
        Route("/metrics", prometheus),
        Route("/metadata", metadata),
        Route("/schema", schema),
        Mount("/agentgym", routes=AgentGymServer(sessions).routes()),
        WebSocketRoute("/ws", OpenEnvSocket(sessions).endpoint),
        *_mcp_routes(sessions),
    ]
    return gate.around(Starlette(routes=routes, lifespan=lifespan))


def _mcp_routes(sessions: Sessions) -> list[Route]:
    """None where `imagination[mcp]` is not installed."""
    if find_spec("mcp") is None:
        return []
    from imagination.serving.mcp import McpServer

    return [Route("/mcp", McpServer(sessions))]


async def _sweep(sessions: Sessions) -> None:
    """Closes idle sessions, also while no client sends a request."""
    while True:
        await asyncio.sleep(max(0.1, sessions.settings.idle_seconds / 10))
        await sessions.expire()


async def _nearest(sessions: Sessions, request: Request) -> object:
    """The logged transitions most like the asked one. Raises ``Refused``: a part of the query is no text."""
    query = read_object(await read_body(request, sessions.settings.message_bytes))
    for name in ("start", "seen", "action"):
        if not isinstance(query.get(name), str):
            raise Refused(Refusal.INVALID, f"{name} wants a text")
    start, seen, action = (query[name][:_QUERY_CHARS] for name in ("start", "seen", "action"))
    keys = ("action", "observation", "reward", "terminated")
    index = sessions.world.index
    transitions = [] if index is None else index.similar(start, seen, action, _NEAREST, frozenset())
    return {"transitions": [{"seen": t.seen, **{key: getattr(t.turn, key) for key in keys}} for t in transitions]}


class AgentGymServer:
    """AgentGym over HTTP, below ``/agentgym``: ``/create``, ``/reset``, ``/step``, ``/observation``, ``/close``.

    A task is a number, ``data_idx``, the place of its id in the sorted list; ``seed`` beside it is 0 by default. Errors
    come as the protocol has them, ``{"error": ...}`` with HTTP status 200. It wants a number as reward: where there is
    none (the world model's context is full), it is 0.0, and ``stop`` says so.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def routes(self) -> list[Route]:
        posted = {"/create": self._create, "/reset": self._reset, "/step": self._step, "/close": self._close}
        refused = self._sessions.counts.refused
        routes = [Route(path, endpoint(work, refused, status=200), methods=["POST"]) for path, work in posted.items()]
        return [*routes, Route("/observation", endpoint(self._observe, refused, status=200))]

    async def _create(self, request: Request) -> object:
        await self._read(request, empty=True)
        return {"id": int((await self._sessions.open()).id)}

    async def _reset(self, request: Request) -> object:
        query = await self._read(request)
        session, tasks, number = self._session(query.get("id")), self._sessions.world.tasks, query.get("data_idx")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(tasks):
            raise Refused(Refusal.UNKNOWN_TASK, f"data_idx wants an integer from 0 to {len(tasks) - 1}")
        return _reply(await session.reset(tasks[number], query.get("seed", 0)))

    async def _step(self, request: Request) -> object:
        query = await self._read(request)
        return _reply(await self._session(query.get("id")).step(query.get("action")))

    async def _observe(self, request: Request) -> object:
        handle = request.query_params.get("id", "")
        session = self._session(int(handle) if handle.isascii() and handle.isdecimal() and len(handle) < 20 else None)
        if session.last is None:
            raise Refused(Refusal.NOT_RUNNING, "no episode is running: reset first")
        return session.last.text

    async def _close(self, request: Request) -> object:
        session = self._session((await self._read(request)).get("id"))
        await self._sessions.close(session.id)
        return True

    def _session(self, handle: object) -> DreamSession:
        """Raises ``Refused``: it is no handle of an open session."""
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise Refused(Refusal.INVALID, "id wants the integer that /create answered")
        if not 0 <= handle < 2**63:  # longer ones cannot all be written in decimals
            raise Refused(Refusal.UNKNOWN_SESSION, "there is no such session")
        return self._sessions.get(str(handle))

    async def _read(self, request: Request, empty: bool = False) -> dict[str, Any]:
        body = await read_body(request, self._sessions.settings.message_bytes)
        return {} if empty and not body.strip() else read_object(body)


def _reply(answer: SessionStep) -> dict[str, object]:
    reward = 0.0 if answer.reward is None else answer.reward
    return {"observation": answer.text, "reward": reward, "done": answer.done, **answer.facts()}


class ServerMetrics(Collector):
    """The counts of sessions and gate in Prometheus' text format, read on request."""

    def __init__(self, sessions: Sessions, gate: Gate) -> None:
        self._sessions, self._gate = sessions, gate

    def collect(self) -> Iterable[Metric]:
        counts = self._sessions.counts
        yield GaugeMetricFamily("imagination_sessions", "Sessions that are open", value=len(self._sessions))
        yield GaugeMetricFamily("imagination_requests", "HTTP requests under way", value=self._gate.under_way)
        yield CounterMetricFamily("imagination_sessions_opened", "Sessions opened", value=counts.opened)
        yield CounterMetricFamily("imagination_sessions_expired", "Sessions closed as idle", value=counts.expired)
        yield CounterMetricFamily("imagination_steps_untrusted", "Steps the guard doubted", value=counts.untrusted)
        yield SummaryMetricFamily(
            "imagination_step_seconds", "Dreamed steps", count_value=counts.steps, sum_value=counts.step_seconds
        )
        episodes = CounterMetricFamily("imagination_episodes", "Episodes that are over", labels=["stop"])
        for stop, number in sorted(counts.episodes.items()):
            episodes.add_metric([stop], number)
        yield episodes
        refused = CounterMetricFamily("imagination_refused", "Requests that were not served", labels=["reason"])
        for reason, number in sorted((counts.refused + self._gate.refused).items()):
            refused.add_metric([reason], number)
        yield refused


def listen(host: str, port: int) -> socket.socket:
    """Raises ``UserError``: the address is not this machine's, or the port is taken; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"nothing can listen at serve.host={host} serve.port={port} ({error.strerror or error}); "
            "serve.port=0 takes a free port"
        ) from error


class _Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Hangs up on clients that connect, or keep a connection, and do not send the head of a request in time."""

    _waited: object = None  # the last request, where none was under way when we last looked

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEAD_SECONDS, self._look)

    def _look(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._waited is self.cycle:
            self.transport.abort()
            return
        self._waited = self.cycle if idle else self
        self._timer = self.loop.call_later(_HEAD_SECONDS, self._look)

    def handle_websocket_upgrade(self, *event: Any) -> None:
        self._timer.cancel()
        super().handle_websocket_upgrade(*event)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(error)


class Server(uvicorn.Server):
    """Uvicorn that calls ``on_start`` once requests are answered; too long a message closes a socket (1009)."""

    def __init__(self, app: ASGIApp, message_bytes: int, on_start: Callable[[], None] = lambda: None) -> None:
        self._on_start = on_start
        super().__init__(
            uvicorn.Config(
                app,
                http=_Impatient,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws_max_size=message_bytes,
                timeout_keep_alive=math.ceil(2 * _HEAD_SECONDS),  # later than we look
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()
