"""Environments in worker processes, so that a hang or a crash becomes a typed, counted failure of one episode.

Real simulators are C libraries, browsers and servers: a sampled command can hang or kill them, and some are not
thread-safe. An ``IsolatedEnv`` leases a worker process for one episode at a time; the event loop only ever awaits a
socket. What goes wrong kills the worker, raises ``EnvFailure`` and costs the next episode a new process.

Workers are plain ``python -c`` subprocesses and not ``multiprocessing`` ones, because those import the parent's
``__main__`` again, which for a training script means loading torch once a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, StopReason

# sys.path comes first: the factory may live in a module that only the parent's path knows, such as a test.
_BOOTSTRAP = """
import sys, pickle
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = pickle.loads(connection.recv_bytes())
from real_envs.isolation import serve
serve(connection)
"""


class SyncEnv(Protocol):
    """What runs in a worker: ``Env`` without the ``async``. Any exception counts as the environment's crash."""

    def reset(self, task: Task, seed: int) -> Observation: ...

    def step(self, action: str) -> StepResult: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class PoolStats:
    """Since the pool was made. ``steps`` and ``resets`` count requests, also those that failed: real interaction used.

    ``crashes`` and ``timeouts`` are workers lost, each a failed episode unless the worker died between episodes.
    """

    steps: int = 0
    resets: int = 0
    crashes: int = 0
    timeouts: int = 0


def serve(connection: Connection) -> None:
    """The worker's side: make the environment, then answer requests until the parent hangs up or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    env: SyncEnv | None = None
    try:
        factory, step_timeout, reset_timeout = pickle.loads(connection.recv_bytes())
        while True:
            method, *arguments = connection.recv()
            # The parent kills a worker that takes too long. If the parent is gone, the kernel does, even in C code.
            signal.alarm(math.ceil(step_timeout if method == "step" else reset_timeout) + 5)
            if env is None:
                env = factory()
            answer = getattr(env, method)(*arguments)
            signal.alarm(0)
            connection.send(("ok", answer))
    except EOFError:  # the parent has closed the pool, or is dead
        signal.alarm(5)
        if env is not None:
            env.close()
    except EnvFailure as failure:
        connection.send(("failure", failure.reason, str(failure)))
    except Exception as error:  # whatever an environment raises is its crash, reported instead of guessed from the exit
        connection.send(("failure", StopReason.ENV_CRASHED, "".join(traceback.format_exception(error)).strip()))


class _Worker:
    """One worker process, started at its first request and again after it was killed."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._connection: Connection | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Interpreters print without end when they go wrong; nobody reads it, and a full pipe would block them.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(pickle.dumps(sys.path))
        self._connection.send_bytes(self._hello)

    async def request(self, *message: object) -> Any:
        """Raises ``EOFError`` or ``OSError`` if the process is dead."""
        if self._connection is None:
            raise EOFError("the pool was closed")
        self._connection.send(message)
        # A reader of the loop that runs now: the pool outlives any one of successive asyncio.run calls.
        loop, descriptor = asyncio.get_running_loop(), self._connection.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, _resolve, ready)
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)
        return self._connection.recv()

    def hang_up(self) -> None:
        """Tell the worker to end; an idle one does so at once."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def end(self) -> None:
        """Wait a second for a worker that was told to end, then kill it."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1.0)
        self.kill()

    def kill(self) -> str:
        """End the process now and say how it ended."""
        self.hang_up()
        if self.process is None:
            return "not started"
        self.process.kill()
        code, self.process = self.process.wait(), None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


_TAKEN = [0]


def real_steps_taken() -> int:
    """Steps that all pools of this process have taken so far: how a run proves that it took none."""
    return _TAKEN[0]


class WorkerPool:
    """Worker processes shared by any number of environments.

    Args:
        factory: makes the synchronous environment, in the worker; picklable, and importable from a module.
        workers: processes, hence episodes at a time; more episodes wait for their turn in order. One task that resets
            more environments than there are workers before it plays any of them waits for itself.
        step_timeout, reset_timeout: seconds; a reset may include starting the process.
    """

    def __init__(
        self,
        factory: Callable[[], SyncEnv],
        workers: int = 2,
        step_timeout: float = 5.0,
        reset_timeout: float = 30.0,
    ) -> None:
        hello = pickle.dumps((factory, step_timeout, reset_timeout))
        self.stats = PoolStats()
        self._timeouts = {"step": step_timeout, "reset": reset_timeout}
        self._workers = [_Worker(hello) for _ in range(workers)]
        self._idle = list(self._workers)
        self._waiting: deque[asyncio.Future[_Worker]] = deque()
        self._closed = False

    def make_env(self) -> IsolatedEnv:
        return IsolatedEnv(self)

    async def lease(self) -> _Worker:
        """A worker for one episode, first come, first served.

        Raises:
            RuntimeError: the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        if self._idle:
            return self._idle.pop()
        turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:  # given a worker just as it was cancelled
                self.release(turn.result())
            raise

    def release(self, worker: _Worker) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(worker)
                return
        self._idle.append(worker)

    async def call(self, worker: _Worker, method: str, *arguments: object) -> Any:
        """Run one method of the worker's environment. After any exception the worker is dead, to be started anew.

        Raises:
            EnvFailure: it took too long, or it or its process broke.
        """
        if method == "step":
            self.stats.steps += 1
            _TAKEN[0] += 1
        else:
            self.stats.resets += 1
        try:
            if method == "reset" and (worker.process is None or worker.process.poll() is not None):
                if worker.process is not None:  # died between two episodes, which is nobody's failed episode
                    self.stats.crashes += 1
                    worker.kill()
                worker.start()
            async with asyncio.timeout(self._timeouts[method]):
                status, *answer = await worker.request(method, *arguments)
        except TimeoutError:
            self.stats.timeouts += 1
            worker.kill()
            detail = f"{method} took longer than {self._timeouts[method]:g} s: {arguments!r}"
            raise EnvFailure(StopReason.ENV_TIMEOUT, detail) from None
        except (EOFError, OSError):
            self.stats.crashes += 1
            detail = f"the worker died in {method} ({worker.kill()}): {arguments!r}"
            raise EnvFailure(StopReason.ENV_CRASHED, detail) from None
        except BaseException:  # cancelled: the answer is still to come, and must not be taken for the next one's
            worker.kill()
            raise
        if status == "ok":
            return answer[0]
        worker.kill()
        reason, detail = answer
        if reason == StopReason.ENV_TIMEOUT:
            self.stats.timeouts += 1
        else:
            self.stats.crashes += 1
        raise EnvFailure(reason, detail)

    async def close(self) -> None:
        """End all workers; environments that still hold one fail."""
        self._closed = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(RuntimeError("the worker pool is closed"))
        self._waiting.clear()
        for worker in self._workers:
            worker.hang_up()
        await asyncio.gather(*(asyncio.to_thread(worker.end) for worker in self._workers))

    async def __aenter__(self) -> WorkerPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class IsolatedEnv:
    """An ``Env`` that plays each episode in a worker of its pool, which it gives back when the episode is over."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._worker: _Worker | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        self._give_back()
        self._worker = await self._pool.lease()
        return await self._call("reset", task, seed)

    async def step(self, action: str) -> StepResult:
        """Raises ``RuntimeError`` if no episode is under way."""
        if self._worker is None:
            raise RuntimeError("no episode is under way: reset first")
        result: StepResult = await self._call("step", action)
        if result.terminated or result.truncated:
            self._give_back()
        return result

    async def close(self) -> None:
        self._give_back()

    async def _call(self, method: str, *arguments: object) -> Any:
        assert self._worker is not None
        try:
            return await self._pool.call(self._worker, method, *arguments)
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            self._pool.release(worker)

    def __del__(self) -> None:
        self._give_back()  # an environment dropped in mid-episode would otherwise keep its worker for ever
