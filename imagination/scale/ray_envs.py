"""Environments that live in actors of Ray: real worlds for players, and dreams for the clients of a server."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from imagination.runs.machine import cores
from imagination.runs.run_folder import RunFolder
from imagination.scale.pool import ENV_LOST
from imagination.session import Session
from imagination.settings import UserError
from imagination.settings.scale import ScaleSettings
from real_envs import process_guard
from real_envs.env import Env, EnvFailure, StepResult, Task, TaskSet
from real_envs.trajectory import Observation, StopReason
from real_envs.worker_pool import PoolStats, count_apart, count_elsewhere

MANY = 10_000  # coroutines of an actor at a time
_LOOPBACK = "127.0.0.1"
_CLIENT_LOST = "its client is lost"
_CLOSE_SECONDS = 30.0


class Envs(NamedTuple):
    """Makes environments, and the version of the world model that dreams in them, if any."""

    make: Callable[[], Env]
    version: str | None = None


OpenEnvs = Callable[[Session], Envs]


def connect(settings: ScaleSettings, cpus: float, log: bool = False) -> Any:
    """The package ``ray``, connected with a cluster: a running one, or one of this machine that is started and has at
    least so many ``cpus``.

    Args:
        log: whether what actors and tasks print is printed here.

    Raises:
        UserError: it is not installed, or nobody answers at the address.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError("scale=ray needs the package ray: pip install 'imagination[scale]'") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": log, "namespace": "imagination"}
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    try:
        if address:
            ray.init(address, **quiet)
        else:
            with _reaped() as folder:
                # whoever reaches the ports of Ray runs code here
                ray.init(num_cpus=max(cores(), math.ceil(cpus)), _temp_dir=folder, _node_ip_address=_LOOPBACK, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"no cluster of Ray at {address or 'this machine'}: {error}") from error
    return ray


def disconnect(ray: Any) -> None:
    """Ends what ``connect`` began."""
    ray.shutdown()
    while _REAPERS:
        _REAPERS.pop().communicate()


# Ray leaves its folder with sockets and logs and, where it was killed, processes. The end of its input starts this.
# Some of them put a title in place of their environment, and of the mark in it: these have logs open in the folder.
_REAPER = """
import glob, os, shutil, signal, sys, time
from contextlib import suppress
package, folder, mark, owner = sys.argv[1:]
sys.path.insert(0, package)
from real_envs.process_guard import end_marked, marked
sys.stdin.read()
until = time.monotonic() + 10
while marked(mark) and time.monotonic() < until:
    time.sleep(0.1)
end_marked(mark)
for link in glob.glob("/proc/[0-9]*/fd/*"):
    with suppress(OSError):
        pid = link.split("/")[2]
        if pid != owner and os.readlink(link).startswith(folder + "/"):
            os.kill(int(pid), signal.SIGKILL)
shutil.rmtree(folder, ignore_errors=True)
"""
_REAPERS: list[subprocess.Popen[bytes]] = []


@contextmanager
def _reaped() -> Iterator[str]:
    """A folder for a cluster that is started within: it goes with all processes when this one ends, however it ends."""
    folder, mark = tempfile.mkdtemp(prefix="ray-", dir="/tmp"), secrets.token_hex(8)  # sockets want short paths
    package, owner = str(Path(process_guard.__file__).parents[1]), str(os.getpid())
    command = [sys.executable, "-I", "-S", "-c", _REAPER, package, folder, mark, owner]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    _REAPERS.append(process)
    before = os.environ.get(process_guard.MARK)
    os.environ[process_guard.MARK] = mark
    try:
        yield folder
    finally:
        del os.environ[process_guard.MARK]
        if before is not None:
            os.environ[process_guard.MARK] = before


def here(ray: Any) -> Any:
    """Scheduling on this machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def resources(cpus: float, gpus: float, gb: float) -> dict[str, float]:
    """What an actor takes from the cluster."""
    return {"num_cpus": cpus, "num_gpus": gpus} | ({"memory": gb * 1e9} if gb else {})


def elsewhere(session: Session) -> Session:
    """The session for a process that works somewhere else: without what it has made, in a folder of the same path."""
    return Session(session.config, RunFolder(session.run.path.resolve(), session.config.seed))


def host_envs(
    ray: Any,
    session: Session,
    opened: OpenEnvs,
    count: int,
    needs: dict[str, float],
    ledger: str = "",
) -> list[Any]:
    """``count`` actors, each with environments of the run that ``opened`` gives there; one that is lost begins anew.

    Args:
        opened: importable there.
        ledger: name of the actor that counts what is done, where it is to be counted.
    """
    actor = ray.remote(max_restarts=-1, max_concurrency=MANY, **needs)(_EnvActor)
    return [actor.remote(elsewhere(session), opened, ledger) for _ in range(count)]


class RemoteEnvs:
    """Makes environments that live in these actors, in one after the other; each stays where it is.

    Args:
        client: a name under which ``client_lost`` closes them.
        counted: what is done in them is real interaction of this process.
    """

    def __init__(self, actors: Sequence[Any], client: str = "", counted: bool = False) -> None:
        self._actors, self._client, self._counted = cycle(actors), client, counted

    def __call__(self) -> Env:
        return _RemoteEnv(next(self._actors), f"{self._client}/{secrets.token_hex(8)}", self._counted)


def real_envs_of(session: Session, privileged: bool = False) -> Envs:
    """The run's real environments."""
    return Envs(session.tasks(privileged).make_env)


def real_tasks(session: Session, privileged: bool = False) -> TaskSet:
    """``session.tasks``; with scale=ray their environments live in ``scale.real_worlds`` actors.

    Raises:
        UserError: see ``connect`` and ``open_tasks``.
    """
    tasks = session.tasks(privileged)
    return tasks if session.config.scale.name == "none" else _TasksElsewhere(session, tasks, privileged)


class _TasksElsewhere:
    """Tasks of this process; ``make_env`` makes environments of actors. What is done there counts here."""

    def __init__(self, session: Session, tasks: TaskSet, privileged: bool) -> None:
        settings = session.config.scale
        self._tasks, self._ray = tasks, connect(settings, settings.real_worlds * settings.cpus_per_real_world)
        needs = resources(settings.cpus_per_real_world, 0.0, settings.gb_per_real_world)
        opened = partial(real_envs_of, privileged=privileged)
        self._actors = host_envs(self._ray, session, opened, settings.real_worlds, needs)
        self.make_env = RemoteEnvs(self._actors, counted=True)

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.tasks(split)

    async def close(self) -> None:
        still = [actor.clients_lost.remote() for actor in self._actors]
        self._ray.wait(still, num_returns=len(still), timeout=_CLOSE_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)
        disconnect(self._ray)
        await self._tasks.close()


# an observation, a result, or a failure; and what was done in the real world beside the request itself
_Answer = tuple[Observation | StepResult | tuple[StopReason, str], PoolStats]


class _EnvActor:
    """Failures are values, because Ray does not keep what an ``EnvFailure`` holds."""

    def __init__(self, session: Session, opened: OpenEnvs, ledger: str) -> None:
        import ray

        self._envs = opened(Session.open(session.config, session.run.path))
        self._add: Any = ray.get_actor(ledger).add if ledger else None
        self._open: dict[str, Env] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._lost: set[str] = set()

    async def version(self) -> str | None:
        return self._envs.version

    async def reset(self, env: str, task: Task, seed: int) -> _Answer:
        if env.partition("/")[0] in self._lost:
            return (StopReason.ENV_CRASHED, _CLIENT_LOST), PoolStats()
        if env not in self._open:
            self._open[env] = self._envs.make()
        return await self._request(env, PoolStats(resets=1), lambda: self._open[env].reset(task, seed))

    async def step(self, env: str, action: str) -> _Answer:
        if env not in self._open:
            return (StopReason.ENV_CRASHED, ENV_LOST), PoolStats()
        return await self._request(env, PoolStats(steps=1), lambda: self._open[env].step(action))

    async def close(self, env: str) -> None:
        await self._end([env])

    async def client_lost(self, client: str) -> None:
        """Closes what a client that is gone has open: nobody else would, and others would wait for its place."""
        self._lost.add(client)
        await self._end([env for env in self._open if env.partition("/")[0] == client])

    async def clients_lost(self) -> None:
        """The same for all; what was done is counted then."""
        await self._end(list(self._open))

    async def _end(self, envs: Sequence[str]) -> None:
        await self._cancel(envs)
        for env in envs:
            if env in self._open:
                await self._open.pop(env).close()

    async def _cancel(self, envs: Sequence[str]) -> None:
        """Ends what is still asked of them: a client that cancels a call of Ray does not end it here."""
        requests = [self._running[env] for env in envs if env in self._running]
        for request in requests:
            request.cancel()
        if requests:
            await asyncio.wait(requests)

    async def _request(self, env: str, request: PoolStats, work: Callable[[], Coroutine[Any, Any, Any]]) -> _Answer:
        await self._cancel([env])
        self._running[env] = running = asyncio.create_task(self._counted(request, work))
        try:
            return await running
        except asyncio.CancelledError:
            return (StopReason.ENV_CRASHED, _CLIENT_LOST), PoolStats()
        finally:
            if self._running.get(env) is running:
                del self._running[env]

    async def _counted(self, request: PoolStats, work: Callable[[], Coroutine[Any, Any, Any]]) -> _Answer:
        """A request is counted before it is done, so that what was done is counted whoever dies; the rest after it."""
        with count_apart() as done:
            try:
                await self._count(request)
                answer = await work()
            except EnvFailure as failure:
                answer = failure.reason, str(failure)
            finally:
                await self._count(done - request)
        return answer, done - request

    async def _count(self, stats: PoolStats) -> None:
        if self._add is not None:
            await self._add.remote(stats)


class _RemoteEnv:
    """An ``Env`` of another process."""

    def __init__(self, actor: Any, name: str, counted: bool) -> None:
        self._actor, self._id, self._counted = actor, name, counted

    async def reset(self, task: Task, seed: int) -> Observation:
        observation: Observation = await self._ask(PoolStats(resets=1), self._actor.reset, task, seed)
        return observation

    async def step(self, action: str) -> StepResult:
        result: StepResult = await self._ask(PoolStats(steps=1), self._actor.step, action)
        return result

    async def close(self) -> None:
        self._actor.close.remote(self._id)

    async def _ask(self, request: PoolStats, method: Any, *arguments: Any) -> Any:
        from ray.exceptions import RayError

        if self._counted:  # before it is done: it may be, whoever dies
            count_elsewhere(request)
        try:
            answer, rest = await method.remote(self._id, *arguments)
        except RayError as error:
            raise EnvFailure(StopReason.ENV_CRASHED, f"{ENV_LOST}: {error}".partition("\n")[0]) from error
        if self._counted:
            count_elsewhere(rest)
        if isinstance(answer, tuple):
            raise EnvFailure(*answer)
        return answer
