"""What worlds behind a server share. If these fail, a broken answer of a server is read as an observation."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, StopReason
from real_envs.worlds.servers.client import (
    ServerGame,
    ServerReply,
    ServerTasks,
    check_url,
    commands_of,
    crashed,
    field,
    fields_of,
    flag,
    hints_of,
    number,
    text,
    timed_out,
)
from tests.support.refusal import refused

TASK = Task("t", {"seed": "0"})


class Scripted:
    """A session that answers in order; a failure among the answers is raised."""

    def __init__(self, *answers: ServerReply | EnvFailure) -> None:
        self.answers, self.closed, self.sent = list(answers), 0, []  # type: ignore[var-annotated]

    def _next(self) -> ServerReply:
        answer = self.answers.pop(0)
        if isinstance(answer, EnvFailure):
            raise answer
        return answer

    def start(self, spec: Mapping[str, str]) -> ServerReply:
        return self._next()

    def act(self, action: str) -> ServerReply:
        self.sent.append(action)
        return self._next()

    def close(self) -> None:
        self.closed += 1


def test_an_episode_is_what_the_session_said() -> None:
    session = Scripted(
        ServerReply("a room"),
        ServerReply("a lamp", 0.25),
        ServerReply("yours", None, True),
        ServerReply("a room again"),
    )
    game = ServerGame(lambda: session, ("look",))
    refused(lambda: game.step("look"), "reset first", error=RuntimeError)
    assert game.reset(TASK).text == "a room"
    assert game.step("look") == StepResult(Observation("a lamp"), 0.25, False, False)
    result = game.step("take \ud800lamp")
    assert (result.reward, result.terminated, session.sent[-1]) == (None, True, "take ?lamp")
    refused(lambda: game.step("look"), "reset first", error=RuntimeError)
    assert game.reset(TASK).text == "a room again"
    game.close()
    assert session.closed == 1


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ((ServerReply("a room", done=True),), "is over"),
        ((ServerReply("  "),), "has no text"),
        ((timed_out("too long"),), "too long"),
        ((ServerReply("a room"), crashed("it broke")), "it broke"),
    ],
)
def test_a_failure_frees_the_session(answers: tuple[ServerReply | EnvFailure, ...], match: str) -> None:
    session = Scripted(*answers)
    game = ServerGame(lambda: session, ("look",))
    if len(answers) == 2:
        game.reset(TASK)
    with pytest.raises(EnvFailure, match=match):
        game.step("look") if len(answers) == 2 else game.reset(TASK)
    assert session.closed == 1
    with pytest.raises(RuntimeError):
        game.step("look")


def test_scripted_agents_see_what_the_server_offers_and_otherwise_what_was_named() -> None:
    session = Scripted(ServerReply("a room"), ServerReply("a box", commands=("open box", "put the red key in box")))
    game = ServerGame(lambda: session, ("look", "take lamp"), privileged=True)
    assert game.reset(TASK).privileged["admissible_commands"] == ["look", "take lamp"]
    seen = game.step("look").observation.privileged
    assert seen == hints_of(("open box", "put the red key in box"))
    assert seen["entities"] == ["box", "the red key"]
    assert (seen["policy_commands"], seen["inventory"]) == ([], "")


@pytest.mark.parametrize(
    ("read", "answers"),
    [
        (field, [[], {"done": 1}]),
        (text, [None, b"a lamp"]),
        (number, ["1", None, float("nan"), float("-inf"), 10**400]),
        (flag, [0, None]),
    ],
)
def test_what_is_no_answer_is_a_failure(read: Callable[[Any, str], object], answers: list[Any]) -> None:
    for answer in answers:
        failure = refused(lambda answer=answer: read(answer, "reward"), "server", "reward", error=EnvFailure)  # type: ignore[misc]
        assert failure.reason is StopReason.ENV_CRASHED
        assert len(str(failure)) < 320


def test_what_is_an_answer_is_read() -> None:
    assert field({"reward": None}, "reward") is None
    assert (number(True, "reward"), number(3, "reward"), flag(False, "done")) == (1.0, 3.0, False)
    assert text("half a \ud83d pair", "observation") == "half a ? pair"
    assert "\n" not in str(crashed("two\nlines"))
    assert timed_out("x").reason is StopReason.ENV_TIMEOUT


def test_options_are_read_and_bad_ones_refused() -> None:
    assert commands_of("look| go north ||") == ("look", "go north")
    assert fields_of("kind=text,path=a=b") == {"kind": "text", "path": "a=b"}
    assert fields_of("") == {}
    for wrong in ("kind", "kind=text,", "=text", "a b=c"):
        refused(lambda wrong=wrong: fields_of(wrong), "name=text", error=ValueError)  # type: ignore[misc]
    check_url("http://localhost:8000/lamp", ("http", "https"))
    for wrong in ("localhost:8000", "ftp://localhost", "http://", "http://localhost:port", "http://localhost:0x1"):
        refused(lambda wrong=wrong: check_url(wrong, ("http",)), "http://host:port", error=ValueError)  # type: ignore[misc]


def game_of(answers: int) -> ServerGame:
    return ServerGame(partial(Scripted, *[ServerReply("a room")] * answers), ("look",))


def test_what_is_left_to_do_is_done_once_and_not_while_an_environment_is_in_use() -> None:
    done: list[int] = []
    tasks: ServerTasks | None = ServerTasks({"train": [TASK]}, partial(game_of, 3), 1, 5.0, lambda: done.append(1))

    async def play() -> None:
        nonlocal tasks
        assert tasks is not None
        env = tasks.make_env()
        await env.reset(TASK, 0)
        pool, tasks = tasks.pool, None
        gc.collect()
        assert done == []
        await env.step("look")
        await env.close()
        await pool.close()
        del env, pool

    asyncio.run(play())
    gc.collect()
    assert done == [1]

    other = ServerTasks({"train": [TASK]}, partial(game_of, 3), 1, 5.0, lambda: done.append(2))
    asyncio.run(other.close())
    del other
    gc.collect()
    assert done == [1, 2]
