"""A server of chat completions whose answers are planted, and which remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]  # status, and what is sent as JSON (bytes as they are)


def says(content: str | None, **message: Any) -> Answer:
    return 200, {
        "choices": [{"message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}]
    }


@dataclass
class Judge:
    url: str
    asked: list[str] = field(default_factory=list)  # the episodes
    keys: set[str] = field(default_factory=set)


@contextmanager
def judge(answer: Callable[[str], Answer]) -> Iterator[Judge]:
    """``answer`` gets the text of an episode."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            episode = request["messages"][-1]["content"]
            found.asked.append(episode)
            found.keys.add(str(self.headers["Authorization"]))
            status, told = answer(episode) if self.path == "/v1/chat/completions" else (404, {})
            body = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Judge(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
