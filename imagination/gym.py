"""The Gymnasium id ``imagination/Dream-v0``: the dreams of a run, in this process.

``pip install 'imagination[gymnasium]'``. The part before the colon makes Gymnasium import this module, which registers
the id.

Example::

    import gymnasium

    env = gymnasium.make("imagination.gym:imagination/Dream-v0", run="outputs/mine")
    text, info = env.reset(seed=0)
    text, reward, terminated, truncated, info = env.step("go east")
    info["trusted"], info["confidence"]
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from imagination.commands.serve import open_world
from imagination.runs.lifecycle import need
from imagination.serving.sessions import DreamWorld, Sessions, SessionStep
from imagination.settings import Config, compose
from imagination.settings.dreams import ServeSettings

try:
    import gymnasium
    from gymnasium.spaces import Text
except ImportError as error:
    raise ImportError(f"{error}; run `pip install 'imagination[gymnasium]'`") from error

ID = "imagination/Dream-v0"
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
    step says of itself (``SessionStep.facts``).

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


def _shown(answer: SessionStep) -> str:
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


def make_dream(run: str | Path, overrides: Sequence[str] = ()) -> DreamGym:
    """An environment in the dreams of a run.

    Args:
        run: its folder.
        overrides: settings as on the command line, such as ``["dream.temperature=0"]``.

    Raises:
        UserError: it is no run, or its world model is not fitted.
    """
    folder = need(Path(run), "fit-world-model").resolve()
    words = [f"run={folder.name}", compose.override("output", str(folder.parent)), *overrides]
    config = compose.resolve(words, Config).config
    return DreamGym(open_world(config, folder), config.serve)


gymnasium.register(ID, entry_point=f"{__name__}:make_dream")
