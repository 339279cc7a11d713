"""An AgentGym server of a small text game, in a process of its own: what such servers do, and what none should.

Styles: ``id`` (objects, as TextCraft), ``score`` (the same with running totals and a task description, as SciWorld),
``env_idx`` (bare handles and lists, as WebShop), ``name`` (handles that are strings in objects, a reset that answers a
text, no ``/close``). The actions below misbehave in ways that a test asks for.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.lamp_game import COMMANDS, Lamp
from tests.support.subprocess_server import Server, serving

TASKS = 300
RAW = {  # actions, and what is then answered, as it is
    "nonsense": b"<html>the lamp went out</html>",
    "nothing": b"",
    "list": b"[1, 2]",
    "no reward": b'{"observation": "a lamp", "done": false}',
    "no done": b'{"observation": "a lamp", "reward": 0}',
    "odd text": b'{"observation": {"a": "lamp"}, "reward": 0, "done": false}',
    "odd done": b'{"observation": "a lamp", "reward": 0, "done": "no"}',
    "odd reward": b'{"observation": "a lamp", "reward": "much", "done": false}',
    "infinite": b'{"observation": "a lamp", "reward": Infinity, "done": false}',
    "huge": b'{"observation": "a lamp", "reward": 1' + b"0" * 400 + b', "done": false}',
    "deep": b"[" * 100_000,
    "odd commands": b'{"observation": "a lamp", "reward": 0, "done": false, "available_actions": "look"}',
    "binary": b"\xff\xfe\x00",
}


class Game:
    """The environments of the server."""

    def __init__(self, style: str, ledger: Path, misbehaving: str) -> None:
        self.style, self.ledger, self.misbehaving = style, ledger, misbehaving
        self.lamps: dict[int | str, Lamp] = {}
        self.totals: dict[int | str, float] = {}
        self.texts: dict[int | str, str] = {}
        self.made = 0
        self.lock = threading.Lock()

    def note(self, what: str, handle: object) -> None:
        with self.ledger.open("a") as file:
            file.write(json.dumps([what, handle]) + "\n")

    def create(self) -> object:
        if self.misbehaving == "full":
            return {"error": "no environment is left"}
        if self.misbehaving == "no handle":
            return {"ok": True}
        handle: int | str = f"lamp-{self.made}" if self.style == "name" else self.made
        self.made += 1
        self.lamps[handle] = Lamp()
        self.note("open", handle)
        return handle if self.style == "env_idx" else {"env_idx" if self.style == "name" else "id": handle}

    def handle_of(self, wanted: dict[str, Any]) -> int | str:
        handle = wanted["env_idx" if self.style in ("env_idx", "name") else "id"]
        if type(handle) is not (str if self.style == "name" else int) or handle not in self.lamps:
            raise ValueError(f"The id {handle} is not valid.")
        return handle  # type: ignore[no-any-return]

    def reset(self, wanted: dict[str, Any]) -> object:
        handle = self.handle_of(wanted)
        number = wanted["session_id" if self.style == "env_idx" else "data_idx"]
        if not 0 <= number < TASKS:
            raise ValueError("list index out of range")
        if self.misbehaving == "slow":
            time.sleep(60)
        text = self.texts[handle] = self.lamps[handle].start(number)
        self.totals[handle] = 0.0
        if self.style == "env_idx":
            return [text, None]
        if self.style == "name":
            return text
        if self.style == "score":
            self.texts[handle] = self.lamps[handle].look()
            goal = text.partition(". ")[0] + "."
            return {"task_description": goal, "observation": self.texts[handle], "score": 0, "done": False}
        if self.misbehaving == "quiet":
            return {"id": handle}
        return {"id": handle, "observation": text, "reward": 0, "done": self.misbehaving == "over"}

    def step(self, wanted: dict[str, Any]) -> object:
        handle = self.handle_of(wanted)
        action = " ".join(wanted["action"].split())
        if self.lamps[handle].done:
            raise ValueError(f"The task with environment {handle} has finished.")
        text, earned = self.lamps[handle].act(action)
        self.texts[handle], done = text, self.lamps[handle].done
        self.totals[handle] += 100 * earned
        if self.style == "score":
            return {"observation": text, "reward": -1, "score": self.totals[handle], "done": done}
        if self.style == "env_idx":
            return {"state": text, "reward": earned, "done": done, "info": None}
        return {"observation": text, "reward": earned, "done": done, "available_actions": COMMANDS.split("|")}

    def close(self, wanted: dict[str, Any]) -> object:
        handle = self.handle_of(wanted)
        del self.lamps[handle]
        self.note("closed", handle)
        return True


def handler(game: Game) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def answer(self, content: object, status: int = 200) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            if parts.path == "/":
                return self.answer("ok")
            asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
            typed: dict[str, Any] = {k: int(v) if v.isdecimal() else v for k, v in asked.items()}
            self.guarded(lambda: game.texts[game.handle_of(typed)])

        def do_POST(self) -> None:
            wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = self.path.strip("/")
            if path == "create":
                return self.guarded(game.create)
            if path == "step" and self.misbehaves(wanted["action"]):
                return None
            routes = {"reset": game.reset, "step": game.step, "close": game.close}
            if path not in routes or (path == "close" and game.style == "name"):
                return self.answer({"detail": "Not Found"}, 404)
            self.guarded(lambda: routes[path](wanted))

        def guarded(self, make: Any) -> None:
            try:
                with game.lock:
                    content = make()
            except Exception as error:  # as the servers of the protocol do
                content = {"error": str(error)}
            self.answer(content)

        def misbehaves(self, action: str) -> bool:
            if action in RAW:
                self.answer(RAW[action])
            elif action == "error 500":
                self.answer({"detail": "Internal Server Error"}, 500)
            elif action == "moved":
                self.answer({}, 307)
            elif action == "hang":
                time.sleep(60)
            elif action == "drip":
                self.send_response(200)
                self.end_headers()
                for _ in range(600):
                    self.wfile.write(b" ")
                    time.sleep(0.1)
            elif action == "endless":
                self.send_response(200)
                self.end_headers()
                for _ in range(64):
                    self.wfile.write(b" " * 2**20)
            elif action == "drop":
                self.close_connection = True
            elif action == "half":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"observation": ')
                self.close_connection = True
            elif action == "exit":
                os._exit(1)
            else:
                return False
            return True

    return Handler


def main(port: int, ledger: str, style: str, misbehaving: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", port), handler(Game(style, Path(ledger), misbehaving)))
    server.daemon_threads = True
    server.serve_forever()


@contextmanager
def agentgym_server(folder: Path, style: str = "id", misbehaving: str = "", port: int = 0) -> Iterator[Server]:
    """A server on this machine. ``misbehaving``: full, no handle, slow, over, quiet."""
    ledger = folder / "environments.jsonl"
    ledger.touch()
    arguments = [str(ledger), style, misbehaving]
    with serving("tests.support.agentgym_server", arguments, "/", folder, port) as server:
        yield server


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
