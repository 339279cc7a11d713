"""JSON in and out: what a client sends is read within limits, what it gets is always plain JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from imagination.serving.answers import Refusal, Refused

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_BODY_SECONDS = 10.0  # until all of a request's body must be there


def read_object(raw: str | bytes) -> dict[str, Any]:
    """
    Raises:
        Refused: it is no JSON object, or holds NaN or an infinity.
    """
    try:
        found = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError):  # RecursionError: a thousand brackets within each other
        raise Refused(Refusal.INVALID, "the message is no JSON") from None
    if not isinstance(found, dict):
        raise Refused(Refusal.INVALID, "the message is no JSON object")
    return found


def _no_number(name: str) -> float:
    raise ValueError(name)


async def read_body(request: Request, most: int) -> bytes:
    """
    Args:
        most: bytes.

    Raises:
        Refused: it is longer, comes too slowly, or never comes to its end.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise Refused(Refusal.INVALID, f"a message has at most {most} bytes")
    except TimeoutError:
        raise Refused(Refusal.INVALID, f"the message did not arrive within {_BODY_SECONDS:g} s") from None
    return bytes(body)


async def answered(work: Awaitable[T], refused: Counter[str]) -> T:
    """What ``work`` answers. A mistake of ours is a refusal too: it is logged, and the client sees no traceback.

    Args:
        refused: counts what was refused, by kind.

    Raises:
        Refused: by ``work``, or in place of what else it raised.
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

    async def asked(request: Request) -> Response:
        try:
            return json_response(await answered(work(request), refused))
        except Refused as refusal:
            return json_response({"error": str(refusal)}, status)

    return asked


def written(content: object) -> str:
    """ASCII: what a model writes may hold half a surrogate pair, which UTF-8 does not."""
    return json.dumps(content, allow_nan=False)


def json_response(content: object, status: int = 200) -> Response:
    return Response(written(content), status, media_type="application/json")
