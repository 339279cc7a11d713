"""If these fail, rollouts are slow, hang, or take more memory than they were given. What is written does not depend on
who runs when.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from policy.lm.engine import Completion, Sampling
from policy.lm.engines.inprocess import engine as inprocess
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler, MemoryTooSmall
from policy.lm.settings import EngineSettings
from tests.support.asking import prompt, together
from tests.support.engines import CONTEXT, MODEL, NEVER, assert_scored


async def until_it_runs(engine: InProcessEngine) -> None:
    while not engine.counts.steps:  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_who_waits_gets_the_slot_of_who_is_done() -> None:
    """Continuous batching: with two slots, one long request and five short ones take as many steps as the long one."""
    engine = InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=2))
    ids = [prompt(4 + k, seed=k) for k in range(6)]
    lengths = [40, 7, 7, 7, 7, 7]
    got = together(*(engine.complete(i, Sampling(n, NEVER), 0) for i, n in zip(ids, lengths, strict=True)))
    for prompt_, completion in zip(ids, got, strict=True):
        assert_scored(MODEL, prompt_, completion, 1.0)
    assert engine.counts.steps == 40


def test_a_beginning_in_common_is_read_once() -> None:
    """The episodes of a group start alike: eleven of twelve copy the keys of the first. So does an episode that starts
    later, from what an episode before it left behind."""
    engine = InProcessEngine(MODEL, CONTEXT)
    start = prompt(60, seed=0)
    group = [[*start, *prompt(3, seed=k)] for k in range(12)]
    got = together(*(engine.complete(ids, Sampling(1, NEVER), k, session=k) for k, ids in enumerate(group)))
    for ids, completion in zip(group, got, strict=True):
        assert_scored(MODEL, ids, completion, 1.0)
    assert engine.counts.fed == 60 + 12 * 3
    for session in range(12):
        engine.release(session)
    (late,) = together(engine.complete([*start, 9], Sampling(1, NEVER), 0, session="late"))
    assert_scored(MODEL, [*start, 9], late, 1.0)
    assert engine.counts.fed == 60 + 12 * 3 + 1


def test_keys_of_old_weights_are_never_copied() -> None:
    """A released slot keeps its keys for others, but not beyond an update."""
    engine = InProcessEngine(MODEL, CONTEXT)
    ids = prompt(40, seed=0)
    together(engine.complete(ids, Sampling(1, NEVER), 0, session="a"))
    engine.release("a")
    engine.update_weights()
    (completion,) = together(engine.complete(ids, Sampling(1, NEVER), 0))
    assert engine.counts.fed == 80
    assert completion.version == 1


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a step's memory is bounded; rows that decode go first and are not held up."""
    monkeypatch.setattr(inprocess, "_STEP_TOKENS", 16)
    engine = InProcessEngine(MODEL, CONTEXT)
    long, short = prompt(100, seed=1), prompt(3, seed=2)
    got = together(engine.complete(long, Sampling(5, NEVER), 0), engine.complete(short, Sampling(5, NEVER), 1))
    assert_scored(MODEL, long, got[0], 1.0)
    assert_scored(MODEL, short, got[1], 1.0)
    assert engine.counts.steps >= 100 / 16 + 4


def test_memory_stays_within_its_budget() -> None:
    """Bytes by hand: 2 layers, keys and values, 2 heads of 8, fp32, one place more than the context. Fewer slots than
    asked for where they do not fit, and a clear refusal where none does."""
    slot = 2 * 2 * 2 * 8 * 4 * (CONTEXT + 1)
    engine = InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=64, memory_gib=3.5 * slot / 2**30))
    assert engine.slots == 3
    assert engine._decoder.cache.kv.nbytes == 3 * slot
    got = together(*(engine.complete(prompt(5, seed=k), Sampling(4, NEVER), k, session=k) for k in range(9)))
    assert all(isinstance(one, Completion) for one in got)
    with pytest.raises(MemoryTooSmall, match="lower the context"):
        InProcessEngine(MODEL, CONTEXT, EngineSettings(memory_gib=0.9 * slot / 2**30))


def test_a_cancelled_request_leaves_its_slot() -> None:
    """A rollout that is interrupted must not cost the next one a slot, nor hang it."""
    engine = InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=1))
    ids = prompt(5, seed=0)

    async def give_up() -> None:
        asked = [asyncio.ensure_future(engine.complete(ids, Sampling(90, NEVER), 0, session=k)) for k in range(2)]
        await until_it_runs(engine)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(give_up())
    (completion,) = together(engine.complete(ids, Sampling(3, NEVER), 1))
    assert_scored(MODEL, ids, completion, 1.0)
    assert engine.load == 0


def test_an_interrupted_loop_leaves_an_engine_that_works() -> None:
    """Ctrl-C ends the event loop in the middle of a step's waiting; the next loop starts from a clean slate."""
    shared = DeviceScheduler()
    engine, other = (InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=2), scheduler=shared) for _ in range(2))
    ids = prompt(5, seed=0)

    async def interrupted() -> None:
        task = asyncio.ensure_future(engine.complete(ids, Sampling(90, NEVER), 0, session="a"))
        await until_it_runs(engine)
        assert not task.done()

    asyncio.run(interrupted())
    for one in (other, engine):
        (completion,) = together(one.complete(ids, Sampling(3, NEVER), 1, session="a"))
        assert_scored(MODEL, ids, completion, 1.0)


def test_engines_that_share_a_device_run_full_batches() -> None:
    """Two engines in turn, as policy and world model: the one that more episodes wait for goes first, so steps are
    fewer than without; where the others wait until nearly all have come, they are fewer still, if prompts have steps of
    their own. Nobody starves."""

    def steps(*schedulers: DeviceScheduler, graphed: bool = False) -> int:
        a, b = (InProcessEngine(MODEL, CONTEXT, scheduler=scheduler) for scheduler in schedulers)
        a._decoder.widths = b._decoder.widths = (1,) if graphed else ()

        async def episode(k: int) -> None:
            ids = prompt(3, seed=k)
            for turn in range(16):
                for engine, n in ((a, 2 + (k * 5 + turn * 3) % 7), (b, 4 if graphed else 1)):
                    completion = await engine.complete(ids, Sampling(n, NEVER), turn, session=k)
                    ids = [*ids, *completion.ids]

        async def run() -> None:
            await asyncio.wait_for(asyncio.gather(*(episode(k) for k in range(16))), timeout=60)

        asyncio.run(run())
        return a.counts.steps + b.counts.steps

    assert steps(*[DeviceScheduler()] * 2) < steps(DeviceScheduler(), DeviceScheduler())
    assert steps(*[DeviceScheduler(8)] * 2, graphed=True) < steps(*[DeviceScheduler()] * 2, graphed=True)


@pytest.mark.parametrize("stay", [1, 4])
def test_an_engine_that_always_has_requests_leaves_steps_to_the_other(stay: int) -> None:
    """As of a server that plays without an end: a few requests do not keep the device from many."""
    shared = DeviceScheduler(stay)
    busy, other = (InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=8), scheduler=shared) for _ in range(2))

    async def run() -> None:
        async def without_an_end() -> None:
            for k in range(10_000):
                await busy.complete(prompt(3, seed=k), Sampling(2, NEVER), k)

        endless = asyncio.ensure_future(without_an_end())
        await until_it_runs(busy)
        asked = [other.complete(prompt(3, seed=k), Sampling(3, NEVER), k) for k in range(8)]
        await asyncio.wait_for(asyncio.gather(*asked), timeout=60)
        assert not endless.done()
        endless.cancel()

    asyncio.run(run())


def test_weights_do_not_change_under_requests() -> None:
    """Keys of the old weights would go on under the new ones, or their slot be given away. Refused while a request runs
    and while it only waits, without harm to either."""
    engine = InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=1))
    rows = [prompt(5, seed=k) for k in range(2)]

    async def run() -> list[Completion]:
        asked = [asyncio.ensure_future(engine.complete(ids, Sampling(20, NEVER), 0, session=ids[0])) for ids in rows]
        await asyncio.sleep(0)
        refused("2 requests are under way")
        await until_it_runs(engine)
        refused("2 requests are under way")
        return await asyncio.wait_for(asyncio.gather(*asked), timeout=60)

    def refused(why: str) -> None:
        for change in (engine.update_weights, engine.reset):
            with pytest.raises(RuntimeError, match=why):
                change()

    for ids, completion in zip(rows, asyncio.run(run()), strict=True):
        assert_scored(MODEL, ids, completion, 1.0)
        assert completion.version == 0
    engine.update_weights()
    assert engine.version == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's account of resident memory")
def test_unused_slots_cost_no_memory() -> None:
    """Large budgets are only promises: what is not written to is not there (on CPUs). Half a GiB of keys and values,
    and what a request needs of it."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    engine = InProcessEngine(MODEL, 32_768, EngineSettings(slots=64, memory_gib=4.0))
    assert engine._decoder.cache.kv.nbytes > 1 << 29
    assert resident() - before < 1 << 26
    together(engine.complete(prompt(5, seed=0), Sampling(3, NEVER), 0))
    assert resident() - before < 1 << 27
