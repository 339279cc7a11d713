"""Nonsense for a server: what is sent, who sends it, and a client that must not notice.

A sender takes the server's address, the witness, and how hypothesis draws (``settings``, perhaps with a seed).
"""

from __future__ import annotations

import asyncio
import json
import socket as sockets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from imagination.serving.sessions import Sessions
from imagination.settings.dreams import ServeSettings
from tests.support.served import planted_world, served

SEED, BYTES = 7, 2000
Abuse = Callable[[str, "Witness", Callable[[Any], Any]], None]
ODD = st.sampled_from([10**400, -1, 2**63, "\ud800", "\0", "a" * 60, "look", "win", "doubt", "break"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.integers(0, 3), ODD)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
NAMES = ["id", "env_idx", "data_idx", "seed", "action", "task", "start", "seen", "message", "type", "data"]
FIELDS = st.sampled_from(NAMES)
NEARLY = st.dictionaries(FIELDS, VALUES, max_size=6)
RAW = st.one_of(
    st.binary(max_size=200), st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    (VALUES | NEARLY).map(lambda value: json.dumps(value).encode()), st.just(b"[" * 1999), st.just(b"x" * (BYTES + 1)),
)  # fmt: skip
PATHS = st.sampled_from(
    ["/", "/tasks", "/nearest", "/health", "/metrics", "/schema", "/metadata", "/ws", "/state"]
    + [f"/agentgym/{name}" for name in ("create", "reset", "step", "observation", "close", "", "nothing")]
)
METHODS = st.sampled_from(["GET", "POST", "PUT", "HEAD", "DELETE"])
MESSAGES = st.one_of(
    RAW,
    RAW.map(lambda raw: raw.decode("utf-8", "replace")),
    st.builds(
        lambda kind, data: json.dumps({"type": kind, "data": data}),
        st.sampled_from(["reset", "step", "state", "mcp"]) | VALUES,
        NEARLY | VALUES,
    ),
)


class Witness:
    """A client that plays one episode while others send nonsense."""

    def __init__(self, address: str) -> None:
        self._socket = connect(f"ws://{address}/ws")
        self._say({"type": "reset", "data": {"seed": SEED}})
        self.read: list[str] = []

    def _say(self, message: object) -> dict[str, Any]:
        self._socket.send(json.dumps(message))
        return dict(json.loads(self._socket.recv(20)))

    def step(self) -> None:
        answer = self._say({"type": "step", "data": {"message": "look"}})
        self.read.append(answer["data"]["observation"]["text"])

    def close(self) -> None:
        self._socket.close()


@contextmanager
def undisturbed() -> Iterator[tuple[str, Witness]]:
    """A server and its witness, whose episode must in the end be the one that it is alone.

    Raises:
        AssertionError: it is another.
    """
    world = planted_world(max_turns=10**6)
    with served(world, ServeSettings(sessions=4, action_chars=50, message_bytes=BYTES)) as address:
        witness = Witness(address)
        yield address, witness
        witness.close()

    async def alone() -> list[str]:
        session = await Sessions(world, ServeSettings()).open()
        await session.reset(None, SEED)
        return [(await session.step("look")).text for _ in witness.read]

    assert witness.read == asyncio.run(alone())


def requests(address: str, witness: Witness, drawn: Callable[[Any], Any]) -> None:
    """Any method, path, body and query."""
    with httpx.Client(trust_env=False, timeout=20) as client:

        @drawn
        @given(METHODS, PATHS, RAW, st.dictionaries(FIELDS, st.text()))
        def send(method: str, path: str, body: bytes, query: dict[str, str]) -> None:
            asked = {name: value.encode("utf-8", "replace") for name, value in query.items()}
            answer = client.request(method, f"http://{address}{path}", content=body, params=asked)
            assert answer.status_code < 500
            assert "Traceback" not in answer.text
            assert "internal error" not in answer.text
            witness.step()

        send()


def bodies(address: str, witness: Witness, drawn: Callable[[Any], Any]) -> None:
    """Nearly right resets and steps of an open AgentGym environment."""
    with httpx.Client(trust_env=False, timeout=20) as client:
        handle = client.post(f"http://{address}/agentgym/create").json()["id"]

        @drawn
        @given(st.sampled_from(["reset", "step", "step"]), NEARLY)
        def send(path: str, body: dict[str, Any]) -> None:
            content = json.dumps({**body, "id": handle})
            answer = client.post(f"http://{address}/agentgym/{path}", content=content)
            assert answer.status_code == 200
            told = answer.json()
            assert set(told) == {"error"} or {"observation", "reward", "done"} <= set(told)
            assert told.get("error") != "internal error"
            witness.step()

        send()
        client.post(f"http://{address}/agentgym/close", json={"id": handle})


def messages(address: str, witness: Witness, drawn: Callable[[Any], Any]) -> None:
    """Texts and bytes on a socket."""

    @drawn
    @given(st.lists(MESSAGES, min_size=1, max_size=3))
    def send(told: list[str | bytes]) -> None:
        with connect(f"ws://{address}/ws") as socket:
            for message in told:
                socket.send(message)
                if len(message if isinstance(message, bytes) else message.encode("utf-8", "replace")) > BYTES:
                    with pytest.raises(ConnectionClosed, match="1009"):
                        socket.recv(20)
                    break
                reply = json.loads(socket.recv(20))
                assert reply["type"] in ("error", "observation", "state")
                assert "internal error" not in str(reply)
        witness.step()

    send()


def raw_bytes(address: str, witness: Witness, drawn: Callable[[Any], Any]) -> None:
    """What is no HTTP."""
    host, port = address.split(":")

    @drawn
    @given(st.binary(min_size=1, max_size=300), st.booleans())
    def send(raw: bytes, with_a_head: bool) -> None:
        head = b"POST /agentgym/step HTTP/1.1\r\nHost: localhost\r\n" if with_a_head else b""
        with sockets.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head + raw + b"\r\n\r\n")
            connection.shutdown(sockets.SHUT_WR)
            answer = b""
            try:
                while chunk := connection.recv(4096):
                    answer += chunk
            except ConnectionError:  # hung up on, which is an answer, too
                pass
        assert not answer.startswith(b"HTTP/1.1 5")
        witness.step()

    send()


SENDERS: dict[str, Abuse] = {"requests": requests, "bodies": bodies, "messages": messages, "raw-bytes": raw_bytes}
