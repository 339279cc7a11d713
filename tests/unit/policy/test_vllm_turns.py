"""Whose turn it is where vLLM runs both models. If these fail, vLLM runs half-empty batches, or a rollout hangs.

vLLM is not needed: what stands in its place writes a token a step for every request, as its scheduler does, and counts.
The engines around it are the real ones; ``tests/vllm`` has the real vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imagination.rollout.engines import Engines
from policy.lm.engine import Engine, Sampling
from policy.lm.engines import vllm as vllm_engine
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.vllm import VllmEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import EngineSettings
from tests.benchmarks.dreaming import Shape, make_engines
from tests.support.asking import TOKENIZER
from tests.support.engines import CONTEXT, MODEL, NEVER

CHAT = ChatFormat(TOKENIZER)
SETTINGS = EngineSettings(name="vllm")


class Scheduler:
    """Takes requests into the next step at once, like vLLM with slots to spare; ``steps`` are the sizes of its batches.

    Attributes:
        breaks: at its next step.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.left: dict[str, int] = {}
        self.breaks = False
        self.engine_core = SimpleNamespace(_finalizer=SimpleNamespace(detach=lambda: None), engine_core=None)

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.left[name] = params.max_tokens

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        assert method == "reload_weights"

    def reset_prefix_cache(self) -> bool:
        return True

    def step(self) -> list[Any]:
        if self.breaks:
            self.breaks = False
            raise RuntimeError("broken")
        self.steps.append(len(self.left))
        self.left = {name: left - 1 for name, left in self.left.items()}
        done = [name for name, left in self.left.items() if not left]
        for name in done:
            del self.left[name]
        wrote = SimpleNamespace(token_ids=[7], finish_reason="stop", logprobs=[{7: SimpleNamespace(logprob=-1.0)}])
        return [SimpleNamespace(request_id=name, finished=True, outputs=[wrote]) for name in done]


@pytest.fixture(autouse=True)
def _scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = SimpleNamespace(
        SamplingParams=SimpleNamespace,
        inputs=SimpleNamespace(TokensPrompt=SimpleNamespace),
        sampling_params=SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=0)),
    )
    monkeypatch.setattr(vllm_engine, "import_vllm", lambda: vllm)
    monkeypatch.setattr(vllm_engine, "_start", lambda *args: Scheduler())


def pair() -> tuple[Engine, Engine]:
    """Policy and world model of a run."""
    engines = Engines(SETTINGS)
    return engines.make(MODEL, CHAT, CONTEXT), engines.make(MODEL, CHAT, CONTEXT)


def apart() -> tuple[Engine, Engine]:
    return Engines(SETTINGS).make(MODEL, CHAT, CONTEXT), Engines(SETTINGS).make(MODEL, CHAT, CONTEXT)


def benchmarked() -> tuple[Engine, Engine]:
    shape = Shape(vocab=270, hidden=32, layers=1, heads=2, kv_heads=2, mlp=32)
    return make_engines("vllm", shape, torch.float32)


def steps(engine: Engine) -> list[int]:
    assert isinstance(engine, VllmEngine)
    found: list[int] = engine._llm.steps
    return found


def ask(engine: Engine, tokens: int) -> Any:
    return engine.complete([5], Sampling(tokens, NEVER), 0)


def within_seconds(run: Any) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(run, timeout=20)

    return asyncio.run(limited())


async def dream(policy: Engine, world: Engine) -> None:
    async def episode(k: int) -> None:
        for turn in range(16):
            await ask(policy, 2 + (k * 5 + turn * 3) % 7)
            await ask(world, 1)

    await asyncio.gather(*(episode(k) for k in range(16)))


def fullness(make: Callable[[], tuple[Engine, Engine]]) -> float:
    """Mean size of a batch in dreams whose actions are of different lengths."""
    engines = make()
    within_seconds(dream(*engines))
    sizes = [size for engine in engines for size in steps(engine)]
    asked = sum(2 + (k * 5 + turn * 3) % 7 + 1 for k in range(16) for turn in range(16))
    assert sum(sizes) == asked  # every token of every request was written, by either schedule
    return asked / len(sizes)


@pytest.mark.parametrize("make", [pair, benchmarked])
def test_policy_and_world_model_run_fuller_batches(make: Callable[[], tuple[Engine, Engine]]) -> None:
    """In the dreams in which ``test_scheduling`` asks it of the engine in process, with which vLLM is compared."""
    assert fullness(make) > 1.05 * fullness(apart)


def test_who_has_more_requests_goes_first_by_hand() -> None:
    """Three of two tokens against one of one: two steps of three, then the one that would have been done at once."""
    policy, world = pair()
    order: list[str] = []

    async def asked(name: str, engine: Engine, tokens: int) -> None:
        await ask(engine, tokens)
        order.append(name)

    async def run() -> None:
        await asyncio.gather(asked("world", world, 1), *(asked("policy", policy, 2) for _ in range(3)))

    within_seconds(run())
    assert steps(policy) == [3, 3]
    assert steps(world) == [1]
    assert order == ["policy", "policy", "policy", "world"]


def test_requests_come_into_a_batch_that_is_under_way() -> None:
    """Continuous batching: the world's long request has begun when it is stopped for the policy's three; what they ask
    of the world next joins it in the middle."""
    policy, world = pair()

    async def later() -> None:
        while not steps(world):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await ask(policy, 2)
        await ask(world, 2)

    async def run() -> None:
        await asyncio.gather(ask(world, 6), *(later() for _ in range(3)))

    within_seconds(run())
    assert steps(policy) == [3, 3]
    sizes = steps(world)
    alone = sizes.index(4)
    assert sizes == [*[1] * alone, 4, 4, *[1] * (6 - alone - 2)]
    assert 1 <= alone <= 3


def test_who_was_cancelled_holds_up_nobody() -> None:
    """Three callers of the policy give up; the world's one request must not wait for them."""
    policy, world = pair()

    async def run() -> None:
        gone = [asyncio.ensure_future(ask(policy, 50)) for _ in range(3)]
        while not steps(policy):  # noqa: ASYNC110
            await asyncio.sleep(0)
        stays = asyncio.ensure_future(ask(world, 2))
        await asyncio.sleep(0)
        for one in gone:
            one.cancel()
        await stays
        await asyncio.gather(*gone, return_exceptions=True)

    within_seconds(run())
    assert len(steps(policy)) < 10
    assert steps(world) == [1, 1]


def test_who_broke_or_was_interrupted_holds_up_nobody() -> None:
    policy, world = pair()

    async def broken() -> Any:
        policy._llm.breaks = True  # type: ignore[attr-defined]
        return await asyncio.gather(ask(world, 2), *(ask(policy, 2) for _ in range(3)), return_exceptions=True)

    answer, *lost = within_seconds(broken())
    assert answer.ids == (7,)
    assert [str(error) for error in lost] == ["broken"] * 3

    async def interrupted() -> None:
        for _ in range(3):
            asyncio.ensure_future(ask(policy, 50))  # noqa: RUF006
        while not steps(policy):  # noqa: ASYNC110
            await asyncio.sleep(0)

    within_seconds(interrupted())
    assert within_seconds(ask(world, 2)).ids == (7,)
    assert within_seconds(ask(policy, 2)).ids == (7,)


def test_only_the_engine_in_process_in_fp32_is_exact() -> None:
    """Log-probs of all others are compared with the trainer's before they are learned from."""
    policy, _ = pair()
    assert not policy.exact
    assert Engines(EngineSettings()).make(MODEL, CHAT, CONTEXT).exact
    assert not Engines(EngineSettings(dtype="bfloat16")).make(MODEL, CHAT, CONTEXT).exact
    rounded = MODEL.__class__(MODEL.config).to(torch.bfloat16)  # the trainer itself computes coarsely
    for dtype in ("auto", "float32"):
        assert not InProcessEngine(rounded, CONTEXT, EngineSettings(dtype=dtype)).exact
