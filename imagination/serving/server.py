"""The application on a port of this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from real_envs.errors import UserError

_FAREWELL = 5  # seconds that steps under way may take after Ctrl-C


def listen(host: str, port: int) -> socket.socket:
    """
    Args:
        port: 0 takes a free one.

    Raises:
        UserError: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"nothing can listen at serve.host={host} serve.port={port} ({error.strerror or error}); "
            "serve.port=0 takes a free port"
        ) from error


class Server(uvicorn.Server):
    """Uvicorn, telling when it answers.

    Args:
        message_bytes: of a message on a socket; a longer one closes it with 1009, as WebSockets have it.
        began: called once requests are answered.
    """

    def __init__(self, app: ASGIApp, message_bytes: int, began: Callable[[], None] = lambda: None) -> None:
        self._began = began
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws_max_size=message_bytes,
                timeout_graceful_shutdown=_FAREWELL,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._began()


def run_server(server: Server, listening: socket.socket) -> None:
    """Serves until the process is told to stop; then sessions are closed, and Ctrl-C is a ``KeyboardInterrupt``.

    Args:
        listening: closed in the end.
    """
    with listening:
        asyncio.run(server.serve(sockets=[listening]))
