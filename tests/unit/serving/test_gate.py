"""Who may ask. If these fail, another machine, or a page in somebody's browser, plays with the user's model."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Mapping

import httpx
import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
from starlette.types import ASGIApp
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from imagination.serving import http as http_module
from imagination.serving.app import make_app
from imagination.serving.http import Gate, is_local
from imagination.settings.dreams import ServeSettings
from real_envs.env import EnvFailure
from real_envs.worlds.servers.agentgym import AgentGymSession, AgentGymSettings
from real_envs.worlds.servers.openenv import OpenEnvSession, OpenEnvSettings
from tests.support.refusal import refused
from tests.support.served import STARTS, Planted, planted_world, served

PUBLIC = ServeSettings(host="0.0.0.0")


def get(app: ASGIApp, path: str = "/tasks", headers: Mapping[str, str] | None = None, host: str = "localhost") -> int:
    async def run() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8000") as client:
            sent = {name: value.encode() for name, value in (headers or {}).items()}
            return (await client.get(path, headers=sent)).status_code

    return asyncio.run(run())


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"any:{password}".encode()).decode()}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", "127.0.0.1.example.org"])
def test_other_machines_need_a_token(host: str) -> None:
    refused(lambda: Gate(ServeSettings(host=host), ""), "IMAGINE_SERVE_TOKEN")
    Gate(ServeSettings(host=host), "t")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_this_machine_needs_none(host: str) -> None:
    assert is_local(host)
    Gate(ServeSettings(host=host), "")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer sésame"}, 200),
        ({"Authorization": "bearer  sésame "}, 200),
        ({"Authorization": "Bearer sesame"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Digest sésame"}, 401),
        (basic("sésame"), 200),
        (basic("sésam"), 401),
        (basic("sésame!"), 401),
        (basic(""), 401),
        ({"Authorization": "Basic ?"}, 401),
        ({"Authorization": "Basic //8="}, 401),
    ],
)
def test_without_the_token_nothing_is_told(headers: dict[str, str], status: int) -> None:
    app = make_app(planted_world(), Gate(PUBLIC, "sésame"))
    for path in ("/tasks", "/metrics", "/metadata", "/schema", "/", "/nothing"):
        expected = {"/nothing": 404}.get(path, 200) if status == 200 else status
        assert get(app, path, headers, "dreams.example.org") == expected
    assert get(app, "/health", {}, "dreams.example.org") == 200


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, honest = [], hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return honest(a, b)

    monkeypatch.setattr(http_module.hmac, "compare_digest", compare)
    app = make_app(planted_world(), Gate(PUBLIC, "t0ken"))
    assert get(app, headers={"Authorization": "Bearer x"}) == 401
    assert compared == [(b"x", b"t0ken")]


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1", None, 200),
        ("[::1]", None, 200),
        ("localhost", "http://localhost:8000", 200),
        ("localhost", "http://localhost:9000", 403),
        ("localhost", "http://evil.example.org", 403),
        ("localhost", "null", 403),
        ("evil.example.org", None, 403),  # whose name somebody has made point here
        ("localhost.evil.example.org", None, 403),
    ],
)
def test_a_page_of_another_origin_may_not_ask(host: str, origin: str | None, status: int) -> None:
    app = make_app(planted_world(), Gate(ServeSettings(), ""))
    assert get(app, headers={"Origin": origin} if origin else {}, host=host) == status


def test_sockets_pass_the_same_gate() -> None:
    with served(planted_world(), token="t0ken") as address:
        for wrong in (f"ws://{address}/ws", f"ws://any:t0kem@{address}/ws"):
            with pytest.raises(InvalidStatus, match="403"):
                connect(wrong)
        with pytest.raises(InvalidStatus, match="403"):
            connect(f"ws://any:t0ken@{address}/ws", origin="http://evil.example.org")  # type: ignore[arg-type]
        with connect(f"ws://any:t0ken@{address}/ws") as socket:
            socket.send('{"type": "state"}')
            assert "step_count" in str(socket.recv(20))


def test_our_clients_show_the_token_that_their_address_has() -> None:
    pytest.importorskip("openenv", reason="pip install 'imagination[openenv]'")
    with served(planted_world(), token="t0ken") as address:
        sessions: list[AgentGymSession | OpenEnvSession] = [
            AgentGymSession(AgentGymSettings(f"http://any:t0ken@{address}/agentgym")),
            OpenEnvSession(OpenEnvSettings(f"ws://any:t0ken@{address}")),
        ]
        for session in sessions:
            assert session.start({"task": "1", "seed": "1"}).text == STARTS["hall@0"].text
            session.close()
        with pytest.raises(EnvFailure, match="401"):
            AgentGymSession(AgentGymSettings(f"http://{address}/agentgym")).start({"task": "1"})


def test_requests_under_way_are_bounded() -> None:
    async def run() -> tuple[list[int], int]:
        model = Planted()
        model.gate = asyncio.Event()
        app = make_app(planted_world(model), Gate(ServeSettings(requests=2), ""))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/agentgym") as client:
            handles = [(await client.post("/create")).json() for _ in range(2)]
            for handle in handles:
                await client.post("/reset", json={**handle, "data_idx": 0})
            slow = [asyncio.create_task(client.post("/step", json={**handle, "action": "slow"})) for handle in handles]
            await asyncio.sleep(0.1)
            busy = (await client.get("/observation")).status_code
            model.gate.set()
            done = [(await task).status_code for task in slow]
            return [busy, *done], (await client.get("/observation")).status_code

    assert asyncio.run(run()) == ([429, 200, 200], 200)
