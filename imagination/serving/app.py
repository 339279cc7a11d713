"""The web application: every protocol over the same sessions, the page to play by hand, metrics, and its port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
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

from imagination.report.page import render_play_page
from imagination.serving.http import Gate, endpoint, json_response, read_body, read_object
from imagination.serving.openenv import OpenEnvSocket, schema
from imagination.serving.sessions import DreamSession, DreamWorld, Refusal, Refused, Sessions, SessionStep
from real_envs.errors import UserError

_NEAREST = 3  # logged transitions beside a dreamed one
_QUERY_CHARS = 20_000  # of each text of a query for them
_SHUTDOWN_SECONDS = 5  # for steps under way, after Ctrl-C


def make_app(world: DreamWorld, gate: Gate) -> ASGIApp:
    """The application; it has to run on one event loop, that of the world's engine."""
    sessions = Sessions(world, gate.settings)
    metrics = ServerMetrics(sessions, gate)

    async def health(request: Request) -> Response:
        return json_response({"status": "healthy"})

    async def prometheus(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def metadata(request: Request) -> Response:
        description = f"dreams of the world model {world.version} of run {world.name}, {len(world.tasks)} tasks"
        return json_response({"name": world.name, "description": description, "version": world.version})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(sessions))
        try:
            yield
        finally:
            sweeping.cancel()
            await sessions.close_all()

    routes = [
        *PlayPage(sessions).routes(),
        Route("/health", health),
        Route("/metrics", prometheus),
        Route("/metadata", metadata),
        Route("/schema", schema),
        Mount("/agentgym", routes=AgentGymServer(sessions).routes()),
        WebSocketRoute("/ws", OpenEnvSocket(sessions).endpoint),
    ]
    return gate.around(Starlette(routes=routes, lifespan=lifespan))


async def _sweep(sessions: Sessions) -> None:
    """Closes idle sessions, also while no client sends a request."""
    while True:
        await asyncio.sleep(max(0.1, sessions.settings.idle_seconds / 10))
        await sessions.expire()


class PlayPage:
    """The page to play by hand at ``/``, which uses OpenEnv's socket, and its queries ``/tasks`` and ``/nearest``."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._page = render_play_page(sessions.world.name, sessions.settings.action_chars)

    def routes(self) -> list[Route]:
        return [
            Route("/", self._show, methods=["GET"]),
            Route("/tasks", self._served(self._tasks), methods=["GET"]),
            Route("/nearest", self._served(self._nearest), methods=["POST"]),
        ]

    def _served(self, work: Callable[[Request], Awaitable[object]]) -> Callable[[Request], Awaitable[Response]]:
        return endpoint(work, self._sessions.counts.refused, status=400)

    async def _show(self, request: Request) -> Response:
        return HTMLResponse(self._page)

    async def _tasks(self, request: Request) -> object:
        return {"tasks": self._sessions.world.tasks}

    async def _nearest(self, request: Request) -> object:
        query = read_object(await read_body(request, self._sessions.settings.message_bytes))
        start, seen, action = (_text(query, name) for name in ("start", "seen", "action"))
        transitions = self._sessions.world.nearest(start, seen, action, _NEAREST)
        return {
            "transitions": [
                {
                    "seen": near.seen,
                    "action": near.turn.action,
                    "observation": near.turn.observation,
                    "reward": near.turn.reward,
                    "terminated": near.turn.terminated,
                }
                for near in transitions
            ]
        }


def _text(query: Mapping[str, object], name: str) -> str:
    """Raises ``Refused``: it is missing, or no text."""
    value = query.get(name)
    if not isinstance(value, str):
        raise Refused(Refusal.INVALID, f"{name} wants a text")
    return value[:_QUERY_CHARS]


class AgentGymServer:
    """AgentGym over HTTP, below ``/agentgym``: ``/create``, ``/reset``, ``/step``, ``/observation``, ``/close``.

    A task is a number, ``data_idx``, the place of its id in the sorted list; ``seed`` beside it is 0 by default. Errors
    come as the protocol has them, ``{"error": ...}`` with HTTP status 200. It wants a number as reward: where there is
    none (the world model's context is full), it is 0.0, and ``stop`` says so.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def routes(self) -> list[Route]:
        return [
            Route("/create", self._served(self._create), methods=["POST"]),
            Route("/reset", self._served(self._reset), methods=["POST"]),
            Route("/step", self._served(self._step), methods=["POST"]),
            Route("/observation", self._served(self._observe), methods=["GET"]),
            Route("/close", self._served(self._close), methods=["POST"]),
        ]

    def _served(self, work: Callable[[Request], Awaitable[object]]) -> Callable[[Request], Awaitable[Response]]:
        return endpoint(work, self._sessions.counts.refused, status=200)

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
        self._registry = CollectorRegistry()  # its own: a process may have several servers
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

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


class Server(uvicorn.Server):
    """Uvicorn that calls ``on_start`` once requests are answered; too long a message closes a socket (1009)."""

    def __init__(self, app: ASGIApp, message_bytes: int, on_start: Callable[[], None] = lambda: None) -> None:
        self._on_start = on_start
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws_max_size=message_bytes,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()


def run_server(server: Server, listening: socket.socket) -> None:
    """Serves until the process is told to stop; then all is closed, and Ctrl-C is a ``KeyboardInterrupt``."""
    with listening:
        asyncio.run(server.serve(sockets=[listening]))
