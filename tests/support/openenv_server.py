"""A real OpenEnv server of a small text game, in a process of its own, made of the classes of ``openenv-core``.

A text may also ask it to misbehave: see ``LampEnvironment.step``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.lamp_game import Lamp
from tests.support.subprocess_server import Server, serving


class Counted:
    """Environments that the server has made and closed, in a file that the test reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, what: str) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([what, time.time()]) + "\n")


def main(port: int, ledger: str, sessions: int, misbehaving: str) -> None:
    sys.modules["gradio"] = None  # type: ignore[assignment]  # as where it is not installed: no web page, five seconds less
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    counted = Counted(Path(ledger))

    class Say(Action):
        message: str
        tone: str = "plain"

    class Seen(Observation):
        text: Any = ""
        hint: str = ""

    class LampEnvironment(Environment[Say, Seen, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.game = Lamp()
            self.opened = False

        def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Seen:
            if misbehaving == "slow":
                time.sleep(60)
            if not self.opened:
                self.opened = True
                counted.note("open")
            return Seen(
                text=self.game.start(0 if misbehaving == "same" else seed or 0), done=misbehaving == "over", reward=None
            )

        def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Seen:
            match action.message:
                case "raise":
                    raise RuntimeError("the lamp went out")
                case "hang":
                    time.sleep(4)
                case "exit":
                    os._exit(1)
                case "nonsense":
                    return Seen(text=[1, 2])
            text, earned = self.game.act(action.message)
            return Seen(text=text, reward=earned, done=self.game.done)

        @property
        def state(self) -> State:
            return State()

        def close(self) -> None:
            if self.opened:
                self.opened = False
                counted.note("closed")

    app = create_fastapi_app(LampEnvironment, Say, Seen, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


@contextmanager
def openenv_server(folder: Path, sessions: int = 8, misbehaving: str = "", port: int = 0) -> Iterator[Server]:
    """A server on this machine; ``misbehaving`` is slow, over or same, which its resets then are."""
    ledger = folder / "sessions.jsonl"
    ledger.touch()
    arguments = [str(ledger), str(sessions), misbehaving]
    with serving("tests.support.openenv_server", arguments, "/health", folder, port) as server:
        yield server


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
