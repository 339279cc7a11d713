"""AgentGym, played by our client of it. If these fail, a trainer that speaks it cannot dream here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")

from imagination.settings.dreams import ServeSettings
from real_envs.env import EnvFailure, Task
from real_envs.worlds.servers.agentgym import AgentGymSession, AgentGymSettings
from real_envs.worlds.servers.client import ServerGame
from tests.support.served import STARTS, planted_world, served


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(planted_world(), ServeSettings(sessions=8, message_bytes=4096)) as found:
        yield f"http://{found}/agentgym"


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture
def handle(client: httpx.Client) -> Iterator[int]:
    made = client.post("/create").json()["id"]
    yield made
    client.post("/close", json={"id": made})


def test_our_client_plays_episodes(address: str) -> None:
    game = ServerGame(lambda: AgentGymSession(AgentGymSettings(address)), ["look"])
    try:
        assert game.reset(Task("t", {"task": "1"})).text == STARTS["hall@0"].text
        assert game.step("look").observation.text.startswith("look 0 ")
        won = game.step("win")
        assert (won.observation.text, won.reward, won.terminated) == ("You win.", 1.0, True)
        assert game.reset(Task("t", {"task": "0"})).text == STARTS["cave@0"].text
        with pytest.raises(EnvFailure, match="prediction_invalid"):
            game.step("break")
    finally:
        game.close()


def test_the_whole_protocol(client: httpx.Client) -> None:
    handle = client.post("/create").json()["id"]
    assert isinstance(handle, int)
    begun = client.post("/reset", json={"id": handle, "data_idx": 1, "seed": 3}).json()
    assert begun["observation"] == STARTS["hall@0"].text
    assert (begun["done"], begun["task"], begun["seed"]) == (False, "hall", 3)
    assert client.get("/observation", params={"id": handle}).json() == STARTS["hall@0"].text
    doubted = client.post("/step", json={"id": handle, "action": "doubt"}).json()
    assert (doubted["reward"], doubted["done"]) == (0.0, True)
    assert (doubted["trusted"], doubted["stop"], doubted["confidence"]) == (False, "unsure", 0.01)
    assert client.get("/observation", params={"id": handle}).json() == "Gold everywhere."
    assert client.post("/close", json={"id": handle}).json() is True
    assert "no such session" in client.post("/step", json={"id": handle, "action": "look"}).json()["error"]


def test_a_task_without_a_seed_is_always_the_same(client: httpx.Client, handle: int) -> None:
    told = []
    for _ in range(2):
        client.post("/reset", json={"id": handle, "data_idx": 0})
        told.append(client.post("/step", json={"id": handle, "action": "look"}).json()["observation"])
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/reset", b"{", "no JSON"),
        ("/reset", b"", "no JSON"),
        ("/reset", b"[1]", "no JSON object"),
        ("/reset", b"\xff\xfe", "no JSON"),
        ("/reset", b"[" * 4000, "no JSON"),
        ("/reset", b"a" * 5000, "at most 4096 bytes"),
        ("/create", b"{", "no JSON"),
        ("/reset", {}, "id wants"),
        ("/reset", {"id": "1"}, "id wants"),
        ("/reset", {"id": True, "data_idx": 0}, "id wants"),
        ("/reset", {"id": 12345, "data_idx": 0}, "no such session"),
        ("/reset", {"id": 10**400, "data_idx": 0}, "no such session"),
        ("/reset", {"id": None, "data_idx": 2}, "0 to 1"),
        ("/reset", {"id": None, "data_idx": "0"}, "0 to 1"),
        ("/reset", {"id": None}, "0 to 1"),
        ("/reset", {"id": None, "data_idx": 0, "seed": -1}, "seed wants"),
        ("/step", {"id": None, "action": "look"}, "reset first"),
        ("/step", {"id": None}, "action is"),
        ("/step", {"id": None, "action": "a" * 2001}, "at most 2000 characters"),
    ],
)
def test_what_is_wrong_is_answered_as_the_protocol_has_it(
    client: httpx.Client, handle: int, path: str, body: Any, error: str
) -> None:
    """An ``id`` of ``None`` stands for one that is open."""
    if isinstance(body, dict) and body.get("id", 0) is None:
        body = {**body, "id": handle}
    answer = client.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
    assert answer.status_code == 200
    assert error in answer.json()["error"]


@pytest.mark.parametrize("id", ["", "x", "-1", "1" * 5000, "²", "1_0"])
def test_an_observation_of_no_session_is_an_error(client: httpx.Client, id: str) -> None:
    assert client.get("/observation", params={"id": id}).json()["error"]


def test_our_own_mistakes_show_no_traceback(client: httpx.Client, handle: int) -> None:
    client.post("/reset", json={"id": handle, "data_idx": 0})
    answer = client.post("/step", json={"id": handle, "action": "bug"})
    assert (answer.status_code, answer.json()) == (200, {"error": "internal error"})


def test_a_full_server_says_so(client: httpx.Client) -> None:
    made = [client.post("/create").json() for _ in range(9)]
    try:
        assert ["id" in one for one in made] == [True] * 8 + [False]
        assert made[-1]["error"] == "all 8 sessions are taken"
    finally:
        for one in made[:8]:
            client.post("/close", json=one)
