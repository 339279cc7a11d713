"""Dreams as a Gymnasium environment, in this process and without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import gymnasium
from gymnasium.spaces import Text

from imagination.serving.sessions import Answer, DreamWorld, Sessions
from imagination.settings.dreams import ServeSettings

T = TypeVar("T")
_LONGEST_TEXT = 1_000_000
_TYPED = "".join(map(chr, range(32, 127)))
_SEEDS = 2**31


class AnyText(Text):
    """Every text up to a length. What is sampled from it can be typed; what a world model writes is in no charset."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length, min_length=0, charset=_TYPED)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]


class DreamGym(gymnasium.Env[str, str]):
    """Episodes in the dreams of a world model.

    ``reset(seed=3, options={"task": "corridor-a"})``: both are optional, and without a task the seed chooses one. The
    same seed and actions give the same episode. ``info`` has ``trusted``, ``stop``, ``confidence`` and what else a
    step says of itself (``Answer.facts``).

    Raises:
        Refused: by ``reset`` and ``step``, where a session does; a dream that broke is one.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  Gymnasium declares it so

    def __init__(self, world: DreamWorld, settings: ServeSettings) -> None:
        self.observation_space, self.action_space = AnyText(_LONGEST_TEXT), AnyText(settings.action_chars)
        self._loop = _Loop()
        self._sessions = Sessions(world, settings)
        self._session = self._loop.run(self._sessions.open())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = int(self.np_random.integers(_SEEDS)) if seed is None else seed
        answer = self._loop.run(self._session.reset((options or {}).get("task"), chosen))
        return _shown(answer), answer.facts()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = self._loop.run(self._session.step(action))
        # Gymnasium wants a number; where there is none (the world model's context is full), ``stop`` says so
        reward = 0.0 if answer.reward is None else answer.reward
        return _shown(answer), reward, answer.terminated, answer.truncated, answer.facts()

    def close(self) -> None:
        if self._loop.open:
            self._loop.run(self._sessions.close_all())
            self._loop.close()


def _shown(answer: Answer) -> str:
    return answer.text[:_LONGEST_TEXT]


class _Loop:
    """An event loop in a thread of its own: the caller may have one already, as notebooks do."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.open = True

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.open = False
