"""Environments that live in actors of Ray: real worlds for players, and dreams for the clients of a server."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from imagination.runs.machine import cores
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import UserError
from imagination.settings.scale import ScaleSettings
from real_envs.env import Env, EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, StopReason
from real_envs.worker_pool import PoolStats, count_apart

MANY = 10_000  # coroutines of an actor at a time


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
            ray.init(num_cpus=max(cores(), math.ceil(cpus)), **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"no cluster of Ray at {address or 'this machine'}: {error}") from error
    return ray


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
    """Makes environments that live in these actors, in one after the other; each stays where it is."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = cycle(actors)

    def __call__(self) -> Env:
        return _RemoteEnv(next(self._actors))


def real_envs_of(session: Session) -> Envs:
    """The run's real environments."""
    return Envs(session.tasks().make_env)


class Ledger:
    """Counts what is done in the real world, in a process that does not play."""

    def __init__(self) -> None:
        self._total = PoolStats()

    def add(self, stats: PoolStats) -> None:
        self._total = self._total + stats

    def total(self) -> PoolStats:
        return self._total


class _EnvActor:
    """Failures are values, because Ray does not keep what an ``EnvFailure`` holds."""

    def __init__(self, session: Session, opened: OpenEnvs, ledger: str) -> None:
        import ray

        self._envs = opened(Session.open(session.config, session.run.path))
        self._add: Any = ray.get_actor(ledger).add if ledger else None
        self._open: dict[str, Env] = {}

    async def version(self) -> str | None:
        return self._envs.version

    async def reset(self, env: str, task: Task, seed: int) -> Observation | tuple[StopReason, str]:
        if env not in self._open:
            self._open[env] = self._envs.make()
        return await self._counted(PoolStats(resets=1), lambda: self._open[env].reset(task, seed))

    async def step(self, env: str, action: str) -> StepResult | tuple[StopReason, str]:
        if env not in self._open:
            return StopReason.ENV_CRASHED, "the process of this environment was lost"
        return await self._counted(PoolStats(steps=1), lambda: self._open[env].step(action))

    async def close(self, env: str) -> None:
        if env in self._open:
            await self._open.pop(env).close()

    async def _counted(self, request: PoolStats, work: Callable[[], Any]) -> Any:
        """A request is counted before it is done, so that what was done is counted whoever dies; the rest after it."""
        if self._add is not None:
            await self._add.remote(request)
        with count_apart() as done:
            try:
                return await work()
            except EnvFailure as failure:
                return failure.reason, str(failure)
            finally:
                if self._add is not None:
                    await self._add.remote(done - request)


class _RemoteEnv:
    """An ``Env`` of another process."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._id = actor, secrets.token_hex(8)

    async def reset(self, task: Task, seed: int) -> Observation:
        observation: Observation = await self._answer(self._actor.reset.remote(self._id, task, seed))
        return observation

    async def step(self, action: str) -> StepResult:
        result: StepResult = await self._answer(self._actor.step.remote(self._id, action))
        return result

    async def close(self) -> None:
        self._actor.close.remote(self._id)

    async def _answer(self, reference: Any) -> Any:
        from ray.exceptions import RayError

        try:
            answer = await reference
        except RayError as error:
            raise EnvFailure(StopReason.ENV_CRASHED, str(error).partition("\n")[0]) from error
        if isinstance(answer, tuple):
            raise EnvFailure(*answer)
        return answer
