"""A server of a test in a process of its own, on a free port of this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START = 240.0  # seconds until it must answer; one that loads a large package on a busy machine takes a minute


@dataclass
class Server:
    """``ledger`` has a line for each session that was opened or closed: ``["open", ...]``."""

    port: int
    process: subprocess.Popen[bytes]
    ledger: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> Counter[str]:
        return Counter(json.loads(line)[0] for line in self.ledger.read_text().splitlines())

    def most_open(self) -> int:
        """The largest number of sessions that were open at a time."""
        most = now = 0
        for line in self.ledger.read_text().splitlines():
            now += {"open": 1, "closed": -1}.get(json.loads(line)[0], 0)
            most = max(most, now)
        return most

    def all_closed(self, seconds: float = 5.0) -> bool:
        """Whether every session that was opened is closed by then."""
        deadline = time.monotonic() + seconds
        while (counts := self.counts())["open"] != counts["closed"] and time.monotonic() < deadline:
            time.sleep(0.05)
        return counts["open"] == counts["closed"] > 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the address does."""
    deadline = time.monotonic() + START
    while True:
        try:
            httpx.get(url, timeout=2, trust_env=False).raise_for_status()
            return
        except httpx.HTTPError:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)


@contextmanager
def serving(module: str, arguments: Sequence[str], health: str, folder: Path, port: int = 0) -> Iterator[Server]:
    """Runs ``python -m module port arguments``; its ledger is the first of these."""
    port = port or free_port()
    log = folder / f"server-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(port), *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    server = Server(port, process, Path(arguments[0]))
    try:
        answers(f"{server.url}{health}", process, log)
        yield server
    finally:
        server.kill()


@contextmanager
def talking_nonsense(message: str) -> Iterator[str]:
    """The address of a WebSocket server, in this process, that answers whatever it is told with ``message``."""
    from websockets.sync.server import ServerConnection, serve

    def answer(connection: ServerConnection) -> None:
        for _ in connection:
            connection.send(message)

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
