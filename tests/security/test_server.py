"""A server behind a token that others send nonsense to. If these fail, whoever reaches its port brings it down, fills
its memory, or gets in without the token.

IMAGINATION_SECURITY_REQUESTS=100000 asks as often, and then holds the growth of its memory to account.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import http.client
import os
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")

from imagination.serving import app as app_module
from imagination.serving import http as http_module
from imagination.settings.dreams import ServeSettings
from tests.support.served import planted_world, served

REQUESTS = int(os.environ.get("IMAGINATION_SECURITY_REQUESTS", "2000"))
CLIENTS, BYTES = 8, 2000
TOKEN = "5f1d0c7e9a3b48d2"
PATHS = ("/tasks", "/nearest", "/metrics", "/metadata", "/schema", "/", "/ws", "/nothing", "/%00%ff", "//", "/..%2f..")
POSTED = ("/nearest", "/agentgym/create", "/agentgym/reset", "/agentgym/step", "/agentgym/close")
BODIES = (
    b"",
    b"{",
    b"[" * BYTES,
    b"\xff\xfe",
    b'{"id": NaN}',
    b'{"id": 1e999}',
    b"null",
    b'{"action": 1}',
    b"x" * 9000,
)
RAW = (
    b"\0\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /nearest HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /nearest HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /nearest HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)


def guess(draw: random.Random) -> str:
    """Never the token, and often nearly."""
    wrong = draw.choice(
        (TOKEN[:-1], f"{TOKEN}0", TOKEN.upper(), TOKEN[::-1], "", f"{draw.getrandbits(64):016x}", "é" * 16, "a" * 5000)
    )
    shown = base64.b64encode(f"any:{wrong}".encode()).decode()
    return draw.choice((f"Bearer {wrong}", f"Basic {shown}", f"Digest {TOKEN}", TOKEN, "Basic ====", "Basic \xff"))


def raw(address: str, sent: bytes) -> str:
    """The status of what is answered; "" where the server hangs up."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096).decode("latin-1").partition(" ")[2][:3]
        except OSError:  # hung up on before all of it was sent
            return ""


def resident() -> int:
    """Kilobytes of this process, in which the server runs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def nonsense(address: str, seed: int, count: int) -> Counter[str]:
    """The statuses of ``count`` requests that a client sends one after the other; "" where the server hangs up."""
    draw, statuses = random.Random(seed), Counter[str]()
    client = http.client.HTTPConnection(address, timeout=60)
    for k in range(count):
        guesses, text = k % 2 == 1, b""
        if k % 20 == 0:
            status = raw(address, draw.choice(RAW))
        else:
            token = guess(draw) if guesses else f"Bearer {TOKEN}"
            path, body = (draw.choice(PATHS), b"") if guesses else (draw.choice(POSTED), draw.choice(BODIES))
            try:
                client.request("POST", path, body, {"Authorization": token})
                answer = client.getresponse()
                status, text = str(answer.status), answer.read()
            except (ConnectionError, http.client.HTTPException):  # too long a body is not read to its end
                client.close()
                status = ""
        assert status == "401" or not guesses
        assert not status.startswith("5"), text
        assert b"Traceback" not in text
        statuses[status] += 1
    client.close()
    return statuses


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc to count open files in")
def test_guesses_nonsense_and_too_much_are_refused_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        served(planted_world(), ServeSettings(sessions=4, message_bytes=BYTES), TOKEN) as address,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):

        def send(seed: int, count: int) -> Counter[str]:
            jobs = [pool.submit(nonsense, address, CLIENTS * seed + k, count // CLIENTS) for k in range(CLIENTS)]
            return sum((job.result() for job in jobs), Counter())

        statuses = send(0, REQUESTS // 4)
        files, before = open_files(), resident()
        statuses += send(1, REQUESTS - REQUESTS // 4)
        grown = resident() - before
        assert open_files() <= files + 4
        headers = {"Authorization": f"Bearer {TOKEN}"}
        shown = httpx.get(f"http://{address}/metrics", headers=headers, trust_env=False).text
        assert "imagination_requests 1.0" in shown  # this one
    shown = capsys.readouterr().err
    print(f"{statuses.total()} requests, {dict(statuses)}; {grown} kB more than after a quarter of them")
    assert statuses["401"] > REQUESTS // 3
    assert grown < 8192 + 0.05 * REQUESTS  # 50 bytes a request, and what the allocator takes at a time
    assert "WARNING" in shown  # it is what the server logs
    assert "Traceback" not in shown


def test_slow_clients_are_hung_up_on_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_HEAD_SECONDS", 0.4)
    monkeypatch.setattr(http_module, "_BODY_SECONDS", 0.4)
    head = f"POST /nearest HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    whole = f"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n{head}"  # one request, and then half of another
    begun = (b"", b"GET", head.encode(), f"{head}Content-Length: 50\r\n\r\n{{".encode(), whole.encode())
    with served(planted_world(), ServeSettings(requests=32), TOKEN) as address:
        host, port = address.split(":")
        clients = [socket.create_connection((host, int(port)), timeout=20) for _ in range(5 * len(begun))]
        for k, client in enumerate(clients):
            client.sendall(begun[k % len(begun)])
        started = time.monotonic()
        fair = http.client.HTTPConnection(address, timeout=20)
        fair.request("GET", "/tasks", headers={"Authorization": f"Bearer {TOKEN}"})
        assert fair.getresponse().status == 200
        fair.close()
        for k, client in enumerate(clients):
            answer = b""
            try:
                while part := client.recv(4096):  # ends where the server hangs up, and times out where it does not
                    answer += part
            except ConnectionResetError:
                pass
            assert b"HTTP/1.1 5" not in answer
            assert (b"arrive within" in answer) == (k % len(begun) == 3)
            client.close()
        assert time.monotonic() - started < 15


async def test_a_socket_that_waits_and_a_step_that_takes_long_are_not_slow_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from websockets.asyncio.client import connect

    monkeypatch.setattr(app_module, "_HEAD_SECONDS", 0.1)
    with served(planted_world(), token=TOKEN) as address:
        async with connect(f"ws://any:{TOKEN}@{address}/ws") as client:
            await asyncio.sleep(0.5)
            await client.send('{"type": "state"}')
            assert "step_count" in str(await asyncio.wait_for(client.recv(), 20))
