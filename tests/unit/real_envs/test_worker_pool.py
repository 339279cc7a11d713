from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from functools import partial

import pytest

from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, StopReason
from real_envs.worker_pool import IsolatedEnv, WorkerPool
from tests.support.processes import alive, gone_within

TASK = Task("t")


class Moody:
    """Does to its process whatever the action says."""

    def __init__(self, slow_start: float = 0.0) -> None:
        time.sleep(slow_start)
        self.steps = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self.steps = 0
        if task.id == "broken":
            raise FileNotFoundError("no such game")
        return Observation(f"{task.id} {seed} in {os.getpid()}")

    def step(self, action: str) -> StepResult:
        self.steps += 1
        if action == "hang":
            time.sleep(60)
        if action == "nap":
            time.sleep(0.3)
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "raise":
            raise ValueError("the world is flat")
        if action == "fail":
            raise EnvFailure(StopReason.ENGINE_FAILED, "no engine")
        text = f"{self.steps} {action}"
        return StepResult(Observation(text, {"pid": os.getpid()}), 0.5, action == "end", action == "cut")

    def close(self) -> None: ...


def pid_of(observation: Observation) -> int:
    return int(observation.text.split()[-1])


@pytest.mark.parametrize(
    ("action", "reason", "detail"),
    [
        ("hang", StopReason.ENV_TIMEOUT, "longer than 0.4 s"),
        ("die", StopReason.ENV_CRASHED, "SIGKILL"),
        ("raise", StopReason.ENV_CRASHED, "ValueError"),
        ("fail", StopReason.ENGINE_FAILED, "no engine"),
    ],
)
async def test_what_breaks_is_a_typed_failure_and_the_pool_goes_on(
    action: str, reason: StopReason, detail: str
) -> None:
    async with WorkerPool(Moody, workers=1, step_timeout=0.4) as pool:
        env = pool.make_env()
        first = pid_of(await env.reset(TASK, 0))
        await env.step("ok")
        with pytest.raises(EnvFailure, match=detail) as caught:
            await env.step(action)
        assert caught.value.reason == reason
        assert not alive(first)
        with pytest.raises(RuntimeError):
            await env.step("ok")
        assert pid_of(await env.reset(TASK, 1)) != first
        assert (await env.step("ok")).observation.text == "1 ok"
        timeouts = int(reason == StopReason.ENV_TIMEOUT)
        assert (pool.stats.steps, pool.stats.resets) == (3, 2)
        assert (pool.stats.timeouts, pool.stats.crashes) == (timeouts, 1 - timeouts)


async def test_a_reset_that_breaks_is_a_failure_too() -> None:
    async with WorkerPool(Moody, workers=1) as pool:
        env = pool.make_env()
        with pytest.raises(EnvFailure, match="no such game"):
            await env.reset(Task("broken"), 0)
        assert (await env.reset(TASK, 5)).text.startswith("t 5")
    async with WorkerPool(partial(Moody, slow_start=30.0), workers=1, reset_timeout=0.4) as slow:
        with pytest.raises(EnvFailure) as caught:
            await slow.make_env().reset(TASK, 0)
        assert caught.value.reason == StopReason.ENV_TIMEOUT
        assert slow.stats.timeouts == 1


async def test_a_worker_killed_from_outside_fails_one_episode_or_none() -> None:
    async with WorkerPool(Moody, workers=1) as pool:
        env = pool.make_env()
        os.kill(pid_of(await env.reset(TASK, 0)), signal.SIGKILL)
        with pytest.raises(EnvFailure) as caught:
            await env.step("ok")
        assert caught.value.reason == StopReason.ENV_CRASHED
        pid = pid_of(await env.reset(TASK, 0))
        await env.step("end")
        os.kill(pid, signal.SIGKILL)  # between two episodes
        assert gone_within(pid, 2.0)
        await env.reset(TASK, 0)
        assert (await env.step("ok")).observation.text == "1 ok"
        assert pool.stats.crashes == 2


async def test_episodes_wait_for_a_worker_in_order_and_each_end_releases_it() -> None:
    order: list[str] = []

    async def episode(pool: WorkerPool, name: str, last: str) -> None:
        env = pool.make_env()
        await env.reset(Task(name), 0)
        order.append(name)
        for action in ("ok", "nap", last):
            assert (await env.step(action)).observation.text.endswith(action)
        if last == "ok":
            await env.close()

    async with WorkerPool(Moody, workers=1) as pool:
        await asyncio.gather(
            *(episode(pool, n, last) for n, last in zip("abcd", ("end", "cut", "ok", "end"), strict=True))
        )
        assert pool.stats.resets == 4
    assert order == list("abcd")


async def test_the_event_loop_goes_on_while_workers_work() -> None:
    async with WorkerPool(Moody, workers=2) as pool:
        envs = [pool.make_env(), pool.make_env()]
        await asyncio.gather(*(env.reset(TASK, 0) for env in envs))
        started = time.monotonic()
        naps = asyncio.gather(*(env.step("nap") for env in envs))
        ticks = 0
        while not naps.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 5
        assert time.monotonic() - started < 0.55  # two naps of 0.3 s, side by side


async def test_an_answer_that_came_in_time_counts_however_late_it_is_looked_at() -> None:
    """A dream's step of generation holds the loop up for longer than a real step may take."""
    async with WorkerPool(Moody, workers=1, step_timeout=0.2) as pool:
        env = pool.make_env()
        await env.reset(TASK, 0)
        step = asyncio.create_task(env.step("ok"))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(time.sleep, 0.6)
        assert (await step).observation.text == "1 ok"
        assert pool.stats.timeouts == 0


async def test_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_the_next() -> None:
    async with WorkerPool(Moody, workers=1) as pool:
        env = pool.make_env()
        await env.reset(TASK, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await env.step("nap")
        await env.reset(TASK, 0)
        assert (await env.step("ok")).observation.text == "1 ok"
        assert (pool.stats.crashes, pool.stats.timeouts) == (0, 0)
        waiting = asyncio.create_task(pool.make_env().reset(TASK, 0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await env.close()
        await pool.make_env().reset(TASK, 0)  # the cancelled one does not hold the worker


async def test_a_worker_that_is_still_asked_is_nobody_elses() -> None:
    """Neither where its environment is closed meanwhile, nor where a request is cancelled twice."""
    async with WorkerPool(partial(Moody, 0.3), workers=1) as pool:
        env = pool.make_env()
        closed = asyncio.create_task(env.reset(Task("closed"), 0))
        await asyncio.sleep(0.05)
        await env.close()
        other = pool.make_env()
        assert (await other.reset(TASK, 0)).text.startswith("t 0 in")
        assert (await closed).text.startswith("closed")
        napping = asyncio.create_task(other.step("nap"))
        for _ in range(2):
            await asyncio.sleep(0.05)
            napping.cancel()
        await asyncio.gather(napping, return_exceptions=True)
        assert (await env.reset(TASK, 1)).text.startswith("t 1 in")


def test_one_pool_serves_successive_event_loops_and_forgotten_environments() -> None:
    pool = WorkerPool(Moody, workers=1)
    env = pool.make_env()

    async def start(env: IsolatedEnv) -> int:
        return pid_of(await env.reset(TASK, 0))

    async def go_on(env: IsolatedEnv) -> str:
        return (await env.step("ok")).observation.text

    pid = asyncio.run(start(env))
    assert asyncio.run(go_on(env)) == "1 ok"
    assert asyncio.run(go_on(env)) == "2 ok"
    del env  # in mid-episode
    gc.collect()
    assert asyncio.run(start(pool.make_env())) == pid
    asyncio.run(pool.close())
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(start(pool.make_env()))


async def test_closing_the_pool_ends_hung_workers_too() -> None:
    async with WorkerPool(Moody, workers=1) as pool:
        env = pool.make_env()
        pid = pid_of(await env.reset(TASK, 0))
        hung = asyncio.create_task(env.step("hang"))
        await asyncio.sleep(0.05)
        hung.cancel()
        await asyncio.gather(hung, return_exceptions=True)
    with pytest.raises(RuntimeError):
        await env.step("ok")
    assert not alive(pid)
