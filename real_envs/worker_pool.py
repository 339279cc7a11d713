"""Environments in worker processes, so that a hang or a crash becomes a typed, counted failure of one episode.

Real simulators are C libraries, browsers and servers: a sampled command can hang or kill them, and some are not
thread-safe. An ``IsolatedEnv`` leases a worker process for one episode at a time; the event loop only ever awaits a
socket. What goes wrong kills the worker with all that it started, raises ``EnvFailure`` and costs the next episode a
new process. An answer that is none (no ``StepResult``, a reward of NaN) is such a failure too.

Workers are plain ``python -c`` subprocesses and not ``multiprocessing`` ones, because those import the parent's
``__main__`` again, which for a training script means loading torch once a worker.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

from real_envs.check import wrong_with_reset, wrong_with_step
from real_envs.env import Env, EnvFailure, StepResult, Task
from real_envs.process_guard import MARK, ProcessGuard, end_tree, has_ended
from real_envs.trajectory import Observation, StopReason


@dataclass(slots=True)
class PoolStats:
    """Since the pool was made. ``steps`` and ``resets`` count requests, also those that failed: real interaction used.

    Attributes:
        crashes, timeouts, garbage: workers lost. ``garbage`` are answers that do not keep the protocol.
    """

    steps: int = 0
    resets: int = 0
    seconds: float = 0.0  # inside these requests, the start of a process included and the wait for a free worker not
    crashes: int = 0
    timeouts: int = 0
    garbage: int = 0

    def __add__(self, other: PoolStats) -> PoolStats:
        return PoolStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: PoolStats) -> PoolStats:
        return PoolStats(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


_TOTAL: ContextVar[PoolStats] = ContextVar("real_interaction", default=PoolStats())  # noqa: B039  one for all


def real_interaction() -> PoolStats:
    """What all pools of this process have done so far; the difference of two is what was done between them.

    Within ``count_apart`` it is what was done there.
    """
    return replace(_TOTAL.get())


def count_elsewhere(stats: PoolStats) -> None:
    """Adds what another process did for this one."""
    total = _TOTAL.get()
    for f in fields(stats):
        setattr(total, f.name, getattr(total, f.name) + getattr(stats, f.name))


@contextmanager
def count_apart() -> Iterator[PoolStats]:
    """What is done within counts for the object that it gives, and not for ``real_interaction`` elsewhere.

    A context of its own (``contextvars``): what goes on at the same time in another thread counts as ever.
    """
    token = _TOTAL.set(stats := PoolStats())
    try:
        yield stats
    finally:
        _TOTAL.reset(token)


# sys.path comes first: the factory may live in a module that only the parent's path knows, such as a test.
_BOOTSTRAP = """
import os, sys, pickle
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
os.set_inheritable(connection.fileno(), False)  # a child that held it would keep this worker's end from being seen
sys.path[:] = pickle.loads(connection.recv_bytes())
from real_envs.worker_pool import serve
serve(connection)
"""

_FAREWELL = 2.0  # seconds in which a worker may finish its request and close what it holds on a server


class SyncEnv(Protocol):
    """``Env`` without the ``async``, in a worker. Any exception counts as the environment's crash."""

    def reset(self, task: Task, seed: int) -> Observation: ...

    def step(self, action: str) -> StepResult: ...

    def close(self) -> None: ...


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
            connection.send_bytes(_packed(answer))
    except EOFError:  # the parent has closed the pool, or is dead
        signal.alarm(5)
        if env is not None:
            env.close()
    except EnvFailure as failure:
        connection.send(("failure", failure.reason, str(failure)))
    except Exception as error:  # whatever an environment raises is its crash, reported instead of guessed from the exit
        connection.send(("failure", StopReason.ENV_CRASHED, "".join(traceback.format_exception(error)).strip()))


def _packed(answer: object) -> bytes:
    """A message with the answer, or with what is wrong where it cannot be sent."""
    try:
        return pickle.dumps(("ok", answer))
    except Exception as error:  # pickling asks each object for its state, and so may raise anything
        return pickle.dumps(("garbage", [f"returned what cannot be pickled ({error!r})"]))


def _unpacked(message: bytes) -> tuple[Any, ...]:
    try:
        return tuple(pickle.loads(message))
    except Exception as error:  # unpickling imports and builds what the environment made, and so may raise anything
        return "garbage", [f"returned what cannot be unpickled ({error!r})"]


class _Worker:
    """One worker process, started at its first request and again after it was killed."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._connection: Connection | None = None
        self._mark = ""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and not has_ended(self.process.pid)

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        self._mark = secrets.token_hex(8)
        with theirs:
            # Interpreters print without end when they go wrong; nobody reads it, and a full pipe would block them.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, MARK: self._mark},
                start_new_session=True,  # a group of its own, which is ended as a whole; Ctrl-C is the parent's alone
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        _GUARD.watch(self.process.pid, self._mark)
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(pickle.dumps(sys.path))
        self._connection.send_bytes(self._hello)

    async def request(self, seconds: float, *message: object) -> bytes:
        """The answer, still packed.

        Raises:
            TimeoutError: there is none after so many seconds. One that came while the loop was busy is there, even if
                they are over by the time that anyone can look.
            EOFError, OSError: the process is dead.
        """
        connection = self._connection
        if connection is None:
            raise EOFError("the pool was closed")
        connection.send(message)
        # A reader of the loop that runs now: the pool outlives any one of successive asyncio.run calls.
        loop, descriptor = asyncio.get_running_loop(), connection.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, _resolve, ready)
        try:
            await asyncio.wait((ready,), timeout=seconds)
        finally:
            loop.remove_reader(descriptor)
        if not ready.done() and not connection.poll():
            raise TimeoutError
        return connection.recv_bytes()

    def hang_up(self) -> None:
        """Tell the worker to end; an idle one does so at once."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def end(self) -> None:
        """Wait for a worker that was told to end, then kill it and what it left behind."""
        deadline = time.monotonic() + _FAREWELL
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> str:
        """End the process now, with all that it started, and say how it ended."""
        self.hang_up()
        if self.process is None:
            return "not started"
        end_tree(self.process.pid, self._mark)
        _GUARD.forget(self.process.pid)
        code, self.process = self.process.wait(), None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


_WRONG_WITH = {"reset": wrong_with_reset, "step": wrong_with_step}
_GUARD = ProcessGuard()


class WorkerPool:
    """Worker processes shared by any number of environments.

    Args:
        workers: processes, hence episodes at a time; more episodes wait for their turn in order. One task that resets
            more environments than there are workers before it plays any of them waits for itself.
        step_timeout, reset_timeout: seconds; a reset may include starting the process.
    """

    def __init__(
        self, factory: Callable[[], SyncEnv], workers: int = 2, step_timeout: float = 5.0, reset_timeout: float = 30.0
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
        """First come, first served. Raises ``RuntimeError`` where the pool is closed."""
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
            EnvFailure: it took too long, it or its process broke, or it answered garbage.
        """
        self._count("steps" if method == "step" else "resets")
        begin = time.perf_counter()
        try:
            return await self._ask(worker, method, *arguments)
        finally:
            self._count("seconds", time.perf_counter() - begin)

    async def _ask(self, worker: _Worker, method: str, *arguments: object) -> Any:
        try:
            if method == "reset" and not worker.alive:
                if worker.process is not None:  # died between two episodes, which is nobody's failed episode
                    self._count("crashes")
                    worker.kill()
                worker.start()
            packed = await worker.request(self._timeouts[method], method, *arguments)
        except TimeoutError:
            self._count("timeouts")
            worker.kill()
            detail = f"{method} took longer than {self._timeouts[method]:g} s: {arguments!r}"
            raise EnvFailure(StopReason.ENV_TIMEOUT, detail) from None
        except (EOFError, OSError):
            self._count("crashes")
            detail = f"the worker died in {method} ({worker.kill()}): {arguments!r}"
            raise EnvFailure(StopReason.ENV_CRASHED, detail) from None
        except asyncio.CancelledError:  # the answer is still to come, and must not be taken for the next one's
            worker.hang_up()
            ending = asyncio.ensure_future(asyncio.to_thread(worker.end))  # it closes what a reset is just opening
            while not ending.done():
                with suppress(asyncio.CancelledError):  # once more: it would be another's and still be ended
                    await asyncio.wait((ending,))
            raise
        except BaseException:
            worker.kill()
            raise
        status, *answer = _unpacked(packed)
        if status == "failure":
            worker.kill()
            reason, detail = answer
            self._count("timeouts" if reason == StopReason.ENV_TIMEOUT else "crashes")
            raise EnvFailure(reason, detail)
        wrong = answer[0] if status == "garbage" else _WRONG_WITH[method](answer[0])
        if wrong:
            worker.kill()
            self._count("garbage")
            raise EnvFailure(StopReason.ENV_CRASHED, f"{method} {'; '.join(wrong)}: {arguments!r}")
        return answer[0]

    def _count(self, what: str, amount: float = 1) -> None:
        for stats in (self.stats, _TOTAL.get()):
            setattr(stats, what, getattr(stats, what) + amount)

    async def close(self) -> None:
        """Environments that still hold a worker fail."""
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
        self._worker: _Worker | None = None  # not while it is asked: its answer must come before it is another's
        self._given_up = 0  # how often an episode was, also by ``close`` in a step

    async def reset(self, task: Task, seed: int) -> Observation:
        self._give_back()
        return await self._call(self._given_up, await self._pool.lease(), "reset", task, seed)

    async def step(self, action: str) -> StepResult:
        """Raises ``RuntimeError`` if no episode is under way."""
        if self._worker is None:
            raise RuntimeError("no episode is under way: reset first")
        worker, self._worker = self._worker, None
        result: StepResult = await self._call(self._given_up, worker, "step", action)
        return result

    async def close(self) -> None:
        self._give_back()

    async def _call(self, given_up: int, worker: _Worker, method: str, *arguments: object) -> Any:
        goes_on = False
        try:
            answer = await self._pool.call(worker, method, *arguments)
            over = isinstance(answer, StepResult) and (answer.terminated or answer.truncated)
            goes_on = given_up == self._given_up and not over
            return answer
        finally:
            if goes_on:
                self._worker = worker
            else:
                self._pool.release(worker)

    def _give_back(self) -> None:
        self._given_up += 1
        if self._worker is not None:
            worker, self._worker = self._worker, None
            self._pool.release(worker)

    def __del__(self) -> None:
        self._give_back()  # an environment dropped in mid-episode would otherwise keep its worker for ever


class PooledTasks:
    """A ``TaskSet``; ``pool.stats`` says how many real steps its environments took."""

    def __init__(
        self,
        splits: Mapping[str, Sequence[Task]],
        factory: Callable[[], SyncEnv],
        workers: int,
        step_timeout: float = 5.0,
        reset_timeout: float = 30.0,
    ) -> None:
        self._splits = {split: tuple(tasks) for split, tasks in splits.items()}
        self.pool = WorkerPool(factory, workers=workers, step_timeout=step_timeout, reset_timeout=reset_timeout)

    def tasks(self, split: str) -> Sequence[Task]:
        return self._splits[split]

    def make_env(self) -> Env:
        return self.pool.make_env()

    async def close(self) -> None:
        await self.pool.close()
