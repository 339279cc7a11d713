"""If these fail, browsers and servers of workers that are long gone fill the machine.

``IMAGINATION_SOAK=3600`` lets the last test reset for an hour; run it with ``-s`` to see what it measured.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation
from real_envs.worker_pool import WorkerPool
from tests.support.processes import alive, below, gone_within, resident

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
TASK = Task("t")
SOAK = float(os.environ.get("IMAGINATION_SOAK", "0"))


class Browsing:
    """Starts a child in its own process group and one that leaves it, as browsers are, and never ends either."""

    def __init__(self) -> None:
        children = [subprocess.Popen(["sleep", "600"], start_new_session=apart) for apart in (False, True)]
        self._pids = [os.getpid(), *(child.pid for child in children)]

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation(" ".join(map(str, self._pids)))

    def step(self, action: str) -> StepResult:
        if action == "hang":
            time.sleep(600)
        if action == "raise":
            raise ValueError("the world is flat")
        if action == "exit":
            os._exit(3)
        return StepResult(Observation("nothing"), 0.0, False, False)

    def close(self) -> None: ...


class Tidy:
    """Starts a child at each reset and ends it at the next, as an environment should."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        self.close()
        self._child = subprocess.Popen(["sleep", "600"])
        return Observation(f"{os.getpid()} {seed}")

    def step(self, action: str) -> StepResult:
        if action == "hang":
            time.sleep(600)
        return StepResult(Observation("nothing" * 1000), 0.0, action == "end", False)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()


async def processes_of(env: object) -> list[int]:
    """The worker's and those of its children, all of them alive."""
    pids = [int(pid) for pid in (await env.reset(TASK, 0)).text.split()]  # type: ignore[attr-defined]
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize("action", ["hang", "raise", "exit", "cancel", "close"])
async def test_whatever_ends_a_worker_ends_what_it_started(action: str) -> None:
    async with WorkerPool(Browsing, workers=1, step_timeout=0.3) as pool:
        env = pool.make_env()
        pids = await processes_of(env)
        if action == "cancel":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await env.step("hang")
        elif action != "close":
            with pytest.raises(EnvFailure):
                await env.step(action)
        if action != "close":
            assert all(gone_within(pid, 1.0) for pid in pids), "while the pool goes on"
    assert all(gone_within(pid, 1.0) for pid in pids)


async def test_a_worker_that_died_between_two_episodes_leaves_nothing() -> None:
    async with WorkerPool(Browsing, workers=1) as pool:
        env = pool.make_env()
        first = await processes_of(env)
        await env.close()
        os.kill(first[0], 9)
        assert gone_within(first[0], 2.0)
        second = await processes_of(env)
        assert all(gone_within(pid, 1.0) for pid in first)
        assert pool.stats.crashes == 1
        assert not set(first) & set(second)


def started_by(script: str) -> list[int]:
    """The processes that a script prints, which is then killed."""
    head = "import asyncio, os\nfrom real_envs import worker_pool\n"
    head += "from tests.unit.real_envs.test_leaks import Browsing, TASK\nasync def main():\n"
    script = f"{head}{script}    os.kill(os.getpid(), 9)\nasyncio.run(main())\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout, done.stderr
    return [int(pid) for pid in done.stdout.split()]


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_outlives_a_parent_that_is_killed(busy: bool) -> None:
    """Not even a worker that hangs in a step, nor what it started."""
    pids = started_by(
        "    env = worker_pool.WorkerPool(Browsing, workers=1, step_timeout=300).make_env()\n"
        "    print((await env.reset(TASK, 0)).text, flush=True)\n"
        f"    hung = {busy} and asyncio.create_task(env.step('hang'))\n"
        "    await asyncio.sleep(0.2)\n"
    )
    assert len(pids) == 3
    assert all(gone_within(pid, 8.0) for pid in pids)


def test_a_guard_that_was_killed_is_replaced() -> None:
    pids = started_by(
        "    pool = worker_pool.WorkerPool(Browsing, workers=2, step_timeout=300)\n"
        "    envs = [pool.make_env(), pool.make_env()]\n"
        "    texts = [(await envs[0].reset(TASK, 0)).text]\n"
        "    worker_pool._GUARD._process.kill()\n"
        "    worker_pool._GUARD._process.wait()\n"
        "    texts.append((await envs[1].reset(TASK, 0)).text)\n"
        "    print(*texts, flush=True)\n"
    )
    assert len(pids) == 6
    assert all(gone_within(pid, 8.0) for pid in pids)


async def test_resets_keep_memory_and_processes_flat() -> None:
    """200 resets, or for as many seconds as ``IMAGINATION_SOAK`` says; each 20th episode hangs and costs its worker."""
    before = set(below(os.getpid()))  # of tests that ran in this process earlier
    begin, resets = time.monotonic(), 0
    async with WorkerPool(Tidy, workers=2, step_timeout=0.2) as pool:
        envs = [pool.make_env() for _ in range(2)]

        async def episode(number: int) -> int:
            env = envs[number % 2]
            worker = int((await env.reset(TASK, number)).text.split()[0])
            await env.step("look")
            if number % 20 == 19:
                with pytest.raises(EnvFailure):
                    await env.step("hang")
            else:
                await env.step("end")
            return worker

        found: list[tuple[int, int, int]] = []  # processes below us, and memory of ourselves and of a worker in kB
        while resets < 130 or time.monotonic() - begin < SOAK:
            worker = await episode(resets)
            resets += 1
            if resets % 40 == 10:
                found.append((len(set(below(os.getpid())) - before), resident(os.getpid()), resident(worker)))
                if SOAK and resets % 2000 == 10:
                    print(f"{time.monotonic() - begin:.0f} s, {resets} resets: {found[-1]}", flush=True)
        half = len(found) // 2
        print(f"{resets} resets in {time.monotonic() - begin:.0f} s: from {found[0]} to {found[-1]}", flush=True)
        processes = {count for count, _, _ in found}
        assert max(processes) <= 2 * 2 + 1, "two workers with a child each, and the guard"
        assert pool.stats.timeouts == resets // 20
        assert pool.stats.crashes == pool.stats.garbage == 0
        for ours in (1, 2):
            first, last = (max(row[ours] for row in part) for part in (found[:half], found[half:]))
            assert last < first + 4096, "grew by more than 4 MB"
    assert len(set(below(os.getpid())) - before) <= 1, "the guard alone"


def test_makers_of_games_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "from real_envs.worlds.textworld import generate_games\n"
        f"generate_games({str(tmp_path)!r}, range(99), workers=2)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 60
    while not list(tmp_path.glob("*.z8")) and time.monotonic() < until:
        time.sleep(0.1)
    makers = below(command.pid)
    command.kill()
    command.wait()
    assert len(makers) >= 2
    assert all(gone_within(pid, 8.0) for pid in makers)
