"""JSON in and out: what a client sends is read within limits, what it gets is always plain JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from imagination.serving.answers import Refusal, Refused


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


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """
    Args:
        most: bytes.
        seconds: until all of it must be there.

    Raises:
        Refused: it is longer, comes too slowly, or never comes to its end.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise Refused(Refusal.INVALID, f"a message has at most {most} bytes")
    except TimeoutError:
        raise Refused(Refusal.INVALID, f"the message did not arrive within {seconds:g} s") from None
    return bytes(body)


def written(content: object) -> str:
    """ASCII: what a model writes may hold half a surrogate pair, which UTF-8 does not."""
    return json.dumps(content, allow_nan=False)


def json_response(content: object, status: int = 200) -> Response:
    return Response(written(content), status, media_type="application/json")
