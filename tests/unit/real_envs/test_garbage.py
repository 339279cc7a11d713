"""If these fail, what a broken environment answers becomes an observation, a reward, or the end of the training."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from imagination.rollout.play import Episode, Provenance, play_all
from real_envs.env import EnvFailure, Task
from real_envs.trajectory import Source, StopReason, Trajectory
from real_envs.worker_pool import WorkerPool, real_interaction
from tests.support.faults import GARBAGE, Babbler, Corridor, Faults
from tests.support.scripted import Acts

TASK = Task("corridor-a")


async def test_garbage_is_a_typed_failure_and_the_pool_goes_on() -> None:
    async with WorkerPool(Babbler, workers=1) as pool:
        env = pool.make_env()
        for number, garbage in enumerate(GARBAGE, start=1):
            await env.reset(TASK, 0)
            with pytest.raises(EnvFailure, match="step ") as caught:
                await env.step(garbage)
            assert caught.value.reason is StopReason.ENV_CRASHED
            assert (pool.stats.garbage, pool.stats.crashes, pool.stats.timeouts) == (number, 0, 0), garbage
        await env.reset(TASK, 0)
        assert (await env.step("look")).observation.text == "Nothing new."


@pytest.mark.parametrize("task", ["none", "text", "bytes", "unpicklable", "not unpicklable"])
async def test_a_reset_that_answers_garbage_is_a_failure_too(task: str) -> None:
    async with WorkerPool(Babbler, workers=1) as pool:
        with pytest.raises(EnvFailure, match="reset ") as caught:
            await pool.make_env().reset(Task(task), 0)
        assert caught.value.reason is StopReason.ENV_CRASHED
        assert (pool.stats.garbage, pool.stats.crashes) == (1, 0)


def test_of_a_faulty_world_every_failure_is_counted_once_and_nobody_else_is_disturbed(tmp_path: Path) -> None:
    episodes = [Episode(f"e{k}", TASK, "g", seed=k) for k in range(24)]
    honest = Faults(Corridor, tmp_path / "none", share=0.0)
    solver = Acts("look", "go east", "take lamp")
    faulty = replace(honest, ledger=tmp_path / "ledger", share=0.3)

    def play(factory: Faults) -> tuple[list[Trajectory], WorkerPool]:
        pool = WorkerPool(factory, workers=3, step_timeout=0.4)

        async def run() -> list[Trajectory]:
            async with pool:
                return await play_all(episodes, pool.make_env, solver, Provenance(Source.REAL), 5)

        return asyncio.run(run()), pool

    before = real_interaction()
    expected, _ = play(honest)
    played, pool = play(faulty)
    told = faulty.counted()
    assert min(told["crashes"], told["timeouts"], told["garbage"]) > 0, "all kinds have to happen"
    stats = pool.stats
    assert {"crashes": stats.crashes, "timeouts": stats.timeouts, "garbage": stats.garbage} == told
    failed = [t for t in played if t.stop.is_failure]
    assert len(failed) == told.total() < len(played)
    assert sum(t.stop is StopReason.ENV_TIMEOUT for t in failed) == told["timeouts"]
    for ours, theirs in zip(played, expected, strict=True):
        assert ours == theirs if not ours.stop.is_failure else ours.turns == theirs.turns[: len(ours.turns)]
    done = real_interaction() - before
    assert done.resets == 48
    assert {"crashes": done.crashes, "timeouts": done.timeouts, "garbage": done.garbage} == told
    assert stats.seconds >= 0.4 * told["timeouts"]


def test_seconds_of_workers_side_by_side_add_up_and_waiting_for_a_worker_costs_none() -> None:
    async def run(workers: int) -> float:
        async with WorkerPool(partial(Corridor, 0.1), workers=workers) as pool:
            await asyncio.gather(*(_look(pool, 1) for _ in range(workers)))  # each warms up a worker of its own
            before = pool.stats.seconds

            await asyncio.gather(*(_look(pool, 2) for _ in range(3)))
            return pool.stats.seconds - before

    for workers in (1, 3):
        assert 0.6 <= asyncio.run(run(workers)) < 0.9


async def _look(pool: WorkerPool, steps: int) -> None:
    env = pool.make_env()
    await env.reset(TASK, 0)
    for _ in range(steps):
        await env.step("look")
    await env.close()
