"""The web application: every protocol over the same sessions, behind one gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import ASGIApp

from imagination.serving.agentgym import AgentGymServer
from imagination.serving.counting import ServedMetrics
from imagination.serving.gate import Admission, Gate
from imagination.serving.openenv import OpenEnvSocket, schema
from imagination.serving.playing import PlayPage
from imagination.serving.sessions import SessionLimits, Sessions
from imagination.serving.wire import json_response
from imagination.serving.world import DreamWorld


@dataclass(frozen=True)
class ServingLimits:
    """
    Attributes:
        sessions: what clients may use up of the dreams.
        message_bytes: of a request's body, or of a message on a socket.
    """

    sessions: SessionLimits = field(default_factory=SessionLimits)
    message_bytes: int = 2**17


def make_app(world: DreamWorld, admission: Admission, limits: ServingLimits) -> ASGIApp:
    """The application; it has to run on one event loop, that of the world's engine."""
    sessions, gate = Sessions(world, limits.sessions), Gate(admission)
    metrics = ServedMetrics(sessions, gate)

    async def health(request: Request) -> Response:
        return json_response({"status": "healthy"})

    async def measured(request: Request) -> Response:
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
        *PlayPage(sessions, limits.message_bytes).routes(),
        Route("/health", health),
        Route("/metrics", measured),
        Route("/metadata", metadata),
        Route("/schema", schema),
        Mount("/agentgym", routes=AgentGymServer(sessions, limits.message_bytes).routes()),
        WebSocketRoute("/ws", OpenEnvSocket(sessions).endpoint),
    ]
    return gate.around(Starlette(routes=routes, lifespan=lifespan))


async def _sweep(sessions: Sessions) -> None:
    """Closes idle sessions for ever: a client that is gone never asks for anything that could."""
    while True:
        await asyncio.sleep(max(0.1, sessions.limits.idle_seconds / 10))
        await sessions.expire()
