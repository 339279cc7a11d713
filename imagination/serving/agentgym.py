"""AgentGym over HTTP, below ``/agentgym``: ``/create``, ``/reset``, ``/step``, ``/observation``, ``/close``.

A task is a number, ``data_idx``, the place of its id in the sorted list; ``seed`` may stand beside it and is 0 where it
does not, so that a task begins and goes on in one way. Errors come as the protocol has them, ``{"error": ...}`` with
HTTP status 200. The protocol wants a number as reward: where there is none (the world model's context is full), it is
0.0, and ``stop`` says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from imagination.serving.http import endpoint, read_body, read_object
from imagination.serving.sessions import Answer, Refusal, Refused, Session, Sessions


class AgentGymServer:
    """The endpoints."""

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

    def _session(self, handle: object) -> Session:
        """
        Raises:
            Refused: it is no handle of an open session.
        """
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise Refused(Refusal.INVALID, "id wants the integer that /create answered")
        if not 0 <= handle < 2**63:  # longer ones cannot all be written in decimals
            raise Refused(Refusal.UNKNOWN_SESSION, "there is no such session")
        return self._sessions.get(str(handle))

    async def _read(self, request: Request, empty: bool = False) -> dict[str, Any]:
        body = await read_body(request, self._sessions.settings.message_bytes)
        return {} if empty and not body.strip() else read_object(body)


def _reply(answer: Answer) -> dict[str, object]:
    reward = 0.0 if answer.reward is None else answer.reward
    return {"observation": answer.text, "reward": reward, "done": answer.done, **answer.facts()}
