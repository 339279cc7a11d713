"""MCP over streamable HTTP: an MCP session is a dream session, from ``initialize`` until its ``DELETE``.

A world with tools has these, and a call of one is an action; any other world has ``step``. Both have ``reset``, unless
the address chose the episode, ``/mcp?task=notes-1&seed=3``: then it has begun, and an agent meets what it would meet at
the real server. Nothing is sent unasked, so there is no stream to ``GET``. Clients of the protocol without sessions
(2026-07-28) are asked to shake hands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, StreamableHTTPServerTransport
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from imagination.serving.http import json_response, logged_errors, read_body, read_object
from imagination.serving.sessions import DreamSession, Refusal, Refused, Sessions, SessionStep
from real_envs.calls import Call, Tool
from real_envs.trajectory import StopReason

_STATUS = {Refusal.FULL: 503, Refusal.UNKNOWN_SESSION: 404, Refusal.INTERNAL: 500}
_RESET = Tool(
    "reset",
    "Begins an episode and answers its start. The same task, seed and actions dream the same text.",
    {
        "type": "object",
        "properties": {
            "task": {"type": "string", "description": "id of a task; without it the seed chooses"},
            "seed": {"type": "integer", "minimum": 0, "description": "without it one is drawn"},
        },
        "additionalProperties": False,
    },
)
_STEP = Tool(
    "step",
    "Does something in the world and answers what happens.",
    {
        "type": "object",
        "properties": {"action": {"type": "string"}},
        "required": ["action"],
        "additionalProperties": False,
    },
)


class McpServer:
    """The endpoint ``/mcp`` (ASGI)."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._transports: dict[str, StreamableHTTPServerTransport] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps none

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            app, body = await logged_errors(self._route(request), self._sessions.counts.refused)
        except Refused as refusal:
            app = _error(_STATUS.get(refusal.kind, 400), types.INVALID_REQUEST, str(refusal))
            body = b""
        read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return read.pop() if read else await receive()

        await app(scope, receive_again, send)

    async def _route(self, request: Request) -> tuple[ASGIApp, bytes]:
        """What answers the request, and its body. Raises ``Refused``."""
        if request.method not in ("POST", "DELETE"):
            return Response(status_code=405, headers={"Allow": "POST, DELETE"}), b""
        body = await read_body(request, self._sessions.settings.message_bytes)
        id = request.headers.get(MCP_SESSION_ID_HEADER)
        if id is not None:
            if id not in self._transports:
                raise Refused(Refusal.UNKNOWN_SESSION, "there is no such session")
            self._sessions.get(id)
            return self._transports[id].handle_request, body
        method = read_object(body).get("method")
        if method == "server/discover":  # as clients ask first that could also do without sessions
            return _error(404, types.METHOD_NOT_FOUND, "this server has sessions: initialize"), b""
        if method != "initialize":
            raise Refused(Refusal.INVALID, "a session begins with initialize")
        return (await self._open(request)).handle_request, body

    async def _open(self, request: Request) -> StreamableHTTPServerTransport:
        task, seed = (request.query_params.get(name) for name in ("task", "seed"))
        if seed is not None and not (seed.isascii() and seed.isdecimal() and len(seed) < 20):
            raise Refused(Refusal.INVALID, "seed wants an integer")
        session = await self._sessions.open()
        try:
            begun = None
            if task is not None or seed is not None:
                begun = await session.reset(task, None if seed is None else int(seed))
            transport = StreamableHTTPServerTransport(session.id, is_json_response_enabled=True)
            connected = asyncio.Event()
            serving = asyncio.create_task(self._serve(session, transport, connected, begun))
            self._tasks.add(serving)
            serving.add_done_callback(self._tasks.discard)
            await connected.wait()
        except BaseException:
            await self._sessions.close(session.id)
            raise
        session.on_close, self._transports[session.id] = transport.terminate, transport
        return transport

    async def _serve(
        self,
        session: DreamSession,
        transport: StreamableHTTPServerTransport,
        connected: asyncio.Event,
        begun: SessionStep | None,
    ) -> None:
        server = DreamTools(self._sessions, session, begun).server()
        try:
            async with transport.connect() as (incoming, outgoing):
                connected.set()
                await server.run(incoming, outgoing, server.create_initialization_options())
        finally:
            self._transports.pop(session.id, None)
            if session.id in self._sessions:
                await self._sessions.close(session.id)


class DreamTools:
    """The tools of a session; what is refused is the error of a call, in a line."""

    def __init__(self, sessions: Sessions, session: DreamSession, begun: SessionStep | None) -> None:
        self._sessions, self._session, self._begun = sessions, session, begun
        own = sessions.world.tools
        self._reset = "" if begun else "reset" if all(tool.name != "reset" for tool in own) else "reset_dream"
        self._own = {tool.name for tool in own}
        tools = [*(own or (_STEP,)), *([Tool(self._reset, _RESET.description, _RESET.schema)] if self._reset else [])]
        self._listed = [
            types.Tool(name=tool.name, description=tool.description, input_schema={"type": "object", **tool.schema})
            for tool in tools
        ]

    def server(self) -> Server[Any]:
        world = self._sessions.world
        how = f"Dreams of {world.name}. Call {self._reset} first; everything after it is predicted, nothing is real."
        text = _clean(self._begun.text) if self._begun else how
        return Server(
            world.name, version=world.version, instructions=text, on_list_tools=self._list, on_call_tool=self._call
        )

    async def _list(
        self, context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._listed)

    async def _call(
        self, context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        asked = self._act(params.name, params.arguments or {})
        try:
            answer = await logged_errors(asked, self._sessions.counts.refused)
        except Refused as refusal:
            return _result(str(refusal), {"refused": refusal.kind.value}, failed=True)
        facts = {"reward": answer.reward, "done": answer.done, **answer.facts(), "task": _clean(answer.task)}
        if answer.stop in (StopReason.UNSURE, StopReason.CONTEXT_LIMIT):
            return _result(f"the dream ends here: {answer.stop.value}", facts, failed=True)
        return _result(answer.text, facts)

    async def _act(self, name: str, arguments: Mapping[str, Any]) -> SessionStep:
        session = self._sessions.get(self._session.id)
        if name in self._own:
            return await session.step(str(Call(name, arguments)))
        wanted = {self._reset: {"task", "seed"}} if self._own else {self._reset: {"task", "seed"}, "step": {"action"}}
        if not name or name not in wanted:
            raise Refused(Refusal.INVALID, f"there is no tool {name[:80]!r}")
        if unknown := arguments.keys() - wanted[name]:
            raise Refused(Refusal.INVALID, f"{name} has no argument {min(unknown)[:40]!r}")
        if name == "step":
            return await session.step(arguments.get("action"))
        return await session.reset(arguments.get("task"), arguments.get("seed"))


def _result(text: str, facts: Mapping[str, object], failed: bool = False) -> types.CallToolResult:
    content = types.TextContent(text=_clean(text))
    return types.CallToolResult(content=[content], structured_content=dict(facts), is_error=failed)


def _clean(text: str) -> str:
    """A model may write half a surrogate pair, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _error(status: int, code: int, message: str) -> Response:
    return json_response({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}, status)
