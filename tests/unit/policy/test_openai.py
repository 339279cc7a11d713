"""If these fail, a dream hangs or dies with its server, or learns from tokens that no model wrote.

The server is a real one on loopback; each test says what it answers, request by request.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from policy.lm.engine import Completion, ContextFull, EngineFailure, EngineUnavailable, Sampling
from policy.lm.engines.openai import OpenAIEngine
from policy.lm.settings import EngineSettings

STOP = 2
SAMPLING = Sampling(max_tokens=3, stop=STOP, temperature=0.7)


def choice(**changes: Any) -> dict[str, Any]:
    """A good answer, with ``changes``."""
    good = {
        "token_ids": [7, 8, STOP],
        "logprobs": {"token_logprobs": [-0.5, -0.25, -1.0]},
        "finish_reason": "stop",
        "stop_reason": STOP,
    }
    return {"choices": [{**good, **changes}]}


class Server:
    """Answers each completion with the next of ``script``: a status, a body, or "cut" for a connection that breaks."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.models: list[dict[str, Any]] = [{"id": "world", "max_model_len": 64}]
        self.requests: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"data": server.models})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append(json.loads(body))
                step = server.script.pop(0) if server.script else choice()
                if step == "cut":
                    self.close_connection = True
                elif isinstance(step, int):
                    self.answer(step, {"error": {"message": "no such thing"}})
                else:
                    self.answer(200, step)

            def answer(self, status: int, body: Any) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})

    def engine(self, context: int = 100, **settings: Any) -> OpenAIEngine:
        settings = {"url": self.url, "served_model": "world", "retries": 2, **settings}
        return OpenAIEngine(context, EngineSettings(name="openai", **settings), backoff=0.01)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.thread.start()
    yield server
    server.http.shutdown()
    server.thread.join()
    server.http.server_close()


def ask(engine: OpenAIEngine, ids: tuple[int, ...] = (5, 6), seed: int = 0) -> Completion:
    return asyncio.run(engine.complete(ids, SAMPLING, seed))


def test_tokens_go_in_and_come_out_with_their_log_probs(server: Server) -> None:
    """What is asked must be complete: a server's own top_p, end token or text stop would change the distribution."""
    assert ask(server.engine()) == Completion((7, 8, STOP), (-0.5, -0.25, -1.0), stopped=True, version=0)
    request = server.requests[0]
    assert request["prompt"] == [5, 6]
    wanted = {"max_tokens": 3, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "stop": [], "stop_token_ids": [STOP]}
    wanted |= {"ignore_eos": True, "return_token_ids": True, "min_p": 0.0}
    assert {key: request[key] for key in wanted} == wanted


def test_each_seed_is_another_one_in_all_its_bits(server: Server) -> None:
    """Samplers that read 32 bits would write the same episode twice for seeds that differ in the others."""
    engine = server.engine()
    for seed in (0, 1, 1 << 32, 1 << 40, 0):
        ask(engine, seed=seed)
    sent = [request["seed"] & 0xFFFFFFFF for request in server.requests]
    assert len(set(sent)) == 4
    assert sent[0] == sent[4]


@pytest.mark.parametrize("trouble", [429, 500, 503, "cut"])
def test_a_passing_trouble_is_waited_out(server: Server, trouble: Any) -> None:
    """A busy or restarting server must not cost an episode."""
    server.script = [trouble, trouble]
    assert ask(server.engine()).stopped
    assert len(server.requests) == 3


@pytest.mark.parametrize("trouble", [503, "cut"])
def test_a_lasting_trouble_fails_the_completion_after_the_retries(server: Server, trouble: Any) -> None:
    """Without a bound a dead server would hang the run for ever."""
    server.script = [trouble] * 10
    with pytest.raises(EngineFailure, match="after 3 attempts"):
        ask(server.engine())
    assert len(server.requests) == 3


def test_a_slow_server_is_asked_again_and_then_given_up(server: Server) -> None:
    """A connection that never answers is a trouble like any other."""
    release = threading.Event()

    server.http.RequestHandlerClass.do_POST = lambda handler: release.wait(5)  # type: ignore[attr-defined]
    try:
        with pytest.raises(EngineFailure, match="ReadTimeout"):
            ask(server.engine(timeout=0.1, retries=1))
    finally:
        release.set()


def test_a_refusal_is_not_repeated(server: Server) -> None:
    """The same wrong request stays wrong; its reason must reach the episode's record."""
    server.script = [400]
    with pytest.raises(EngineFailure, match=r"400 .*no such thing"):
        ask(server.engine())
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"<html>", "JSON"),
        ({"choices": []}, "lacks"),
        (choice(token_ids=None), "lacks"),
        (choice(logprobs=None), "lacks"),
        (choice(logprobs={"token_logprobs": [-0.5, None, -1.0]}), "lacks"),
        (choice(logprobs={"token_logprobs": [-0.5]}), "3 token ids and 1 log-probs"),
        (choice(token_ids=[], logprobs={"token_logprobs": []}), "0 token ids"),
        (choice(logprobs={"token_logprobs": [-0.5, float("nan"), -1.0]}), "not finite"),
        (choice(logprobs={"token_logprobs": [-0.5, -9999.0, -1.0]}), "not finite"),
        (choice(finish_reason="abort"), "own: abort"),
        (choice(token_ids=[7, 8, 9], stop_reason=9), "own: stop 9"),
        (choice(token_ids=[7], logprobs={"token_logprobs": [-1.0]}, finish_reason="length"), "after 1 tokens"),
    ],
)
def test_an_answer_that_cannot_be_used_is_a_failure(server: Server, answer: Any, reason: str) -> None:
    """Typed, so that the episode is counted and enters no loss: an answer cut short would look like the world's."""
    server.script = [answer]
    with pytest.raises(EngineFailure, match=reason):
        ask(server.engine())


def test_an_end_is_told_from_a_cut(server: Server) -> None:
    """A prediction that did not end is invalid; one that ended is not."""
    server.script = [choice(token_ids=[7, 8, 9], finish_reason="length", stop_reason=None)]
    server.script += [choice()]
    engine = server.engine()
    assert [ask(engine).stopped, ask(engine).stopped] == [False, True]


def test_the_smaller_context_counts(server: Server) -> None:
    """A prompt that the server would refuse ends its episode as full, not as failed."""
    engine = server.engine(context=100)
    assert engine.context == 64
    ask(engine, tuple(range(61)))
    with pytest.raises(ContextFull):
        ask(engine, tuple(range(62)))
    assert server.engine(context=10).context == 10


def test_many_ask_at_once_and_one_failure_is_alone(server: Server) -> None:
    """One broken episode must not take its neighbours with it."""
    server.script = [choice()] * 5 + [400] + [choice()] * 14
    engine = server.engine(slots=4)

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(engine.complete((5,), SAMPLING, k) for k in range(20)), return_exceptions=True)

    got = asyncio.run(all_of_them())
    assert sorted(type(one).__name__ for one in got) == ["Completion"] * 19 + ["EngineFailure"]
    assert asyncio.run(all_of_them())  # another event loop, as the next update has


def test_no_server_and_no_such_model_say_what_to_do(server: Server) -> None:
    """Found before a stage begins, not after an update full of failures."""
    with pytest.raises(EngineUnavailable, match=r"has world"):
        server.engine(served_model="other")
    server.models = []
    with pytest.raises(EngineUnavailable, match="has no model"):
        server.engine()
    with pytest.raises(EngineUnavailable, match="vllm serve"):
        server.engine(url="http://127.0.0.1:1/v1")


def test_the_weights_of_a_server_cannot_be_updated(server: Server) -> None:
    """A policy trained this way would be sampled from its old weights for ever, unnoticed."""
    with pytest.raises(EngineUnavailable, match="engine=vllm"):
        server.engine().update_weights()
