"""Requests and replies over HTTP: who may connect, JSON within limits, and errors that show no traceback.

A server on this machine needs no token, but any page in a browser can send requests to it. So requests of pages of
another origin are refused, and so are those whose ``Host`` is not this machine (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from h11 import LocalProtocolError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from imagination.serving.sessions import Refusal, Refused
from imagination.settings.dreams import ServeSettings
from real_envs.errors import UserError

OPEN = ("/health",)  # for health checks
_POLICY_VIOLATION = 1008
_BODY_SECONDS = 10.0  # until a request's whole body must have arrived
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


def is_local(host: str) -> bool:
    """Whether no other machine reaches what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """ASGI middleware in front of everything: checks host, origin and token (if any), bounds concurrent requests.
    Raises ``UserError``: other machines would reach a server without a token.
    """

    def __init__(self, settings: ServeSettings, token: str) -> None:
        self.settings, self._local, self._token = settings, is_local(settings.host), token
        if not self._local and not token:
            raise UserError(
                f"serve.host={settings.host} lets other machines in: put a token into the environment variable "
                f"{settings.token}, or leave serve.host at 127.0.0.1"
            )
        self.under_way = 0
        self.refused: Counter[str] = Counter()

    def around(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            with suppress(LocalProtocolError):  # the body was no HTTP, for which uvicorn has answered already
                await gated(scope, receive, send)

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            reason, refusal = self._refusal(scope)
            if refusal is not None:
                self.refused[reason] += 1
                if scope["type"] == "websocket":  # before it is accepted: the handshake is answered with HTTP 403
                    await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
                else:
                    await refusal(scope, receive, send)
                return
            counted = scope["type"] == "http"  # sockets are bounded by the sessions, of which each has one
            self.under_way += counted
            try:
                await app(scope, receive, send)
            finally:
                self.under_way -= counted

        return guarded

    def _refusal(self, scope: Scope) -> tuple[str, Response | None]:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self._local and not is_local(_part(f"//{host}", "hostname")):
            return "host", json_response({"error": "this server is for its own machine"}, 403)
        if "origin" in headers and _part(headers["origin"], "netloc") != host:
            return "origin", json_response({"error": "pages of another origin may not ask this server"}, 403)
        if scope["path"] not in OPEN and not self._has_token(headers):
            refusal = json_response({"error": "this server wants its token"}, 401)
            refusal.headers["WWW-Authenticate"] = 'Basic realm="imagination", charset="UTF-8"'
            return "token", refusal
        if scope["type"] == "http" and self.under_way >= self.settings.requests:
            return "busy", json_response({"error": f"{self.under_way} requests are under way; try again"}, 429)
        return "", None

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        """Whether the client shows the token: as ``Bearer``, or as the password of a URL or a browser."""
        if not self._token:
            return True
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        shown = credentials.strip().encode("latin-1")
        if scheme.lower() == "basic":
            try:
                shown = base64.b64decode(shown, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        # in constant time: how long a wrong token takes must not tell how much of it is right
        return hmac.compare_digest(shown, self._token.encode())


def _part(url: str, part: str) -> str:
    """Such as ``netloc`` of a URL; nothing of what is none, such as ``null``."""
    try:
        return getattr(urlsplit(url), part) or ""
    except ValueError:
        return ""


def read_object(raw: str | bytes) -> dict[str, Any]:
    """Raises ``Refused``: it is no JSON object, or holds NaN or an infinity."""
    try:
        content = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError):  # RecursionError: a thousand brackets within each other
        raise Refused(Refusal.INVALID, "the message is no JSON") from None
    if not isinstance(content, dict):
        raise Refused(Refusal.INVALID, "the message is no JSON object")
    return content


def _no_number(name: str) -> float:
    raise ValueError(name)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ``Refused``: the body is longer than ``max_bytes``, or does not arrive in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise Refused(Refusal.INVALID, f"a message has at most {max_bytes} bytes")
    except TimeoutError:
        raise Refused(Refusal.INVALID, f"the message did not arrive within {_BODY_SECONDS:g} s") from None
    return bytes(body)


async def logged_errors(work: Awaitable[T], refused: Counter[str]) -> T:
    """The result of ``work``. An internal error is logged and becomes a refusal, so that clients see no traceback.
    Raises ``Refused``: by ``work``, or in place of what else it raised; counted by kind in ``refused``.
    """
    try:
        return await work
    except Refused as refusal:
        refused[refusal.kind] += 1
        raise
    except Exception as error:
        refused[Refusal.INTERNAL] += 1
        _LOG.exception("a request could not be answered")
        raise Refused(Refusal.INTERNAL, "internal error") from error


def endpoint(
    work: Callable[[Request], Awaitable[object]], refused: Counter[str], status: int
) -> Callable[[Request], Awaitable[Response]]:
    """Answers a request with JSON, and with ``{"error": ...}`` and this HTTP status where it is refused."""

    async def handle(request: Request) -> Response:
        try:
            return json_response(await logged_errors(work(request), refused))
        except Refused as refusal:
            return json_response({"error": str(refusal)}, status)

    return handle


def to_json(content: object) -> str:
    """ASCII: a model may write half a surrogate pair, which UTF-8 cannot encode."""
    return json.dumps(content, allow_nan=False)


def json_response(content: object, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")
