"""Who may ask: the token, the page that a request comes from, and how many requests there are at a time.

A server on this machine needs no token, but any page in a browser can send requests to it. So a request that a page of
another origin has made is refused, and so is one whose ``Host`` is not this machine (DNS rebinding).
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from imagination.serving.wire import json_response
from real_envs.errors import UserError

OPEN = ("/health",)  # asked by what keeps a server alive, and says nothing
_POLICY_VIOLATION = 1008


@dataclass(frozen=True, slots=True)
class Admission:
    """
    Attributes:
        local: the server listens on this machine's own address alone.
        token: what a client must show; empty where it need not.
        requests: HTTP requests under way at a time.
    """

    local: bool
    token: str
    requests: int


def is_local(host: str) -> bool:
    """Whether no other machine reaches what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def admission(host: str, token: str, variable: str, requests: int) -> Admission:
    """
    Raises:
        UserError: other machines would reach a server without a token.
    """
    if not is_local(host) and not token:
        raise UserError(
            f"serve.host={host} lets other machines in: put a token into the environment variable {variable}, or "
            "leave serve.host at 127.0.0.1"
        )
    return Admission(is_local(host), token, requests)


class Gate:
    """ASGI middleware in front of everything."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.under_way = 0
        self.refused: Counter[str] = Counter()

    def around(self, app: ASGIApp) -> ASGIApp:
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

        return gated

    def _refusal(self, scope: Scope) -> tuple[str, Response | None]:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self._admission.local and not is_local(_hostname(host)):
            return "host", json_response({"error": "this server is for its own machine"}, 403)
        if "origin" in headers and _netloc(headers["origin"]) != host:
            return "origin", json_response({"error": "pages of another origin may not ask this server"}, 403)
        if scope["path"] not in OPEN and not self._shown(headers):
            refusal = json_response({"error": "this server wants its token"}, 401)
            refusal.headers["WWW-Authenticate"] = 'Basic realm="imagination", charset="UTF-8"'
            return "token", refusal
        if scope["type"] == "http" and self.under_way >= self._admission.requests:
            return "busy", json_response({"error": f"{self.under_way} requests are under way; try again"}, 429)
        return "", None

    def _shown(self, headers: Mapping[str, str]) -> bool:
        """Whether the client shows the token: as ``Bearer``, or as the password of a URL or a browser."""
        if not self._admission.token:
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
        return hmac.compare_digest(shown, self._admission.token.encode())


def _netloc(origin: str) -> str:
    """``127.0.0.1:8000`` of ``http://127.0.0.1:8000``; nothing of what is no origin, such as ``null``."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
