"""OpenEnv over its WebSocket: a socket is a session. Its ``/schema`` and ``/metadata`` are here, too.

``{"type": "reset", "data": {"seed": 3, "task": "corridor-a"}}``, ``{"type": "step", "data": {"message": "look"}}``,
``{"type": "state"}``, ``{"type": "close"}``. Answers carry one text, ``observation.text``; ``metadata`` keeps the rest,
such as ``terminated`` and ``truncated`` apart: beside the observation, where clients since 0.4 find it, and in it, for
those before. A dream that broke is an ``EXECUTION_ERROR``, never an observation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from imagination.serving.http import json_response, logged_errors, read_object, to_json
from imagination.serving.sessions import DreamSession, Refusal, Refused, Sessions, SessionStep

_CODES = {
    Refusal.FULL: "CAPACITY_REACHED",
    Refusal.UNKNOWN_SESSION: "SESSION_ERROR",
    Refusal.BUSY: "SESSION_ERROR",
    Refusal.UNKNOWN_TASK: "VALIDATION_ERROR",
    Refusal.INVALID: "VALIDATION_ERROR",
    Refusal.NOT_RUNNING: "EXECUTION_ERROR",
    Refusal.FAILED: "EXECUTION_ERROR",
    Refusal.INTERNAL: "EXECUTION_ERROR",
}
_FIELDS = {  # of a message's data, by its type
    "reset": {"seed", "task", "episode_id"},
    "step": {"message", "metadata"},
}
_TEXT = {"type": "string"}
SCHEMA = {
    "action": {
        "type": "object",
        "properties": {"message": _TEXT, "metadata": {"type": "object"}},
        "required": ["message"],
        "additionalProperties": False,
    },
    "observation": {
        "type": "object",
        "properties": {"text": _TEXT, "metadata": {"type": "object"}},
        "required": ["text"],
    },
    "state": {"type": "object", "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}}},
}


class OpenEnvSocket:
    """The endpoint ``/ws``."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def endpoint(self, socket: WebSocket) -> None:
        await socket.accept()
        try:
            session = await self._sessions.open()
        except Refused as refused:
            self._sessions.counts.refused[refused.kind] += 1
            await _leave(socket, refused)
            return
        try:
            await self._talk(socket, session)
        except (WebSocketDisconnect, OSError):
            pass  # the client has gone
        finally:
            if session.id in self._sessions:
                await self._sessions.close(session.id)

    async def _talk(self, socket: WebSocket, session: DreamSession) -> None:
        while True:
            try:
                async with asyncio.timeout(self._sessions.settings.idle_seconds):
                    message = await socket.receive()
            except TimeoutError:
                await _leave(socket, Refused(Refusal.UNKNOWN_SESSION, "the session was idle for too long"))
                return
            if message["type"] == "websocket.disconnect":
                return
            reply = await self._answer(session, message.get("text"))
            if reply is None:
                await socket.close()
                return
            await socket.send_text(to_json(reply))

    async def _answer(self, session: DreamSession, raw: str | None) -> dict[str, object] | None:
        """The reply to a message; ``None`` ends the session."""
        refused = self._sessions.counts.refused
        try:
            message = read_object(raw or "")
        except Refused as refusal:
            refused[refusal.kind] += 1
            return _error("INVALID_JSON", str(refusal))
        kind = message.get("type")
        if not isinstance(kind, str) or kind not in ("reset", "step", "state", "close"):
            refused[Refusal.INVALID] += 1
            return _error("UNKNOWN_TYPE", "a message's type is reset, step, state or close")
        if kind == "close":
            return None
        try:
            return await logged_errors(self._work(session.id, kind, message), refused)
        except Refused as refusal:
            return _error(_CODES[refusal.kind], str(refusal))

    async def _work(self, id: str, kind: str, message: Mapping[str, Any]) -> dict[str, object]:
        session, data = self._sessions.get(id), _data(kind, message)
        match kind:
            case "reset":
                return _observation(await session.reset(data.get("task"), data.get("seed")))
            case "step":
                return _observation(await session.step(data.get("message")))
            case _:
                return {"type": "state", "data": _state(session)}


def _data(kind: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises ``Refused``: it has fields that the type of message does not know."""
    if unknown := set(message) - {"type", "data"}:
        raise Refused(Refusal.INVALID, f"a message has no field {min(unknown)[:40]!r}")
    data = message.get("data")
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise Refused(Refusal.INVALID, "a message's data is an object")
    if kind in _FIELDS and (unknown := set(data) - _FIELDS[kind]):
        known = ", ".join(sorted(_FIELDS[kind]))
        raise Refused(Refusal.INVALID, f"{kind} has no field {min(unknown)[:40]!r}, only {known}")
    return data


def _observation(answer: SessionStep) -> dict[str, object]:
    about = answer.facts()
    seen = {"text": answer.text, "metadata": about}
    data = {"observation": seen, "reward": answer.reward, "done": answer.done, "metadata": about}
    return {"type": "observation", "data": data}


def _state(session: DreamSession) -> dict[str, object]:
    if session.last is None:
        return {"episode_id": None, "step_count": 0}
    answer = session.last
    return {"episode_id": f"{answer.task}/{answer.seed}", "step_count": answer.turn, "done": answer.done}


def _error(code: str, message: str) -> dict[str, object]:
    return {"type": "error", "data": {"message": message, "code": code}}


async def _leave(socket: WebSocket, refused: Refused) -> None:
    try:
        await socket.send_text(to_json(_error(_CODES[refused.kind], str(refused))))
        await socket.close()
    except (WebSocketDisconnect, OSError, RuntimeError):  # RuntimeError: starlette's, of a socket closed meanwhile
        pass


async def schema(request: Request) -> Response:
    return json_response(SCHEMA)
