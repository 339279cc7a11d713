"""What the page to play by hand asks besides OpenEnv's socket: the tasks, and logged transitions like a dreamed one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from imagination.report.page import render_play_page
from imagination.serving.answers import Refusal, Refused
from imagination.serving.sessions import Sessions
from imagination.serving.wire import endpoint, read_body, read_object

_NEAREST = 3
_LONGEST_TEXT = 20_000  # characters of what is looked for


class PlayPage:
    """The endpoints ``/``, ``/tasks`` and ``/nearest``.

    Args:
        message_bytes: of a request's body.
    """

    def __init__(self, sessions: Sessions, message_bytes: int) -> None:
        self._sessions, self._message_bytes = sessions, message_bytes
        self._page = render_play_page(sessions.world.name, sessions.limits.action_chars)

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
        wanted = read_object(await read_body(request, self._message_bytes))
        found = self._sessions.world.nearest(
            _text(wanted, "start"), _text(wanted, "seen"), _text(wanted, "action"), _NEAREST
        )
        return {
            "transitions": [
                {
                    "seen": near.seen,
                    "action": near.turn.action,
                    "observation": near.turn.observation,
                    "reward": near.turn.reward,
                    "terminated": near.turn.terminated,
                }
                for near in found
            ]
        }


def _text(wanted: Mapping[str, object], name: str) -> str:
    """
    Raises:
        Refused: it is missing, or no text.
    """
    value = wanted.get(name)
    if not isinstance(value, str):
        raise Refused(Refusal.INVALID, f"{name} wants a text")
    return value[:_LONGEST_TEXT]
