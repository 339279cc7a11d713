"""A dream behind MCP, played by the package's own client. If these fail, an agent that speaks it cannot dream here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx
import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
pytest.importorskip("mcp", reason="pip install 'imagination[mcp]'")
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

from imagination.settings.dreams import ServeSettings
from real_envs.calls import Tool
from tests.support.served import STARTS, Planted, labelled, measured, planted_world, served, sessions_left

NOTES = (
    Tool("add_note", "Adds a note.", {"type": "object", "properties": {"title": {"type": "string"}}}),
    Tool("reset", "Deletes all notes.", {"type": "object", "properties": {}}),
)
HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


@pytest.fixture
def address() -> Iterator[str]:
    with served(planted_world(), ServeSettings(sessions=2, message_bytes=4096)) as found:
        yield found


def client(address: str, query: str = "", mode: str = "legacy", token: str = "") -> AbstractAsyncContextManager[Client]:
    there = f"http://{address}/mcp{query}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    http = httpx2.AsyncClient(headers=headers, trust_env=False)
    return Client(streamable_http_client(there, http_client=http), mode=mode, read_timeout_seconds=20)


def text(result: CallToolResult) -> str:
    (part,) = result.content
    assert part.type == "text"
    return part.text


async def play(address: str, seed: int, actions: list[str]) -> list[Any]:
    """Texts, rewards and ends of an episode."""
    async with client(address) as dream:
        begun = await dream.call_tool("reset", {"seed": seed})
        steps = [await dream.call_tool("step", {"action": action}) for action in actions]
        return [(text(step), step.structured_content["reward"], step.structured_content["done"])
                for step in (begun, *steps)]  # fmt: skip


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_an_episode_is_played_to_its_end(address: str, mode: str) -> None:
    async def go() -> None:
        async with client(address, mode=mode) as dream:
            tools = {tool.name: tool.input_schema for tool in (await dream.list_tools()).tools}
            assert set(tools) == {"reset", "step"}
            assert tools["step"]["required"] == ["action"]
            begun = await dream.call_tool("reset", {"seed": 1})
            assert text(begun) == STARTS["hall@0"].text
            assert measured(address)["imagination_sessions",] == 1
            looked = await dream.call_tool("step", {"action": "look"})
            assert text(looked).startswith("look 0 ")
            assert looked.structured_content["confidence"] == 0.75
            won = await dream.call_tool("step", {"action": "win"})
            facts = won.structured_content
            assert (text(won), facts["reward"], facts["done"], facts["stop"]) == ("You win.", 1.0, True, "terminated")
            over = await dream.call_tool("step", {"action": "look"})
            assert over.is_error
            assert over.structured_content == {"refused": "not_running"}

    asyncio.run(go())
    assert sessions_left(address) == 0
    found = measured(address)
    assert labelled(found, "imagination_episodes_total") == {"terminated": 1}
    assert labelled(found, "imagination_refused_total") == {"not_running": 1}


def test_the_same_seed_and_actions_replay_the_same_dream(address: str) -> None:
    actions = ["look", "go north", "look"]
    first = asyncio.run(play(address, 7, actions))
    assert asyncio.run(play(address, 7, actions)) == first
    assert asyncio.run(play(address, 8, actions)) != first


def test_two_clients_at_once_have_a_dream_each(address: str) -> None:
    async def both() -> list[list[Any]]:
        return await asyncio.gather(play(address, 3, ["a", "b"]), play(address, 5, ["c", "win"]))

    alone = [asyncio.run(play(address, 3, ["a", "b"])), asyncio.run(play(address, 5, ["c", "win"]))]
    assert asyncio.run(both()) == alone
    assert sessions_left(address) == 0


@pytest.mark.parametrize(("action", "stop"), [("doubt", "unsure"), ("break", None), ("a" * 2001, None)])
def test_a_step_without_an_answer_is_the_error_of_its_call(address: str, action: str, stop: str | None) -> None:
    async def go() -> CallToolResult:
        async with client(address) as dream:
            await dream.call_tool("reset", {"seed": 0})
            return await dream.call_tool("step", {"action": action})

    failed = asyncio.run(go())
    assert failed.is_error
    assert len(text(failed).splitlines()) == 1
    assert "Gold" not in text(failed), "what is doubted is no answer"
    found = measured(address)
    if stop:
        assert failed.structured_content["stop"] == stop
        assert labelled(found, "imagination_episodes_total") == {stop: 1}
    else:
        assert sum(labelled(found, "imagination_refused_total").values()) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("fly", {}, "invalid"),
        ("step", {"action": 3}, "invalid"),
        ("step", {"action": "look", "tone": "loud"}, "invalid"),
        ("step", {"action": "look"}, "not_running"),
        ("reset", {"seed": -1}, "invalid"),
        ("reset", {"task": "nowhere"}, "unknown_task"),
    ],
)
def test_what_a_call_must_not_say_is_typed_and_counted(
    address: str, name: str, arguments: dict[str, object], kind: str
) -> None:
    async def go() -> CallToolResult:
        async with client(address) as dream:
            return await dream.call_tool(name, arguments)

    failed = asyncio.run(go())
    assert (failed.is_error, failed.structured_content) == (True, {"refused": kind})
    assert labelled(measured(address), "imagination_refused_total") == {kind: 1}


def test_a_mistake_of_ours_shows_no_traceback(address: str) -> None:
    async def go() -> CallToolResult:
        async with client(address) as dream:
            await dream.call_tool("reset", {"seed": 0})
            return await dream.call_tool("step", {"action": "bug"})

    assert text(asyncio.run(go())) == "internal error"


def test_a_client_that_leaves_in_the_middle_frees_its_session(address: str) -> None:
    async def go() -> None:
        async with client(address) as dream:
            await dream.call_tool("reset", {"seed": 0})
            raise RuntimeError("gave up")

    for _ in range(3):  # more than there may be at a time
        with pytest.raises((RuntimeError, ExceptionGroup), match=r"gave up|unhandled"):
            asyncio.run(go())
        assert sessions_left(address) == 0


def test_a_client_that_vanishes_frees_its_session_when_it_was_idle() -> None:
    model = Planted()
    with served(planted_world(model), ServeSettings(idle_seconds=0.3)) as address:
        opened = initialize(address)
        assert opened.status_code == 200
        assert measured(address)["imagination_sessions",] == 1
        assert sessions_left(address) == 0
        time.sleep(0.05)
        again = httpx.delete(f"http://{address}/mcp", headers=of_session(opened), trust_env=False)
        assert again.status_code == 404
        assert measured(address)["imagination_sessions_expired_total",] == 1


def initialize(address: str, query: str = "", headers: dict[str, str] | None = None) -> httpx.Response:
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    there = f"http://{address}/mcp{query}"
    return httpx.post(there, json=message, headers={**HEADERS, **(headers or {})}, trust_env=False)


def of_session(opened: httpx.Response) -> dict[str, str]:
    return {**HEADERS, "Mcp-Session-Id": opened.headers["Mcp-Session-Id"]}


def test_a_full_server_takes_no_more(address: str) -> None:
    opened = [initialize(address) for _ in range(3)]
    assert [response.status_code for response in opened] == [200, 200, 503]
    assert "sessions" in opened[2].json()["error"]["message"]
    httpx.delete(f"http://{address}/mcp", headers=of_session(opened[0]), trust_env=False)
    assert sessions_left(address, seconds=0.3) == 1
    assert initialize(address).status_code == 200


def test_what_is_no_message_is_refused_without_a_session(address: str) -> None:
    there = f"http://{address}/mcp"
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    with httpx.Client(headers=HEADERS, trust_env=False) as http:
        assert http.get(there).status_code == 405
        assert http.post(there, content="{").status_code == 400
        assert http.post(there, content="[" * 3000).status_code == 400
        assert http.post(there, content="a" * 5000).status_code == 400
        assert http.post(there, json=call).status_code == 400
        assert http.post(there, json=call, headers={"Mcp-Session-Id": "123"}).status_code == 404
        handle = http.post(f"http://{address}/agentgym/create").json()["id"]  # a session, and none of MCP
        assert http.post(there, json=call, headers={"Mcp-Session-Id": str(handle)}).status_code == 404
    assert initialize(address, "?seed=-1").status_code == 400
    assert initialize(address, "?seed=1&task=nowhere").status_code == 400
    assert measured(address)["imagination_sessions",] == 1, "AgentGym's"


def test_only_who_shows_the_token_may_connect() -> None:
    async def tools(token: str) -> int:
        async with client(address, token=token) as dream:
            return len((await dream.list_tools()).tools)

    with served(planted_world(), token="secret") as address:
        assert asyncio.run(tools("secret")) == 2
        assert sessions_left_with(address, "secret") == 0
        for wrong in ("", "guess"):
            with pytest.raises((MCPError, ExceptionGroup)):
                asyncio.run(tools(wrong))
        assert initialize(address).status_code == 401
        opened = httpx.get(f"http://{address}/metrics", headers={"Authorization": "Bearer secret"}, trust_env=False)
        assert "imagination_sessions_opened_total 1.0" in opened.text


def sessions_left_with(address: str, token: str) -> float:
    for _ in range(100):
        found = httpx.get(f"http://{address}/metrics", headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        if "imagination_sessions 0.0" in found.text:
            return 0
        time.sleep(0.05)
    return 1


def test_a_world_with_tools_has_them_and_a_call_is_its_action() -> None:
    model = Planted()

    async def go() -> None:
        async with client(address) as dream:
            tools = {tool.name: tool for tool in (await dream.list_tools()).tools}
            assert set(tools) == {"add_note", "reset", "reset_dream"}
            assert tools["add_note"].input_schema == NOTES[0].schema
            await dream.call_tool("reset_dream", {"seed": 1})
            await dream.call_tool("add_note", {"title": "it's late"})
            await dream.call_tool("reset")
            failed = await dream.call_tool("step", {"action": "look"})
            assert failed.is_error

    with served(replace(planted_world(model), tools=NOTES)) as address:
        asyncio.run(go())
    assert [action for action, _ in model.asked] == ['add_note(title="it\'s late")', "reset()"]


def test_an_address_that_names_the_episode_begins_it(address: str) -> None:
    async def go() -> list[Any]:
        async with client(address, "?task=hall&seed=7") as dream:
            assert {tool.name for tool in (await dream.list_tools()).tools} == {"step"}
            assert dream.instructions == STARTS["hall@0"].text
            assert (await dream.call_tool("reset", {"seed": 3})).is_error
            return [text(await dream.call_tool("step", {"action": "look"}))]

    assert asyncio.run(go())[0] == asyncio.run(play(address, 7, ["look"]))[1][0]


def test_without_the_package_the_server_serves_the_others() -> None:
    script = """
import sys
sys.modules["mcp"] = sys.modules["mcp_types"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "mcp" else find(name, *more)
import httpx
from tests.support.served import planted_world, served
with served(planted_world()) as address:
    assert httpx.get(f"http://{address}/health", trust_env=False).status_code == 200
    assert httpx.post(f"http://{address}/mcp", trust_env=False).status_code == 404
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
