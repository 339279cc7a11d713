"""MCP servers as worlds. If these fail, what a broken server says is learned from, or tools are called wrongly."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="pip install 'imagination[mcp]'")
from real_envs.calls import Tool, read_tools
from real_envs.env import EnvFailure
from real_envs.trajectory import StopReason
from real_envs.world import find_world
from real_envs.worlds.servers.mcp import Mcp, McpSession, McpSettings, deal_tasks, plausible_calls
from tests.support import played
from tests.support.mcp_server import COMMAND, TITLES, mcp_server, write_tasks
from tests.support.refusal import refused
from tests.support.subprocess_server import ROOT, Server

CHECK = {"call": "list_notes()", "matches": "milk"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mcp_server(tmp_path_factory.mktemp("mcp")) as running:
        yield running


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def http(server: Server, **options: object) -> McpSettings:
    return McpSettings(url=f"{server.url}/mcp", **{"timeout": 30.0, **options})  # type: ignore[arg-type]


def stdio(**options: object) -> McpSettings:
    return McpSettings(command=COMMAND, variables="PYTHONPATH", **{"timeout": 60.0, **options})  # type: ignore[arg-type]


def spec(check: object = CHECK) -> dict[str, str]:
    return {"text": "Write a note 'milk'.", "check": json.dumps(check)}


@pytest.mark.parametrize("kind", ["stdio", "http"])
def test_a_task_is_solved_by_calls(kind: str, server: Server) -> None:
    session = McpSession(stdio() if kind == "stdio" else http(server))
    for _ in range(2 if kind == "http" else 1):  # the second session finds no notes of the first
        begun = session.start(spec())
        assert begun.text.startswith("Write a note 'milk'.\n")
        assert "add_note(title: str): Writes a note down." in begun.text
        assert {"add_note(title='milk')", "list_notes()", "done()"} <= set(begun.commands)
        answers = {
            "list_notes()": "There are no notes.",
            '{"name": "add_note", "arguments": {"title": "milk"}}': "Note 1: 'milk'.",
            "[delete_note(7)]": "Error executing tool delete_note: there is no note 7",
        }
        for action, text in answers.items():
            answer = session.act(action)
            assert (answer.text, answer.reward, answer.done) == (text, 0.0, False)
        done = session.act("done()")
        assert (done.reward, done.done) == (1.0, True)
    session.close()
    session.close()


def test_what_is_no_call_is_an_ordinary_step(server: Server) -> None:
    session = McpSession(http(server))
    session.start(spec())
    for action in ("", "look", "fly(x=1)", "add_note('a', 'b')", "add_note(title=open('x'))"):
        answer = session.act(action)
        assert answer.text.startswith("Invalid call: ")
        assert not answer.done
    assert "title" in session.act("add_note(titel='x')").text, "the server itself says what is wrong"
    assert session.act("done()").reward == 0.0
    session.close()


def test_the_answer_is_checked_where_no_call_is(server: Server) -> None:
    session = McpSession(http(server))
    for action, reward in (("done(answer='It is 42.')", 1.0), ("done(answer=41)", 0.0), ("done()", 0.0)):
        session.start(spec({"matches": r"\b42\b"}))
        assert session.act(action).reward == reward
    session.start(spec({}))
    assert session.act("list_notes()").reward is None, "without a check there is no reward"
    done = session.act("done()")
    assert (done.reward, done.done) == (None, True)
    session.close()


def test_parts_that_are_no_text_are_counted(server: Server) -> None:
    session = McpSession(http(server))
    session.start(spec())
    assert session.act("misbehave(how='show')").text == "A picture.\n[no text: 2 image]"
    assert session.act("misbehave(how='nothing')").text.strip()
    session.close()


def fails(session: McpSession, action: str) -> EnvFailure:
    failure = refused(lambda: session.act(action), error=EnvFailure)
    began = time.monotonic()
    session.close()
    assert time.monotonic() - began < 10
    assert len(str(failure)) < 320
    return failure  # type: ignore[no-any-return]


def test_a_tool_that_hangs_is_a_time_out(server: Server) -> None:
    session = McpSession(http(server, timeout=3.0))
    session.start(spec())
    assert fails(session, "misbehave(how='hang')").reason is StopReason.ENV_TIMEOUT
    assert session.start(spec()).text, "the next episode is played"
    session.close()


def test_a_process_that_dies_is_a_crash_with_its_last_words() -> None:
    session = McpSession(stdio())
    session.start(spec())
    failure = fails(session, "misbehave(how='die')")
    assert failure.reason is StopReason.ENV_CRASHED
    assert "the notes burn" in str(failure)


def test_a_server_that_is_gone_is_a_crash() -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
    from tests.support.served import planted_world, served

    with served(planted_world()) as address:
        session = McpSession(McpSettings(url=f"http://{address}/mcp", timeout=10.0))
        session.start(spec())
    failure = fails(session, "reset(seed=0)")
    assert failure.reason is StopReason.ENV_CRASHED
    assert address in str(failure)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (McpSettings(command="/no/such/program"), StopReason.ENV_CRASHED),
        (McpSettings(command="sh -c 'echo nobody is here >&2; exit 1'"), StopReason.ENV_CRASHED),
        (McpSettings(command="sleep 60", timeout=0.3), StopReason.ENV_TIMEOUT),
        (McpSettings(url="http://127.0.0.1:9/mcp", timeout=3.0), StopReason.ENV_CRASHED),
    ],
)
def test_a_server_that_does_not_begin_is_a_failure(settings: McpSettings, reason: StopReason) -> None:
    session = McpSession(settings)
    failure = refused(lambda: session.start(spec()), settings.url or settings.command, error=EnvFailure)
    assert failure.reason is reason
    session.close()


def test_the_token_is_sent_and_never_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
    from tests.support.served import planted_world, served

    with served(planted_world(), token="hidden-7") as address:
        settings = McpSettings(url=f"http://{address}/mcp", token="NOTES_TOKEN", tasks=str(write_tasks(tmp_path / "t")))
        refused(lambda: played.generated(Mcp(), tmp_path / "g", {"train": 1}, settings), "NOTES_TOKEN")
        monkeypatch.setenv("NOTES_TOKEN", "guess")
        refused(lambda: played.generated(Mcp(), tmp_path / "g", {"train": 1}, settings), address)
        monkeypatch.setenv("NOTES_TOKEN", "hidden-7")
        asyncio.run(played.generated(Mcp(), tmp_path / "g", {"train": 1}, settings).close())
    assert {tool.name for tool in read_tools(tmp_path / "g")} == {"reset", "step", "done"}
    assert not any("hidden-7" in path.read_text() for path in (tmp_path / "g").iterdir())


def test_the_protocol_of_environments_holds(server: Server, tmp_path: Path) -> None:
    settings = http(server, tasks=str(write_tasks(tmp_path / "tasks.jsonl")))
    tasks = played.generated(find_world("mcp"), tmp_path / "games", {"train": 3, "heldout": 2}, settings, workers=1)
    first = tasks.tasks("train")[0]
    title = first.id.removeprefix("notes-")
    assert played.findings(tasks, ["list_notes()", f"add_note(title={title!r})", "done()"]) == []
    assert {t.id for s in ("train", "heldout") for t in tasks.tasks(s)} < {f"notes-{t}" for t in TITLES}
    names = [tool.name for tool in read_tools(tmp_path / "games")]
    assert names == ["add_note", "list_notes", "delete_note", "misbehave", "done"]


def test_a_file_of_tasks_that_changed_is_not_passed_over(server: Server, tmp_path: Path) -> None:
    settings = http(server, tasks=str(write_tasks(tmp_path / "tasks.jsonl")))

    def generate() -> None:
        Mcp().generate(tmp_path / "games", {"train": 3, "heldout": 2}, 0, settings, lambda done, total: None, 1)

    generate()
    generate()
    path = tmp_path / "tasks.jsonl"
    path.write_text(path.read_text().replace('"matches": "', '"matches": "a note called '))
    refused(generate, str(path), "run=")
    path.unlink()
    generate()


def test_tasks_are_dealt_to_splits(tmp_path: Path) -> None:
    path = write_tasks(tmp_path / "tasks.jsonl")
    with path.open("a") as file:
        file.write('\n\n{"id": "kept", "text": "x", "split": "heldout"}')
    dealt = deal_tasks(str(path), {"train": 5, "heldout": 2}, seed=3)
    assert dealt == deal_tasks(str(path), {"train": 5, "heldout": 2}, seed=3)
    assert dealt != deal_tasks(str(path), {"train": 5, "heldout": 2}, seed=4)
    assert [len(tasks) for tasks in dealt.values()] == [5, 2]
    assert len({task["id"] for tasks in dealt.values() for task in tasks}) == 7
    assert dealt["heldout"][0]["id"] == "kept"
    refused(lambda: deal_tasks(str(path), {"train": 7, "heldout": 1}, seed=0), "6", "games.train=7")
    refused(lambda: deal_tasks(str(tmp_path / "none"), {"train": 1}, seed=0), "none")


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"id": "a"}', '{"id": "", "text": "x"}', '{"id": "b", "text": "x", "check": {"call": "f()"}}',
     '{"id": "b", "text": "x", "check": {"matches": "["}}', '{"id": "b", "text": "x", "check": "milk"}',
     '{"id": "b", "text": "y", "check": {"matches": "x", "call": "look"}}', '{"id": "first", "text": "twice"}',
     '{"id": "again", "text": "x"}', '{"id": "b", "text": "y", "split": "test"}',
     '{"id": "b", "text": "y", "split": null}'],
)  # fmt: skip
def test_a_line_that_is_no_task_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "tasks").write_text(f'{{"id": "first", "text": "x"}}\n{line}\n')
    refused(lambda: deal_tasks(str(tmp_path / "tasks"), {"train": 1}, seed=0), "line 2")


def test_a_file_of_tasks_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "tasks"
    path.write_text('{"id": "a", "text": "one\u2028two"}\r\n', encoding="utf-8-sig")  # as Windows and JavaScript do
    assert deal_tasks(str(path), {"train": 1}, seed=0)["train"][0]["text"] == "one\u2028two"
    path.write_bytes('{"id": "a", "text": "Müsli"}'.encode("latin-1"))
    refused(lambda: deal_tasks(str(path), {"train": 1}, seed=0), str(path))


@pytest.mark.parametrize(
    "options",
    [{"url": "ftp://x"}, {"url": "http://a:b@x/mcp"}, {"url": "http://x/mcp", "command": "y"}, {"timeout": 0.0},
     {"token": "a secret"}, {"variables": "A+b=c"}, {"done": "say done"}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".{10}"):
        McpSettings(**options)  # type: ignore[arg-type]


def test_a_tool_that_is_called_like_the_end_is_told(server: Server) -> None:
    session = McpSession(http(server, done="list_notes"))
    refused(lambda: session.start(spec()), "env.options.done")
    session.close()


def test_plausible_calls_take_values_that_were_read() -> None:
    schema = {
        "properties": {
            "title": {"type": "string"}, "count": {"type": "integer"}, "tags": {"type": "array"},
            "place": {"enum": ["top"]}, "more": {"type": "boolean"},
        },
        "required": ["title", "count", "tags", "place"],
    }  # fmt: skip
    calls = list(plausible_calls([Tool("f", "", schema), Tool("g", "", {})], "Add 'milk' 3 times.", most=2))
    assert calls == ["f(title='milk', count=3, tags=['milk'], place='top')", "g()"]


def test_without_the_package_it_says_what_to_install() -> None:
    script = (
        "import importlib.util as u, sys\nfind = u.find_spec\nsys.modules['mcp'] = sys.modules['mcp_types'] = None\n"
    )
    script += "u.find_spec = lambda name, *more: None if name == 'mcp' else find(name, *more)\n"
    script += "from real_envs.world import find_world\nfind_world('mcp')"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ), cwd=ROOT)
    assert "imagination[mcp]" in ran.stderr.splitlines()[-1]
