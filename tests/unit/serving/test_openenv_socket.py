"""OpenEnv, played by its own client and by ours. If these fail, a trainer that speaks it cannot dream here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("openenv", reason="pip install 'imagination[openenv]'")
pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
from openenv.core.generic_client import GenericEnvClient
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from imagination.settings.dreams import ServeSettings
from real_envs.env import EnvFailure, Task
from real_envs.worlds.servers.client import ServerGame
from real_envs.worlds.servers.openenv import OpenEnvSession, OpenEnvSettings
from tests.support.served import STARTS, labelled, measured, planted_world, served, sessions_left


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(planted_world(), ServeSettings(sessions=8, message_bytes=4096)) as found:
        yield found


def say(socket: ClientConnection, message: object) -> dict[str, Any]:
    socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return dict(json.loads(socket.recv(20)))


def reset(seed: int = 0) -> dict[str, object]:
    return {"type": "reset", "data": {"seed": seed}}


def step(action: object) -> dict[str, object]:
    return {"type": "step", "data": {"message": action}}


# --- clients


def test_the_packages_own_client_plays_episodes(address: str) -> None:
    with GenericEnvClient(base_url=f"http://{address}").sync() as env:
        for seed in (1, 0):
            begun = env.reset(seed=seed)
            assert begun.observation["text"] == STARTS["hall@0" if seed else "cave@0"].text
            assert (begun.reward, begun.done) == (None, False)
            looked = env.step({"message": "look"})
            assert looked.observation["text"].startswith("look 0 ")
            assert (looked.reward, looked.done) == (0.0, False)
            assert looked.observation["metadata"]["confidence"] == 0.75
            assert env.state()["step_count"] == 1
            won = env.step({"message": "win"})
            assert (won.observation["text"], won.reward, won.done) == ("You win.", 1.0, True)
            with pytest.raises(RuntimeError, match=r"reset.*EXECUTION_ERROR"):
                env.step({"message": "look"})
        assert env.reset(seed=0, task="hall").observation["text"] == STARTS["hall@0"].text
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            env.reset(seed=0, task="nowhere")


def test_our_own_client_plays_episodes(address: str) -> None:
    """Its observation is all that is text in the server's, so nothing but what the policy may see is text there."""
    game = ServerGame(lambda: OpenEnvSession(OpenEnvSettings(f"ws://{address}")), ["look"])
    task = Task("t", {"seed": "1"})
    try:
        assert game.reset(task).text == STARTS["hall@0"].text
        with connect(f"ws://{address}/ws") as socket:
            say(socket, reset(1))
            seen = say(socket, step("look"))["data"]["observation"]["text"]
        assert game.step("look").observation.text == seen
        won = game.step("win")
        assert (won.observation.text, won.reward, won.terminated) == ("You win.", 1.0, True)
        game.reset(task)
        with pytest.raises(EnvFailure, match="prediction_invalid"):  # a failure, and no observation
            game.step("break")
        assert game.reset(task).text == STARTS["hall@0"].text
    finally:
        game.close()


def test_the_guards_verdict_reaches_the_client(address: str) -> None:
    with connect(f"ws://{address}/ws") as socket:
        say(socket, reset())
        data = say(socket, step("doubt"))["data"]
        assert (data["reward"], data["done"]) == (0.0, True)
        about = data["metadata"]  # where the package's own client looks since 0.4
        assert about == data["observation"]["metadata"]
        names = ("trusted", "stop", "terminated", "truncated", "confidence", "outcome_confidence")
        assert [about[name] for name in names] == [False, "unsure", False, True, 0.01, 0.02]


# --- what is wrong


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        ("", "INVALID_JSON"),
        ("[1]", "INVALID_JSON"),
        ("[" * 2000, "INVALID_JSON"),
        (b"\xff\xfe", "INVALID_JSON"),
        ('{"type": "reset", "data": {"seed": NaN}}', "INVALID_JSON"),
        ({}, "UNKNOWN_TYPE"),
        ({"type": ["reset"]}, "UNKNOWN_TYPE"),
        ({"type": "mcp", "data": {}}, "UNKNOWN_TYPE"),
        ({"type": "reset", "data": [1]}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"sead": 1}}, "VALIDATION_ERROR"),
        ({"type": "reset", "more": 1}, "VALIDATION_ERROR"),
        ({"type": "step"}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"message": 3}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"message": "look", "tone": "loud"}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"message": "a" * 2001}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"message": "bug"}}, "EXECUTION_ERROR"),
    ],
)
def test_what_is_wrong_costs_one_error_and_not_the_socket(address: str, message: Any, code: str) -> None:
    with connect(f"ws://{address}/ws") as socket:
        say(socket, reset(1))
        told = say(socket, message)
        assert (told["type"], told["data"]["code"]) == ("error", code)
        assert "secret" not in told["data"]["message"]
        assert "Traceback" not in told["data"]["message"]
        assert say(socket, reset(1))["data"]["observation"]["text"] == STARTS["hall@0"].text


def test_whatever_is_wrong_is_counted() -> None:
    """Otherwise a client that sends nonsense all day shows nowhere."""
    with served(planted_world()) as address, connect(f"ws://{address}/ws") as socket:
        for message in ("{", {"type": "mcp"}, {"type": "reset", "data": {"seed": -1}}, step("look")):
            assert say(socket, message)["type"] == "error"
        refused = labelled(measured(address), "imagination_refused_total")
    assert refused == {"invalid": 3, "not_running": 1}


def test_a_message_that_is_too_long_closes_the_socket_alone(address: str) -> None:
    with connect(f"ws://{address}/ws") as other, connect(f"ws://{address}/ws") as socket:
        say(other, reset())
        socket.send("a" * 5000)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(20)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        assert say(other, step("look"))["type"] == "observation"


def test_a_full_server_says_so_and_has_room_again() -> None:
    with served(planted_world(), ServeSettings(sessions=1)) as address:
        with connect(f"ws://{address}/ws") as first:
            say(first, reset())
            with connect(f"ws://{address}/ws") as second:
                assert json.loads(second.recv(20))["data"]["code"] == "CAPACITY_REACHED"
            assert say(first, step("look"))["type"] == "observation"
        game = ServerGame(lambda: OpenEnvSession(OpenEnvSettings(f"ws://{address}")), ["look"])
        assert game.reset(Task("t", {"seed": "1"})).text == STARTS["hall@0"].text
        game.close()


def test_an_idle_socket_is_closed_and_its_session_with_it() -> None:
    with served(planted_world(), ServeSettings(idle_seconds=0.3)) as address:
        with connect(f"ws://{address}/ws") as socket:
            say(socket, reset())
            assert json.loads(socket.recv(20))["data"]["code"] == "SESSION_ERROR"
            with pytest.raises(ConnectionClosed):
                socket.recv(20)
        assert sessions_left(address) == 0


def test_a_client_that_vanishes_or_says_goodbye_leaves_no_session(address: str) -> None:
    with connect(f"ws://{address}/ws") as socket:
        say(socket, reset())
        socket.send(json.dumps({"type": "close"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(20)
    gone = connect(f"ws://{address}/ws")
    say(gone, reset())
    gone.socket.close()
    assert sessions_left(address) == 0


def test_the_schema_is_what_an_action_wants(address: str) -> None:
    schema = httpx.get(f"http://{address}/schema", trust_env=False).json()
    assert schema["action"]["required"] == ["message"]
    assert "text" in schema["observation"]["properties"]
    about = httpx.get(f"http://{address}/metadata", trust_env=False).json()
    assert (about["name"], about["version"]) == ("planted", "planted")
