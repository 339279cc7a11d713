"""What is around the protocols: measures, the page's questions, and the end of the server."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from unittest.mock import Mock

import httpx
import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
from starlette.applications import Starlette
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from imagination.serving import app as app_module
from imagination.serving.app import listen
from imagination.settings.dreams import ServeSettings
from tests.support.refusal import refused
from tests.support.served import STARTS, Planted, labelled, measured, planted_world, served


def test_the_measures_count_what_has_happened() -> None:
    with served(planted_world()) as address, httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
        handle = client.post("/agentgym/create").json()
        for action in ("look", "win", "doubt", "break"):
            client.post("/agentgym/reset", json={**handle, "data_idx": 0})
            client.post("/agentgym/step", json={**handle, "action": action})
        client.post("/agentgym/step", json={**handle, "action": "look"})
        client.get("/tasks", headers={"Origin": "http://evil.example.org"})
        found = measured(address)
        assert found["imagination_sessions",] == 1
        assert found["imagination_requests",] == 1  # this one
        assert found["imagination_sessions_opened_total",] == 1
        assert found["imagination_step_seconds_count",] == 3
        assert found["imagination_step_seconds_sum",] > 0
        assert found["imagination_steps_untrusted_total",] == 1
        assert labelled(found, "imagination_episodes_total") == {"terminated": 1, "unsure": 1, "prediction_invalid": 1}
        assert labelled(found, "imagination_refused_total") == {"failed": 1, "not_running": 1, "origin": 1}


def test_the_page_asks_for_tasks_and_for_transitions_of_the_log() -> None:
    with served(planted_world()) as address, httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
        assert client.get("/tasks").json() == {"tasks": ["cave", "hall"]}
        start = STARTS["hall@0"].text
        (near,) = client.post("/nearest", json={"start": start, "seen": start, "action": "take"}).json()["transitions"]
        assert (near["seen"], near["action"], near["reward"], near["terminated"]) == (start, "take lamp", 1.0, True)
        assert near.keys() == {"seen", "action", "observation", "reward", "terminated"}
        for wrong in ({}, {"start": 1, "seen": "", "action": ""}, [1]):
            answer = client.post("/nearest", json=wrong)
            assert answer.status_code == 400
            assert answer.json()["error"]


def test_a_mistake_of_ours_is_counted_and_shows_no_traceback() -> None:
    """One over AgentGym, one over OpenEnv's socket, and one that the page to play by hand asked for."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret of the server")

    world = replace(planted_world(), index=Mock(similar=broken))
    with served(world) as address, httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
        handle = client.post("/agentgym/create").json()["id"]
        client.post("/agentgym/reset", json={"id": handle, "data_idx": 0})
        client.post("/agentgym/step", json={"id": handle, "action": "bug"})
        with connect(f"ws://{address}/ws") as socket:
            for kind, data in (("reset", {"seed": 0}), ("step", {"message": "bug"})):
                socket.send(json.dumps({"type": kind, "data": data}))
                told = socket.recv(20)
        answer = client.post("/nearest", json={"start": "a", "seen": "b", "action": "c"})
        assert "secret" not in str(told) + answer.text
        assert (answer.status_code, answer.json()) == (400, {"error": "internal error"})
        assert 'imagination_refused_total{reason="internal"} 3.0' in client.get("/metrics").text


def test_the_end_of_the_server_ends_its_sessions() -> None:
    model = Planted()
    with served(planted_world(model)) as address:
        httpx.post(f"http://{address}/agentgym/create", trust_env=False)
        socket = connect(f"ws://{address}/ws")
        socket.send(json.dumps({"type": "reset", "data": {"seed": 0}}))
        socket.recv(20)
        assert model.released == []
    refused(lambda: socket.recv(20), "1012", error=ConnectionClosed)
    assert len(set(model.released)) == 2


def test_the_sweep_closes_sessions_of_clients_that_are_gone() -> None:
    with served(planted_world(), ServeSettings(idle_seconds=0.2)) as address:
        httpx.post(f"http://{address}/agentgym/create", trust_env=False)
        for _ in range(200):
            if (found := measured(address))["imagination_sessions_expired_total",]:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the session is still open")
        assert found["imagination_sessions",] == 0


def test_an_address_that_is_not_ours_is_told_in_a_line() -> None:
    refused(lambda: listen("192.0.2.1", 0), "serve.host=192.0.2.1")


def test_a_server_keeps_connections_longer_than_clients_do() -> None:
    """One that hangs up after as many seconds as httpx forgets a connection does it in the middle of a request."""
    expiry = httpx.Limits().keepalive_expiry or 0.0
    assert expiry == 5
    assert min(app_module._HEAD_SECONDS, app_module.Server(Starlette(), 1).config.timeout_keep_alive) >= 2 * expiry
