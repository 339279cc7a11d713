"""Players and real worlds as actors of Ray, on one machine or on many."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from imagination.runs.machine import cores
from imagination.runs.models import weights_version
from imagination.runs.processes import count as processes
from imagination.runs.run_folder import RunFolder
from imagination.scale.player import Player, PlayerData, RealWorld, trained_weights
from imagination.scale.pool import Group, PlayerLost, PlayerPool, PoolLimits
from imagination.session import Session
from imagination.settings import UserError
from imagination.settings.scale import ScaleSettings
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, StopReason, Trajectory
from real_envs.worker_pool import PoolStats, count_elsewhere

_MANY = 10_000  # coroutines of an actor at a time
_SEAT_SECONDS = 60.0


class RayPlayers:
    """The players of a training, and the real worlds that they play in.

    All machines of a cluster must see the run's folder under the same path.

    Args:
        real: whether groups are played in the real world as well.

    Raises:
        UserError: Ray is not installed, or there is no cluster at this address.
    """

    def __init__(self, session: Session, data: PlayerData, real: bool) -> None:
        settings = session.config.scale
        self.ray = ray = connect(settings, real)
        self._seat = _take_gpus(ray, processes()) if settings.gpus_per_player else None
        ledger = f"ledger {secrets.token_hex(8)}"  # a name: actors that hold others do not restart
        self._ledger = ray.remote(num_cpus=0)(_Ledger).options(name=ledger).remote()
        self._counted = PoolStats()
        # without what it has made, and with a folder that is the same elsewhere
        session = Session(session.config, RunFolder(session.run.path.resolve(), session.config.seed))
        shared = ray.put(data)
        worlds: list[Any] = []
        if real:
            needs = _resources(settings.cpus_per_real_world, 0.0, settings.gb_per_real_world)
            actor = ray.remote(max_restarts=-1, max_concurrency=_MANY, **needs)(_RealWorldActor)
            worlds = [actor.remote(session, ledger) for _ in range(settings.real_worlds)]
        needs = _resources(settings.cpus_per_player, settings.gpus_per_player, settings.gb_per_player)
        actor = ray.remote(max_concurrency=_MANY, **needs)(_PlayerActor)
        at_once = max(1, max(64, session.config.engine.slots) // session.config.train.group_size)
        self._pool = PlayerPool(
            lambda place: _RayPlayer(ray, actor.remote(session, shared, worlds)),
            settings.players,
            PoolLimits(at_once, settings.start_seconds, settings.hang_seconds, settings.attempts),
        )

    def publish(self, version: int, model: torch.nn.Module, wait: bool) -> str:
        """Players go over to the model's weights as they are now; returns their hash. See ``PlayerPool.publish``."""
        name = weights_version(model)
        weights = self.ray.put(trained_weights(model))  # one copy on each machine, which its players read
        self._pool.publish(version, (name, weights), wait)
        return name

    @property
    def pool(self) -> PlayerPool:
        return self._pool

    def count_real(self) -> None:
        """What players did in the real world since the last call counts as done by this process."""
        total = self.ray.get(self._ledger.total.remote())
        count_elsewhere(total - self._counted)
        self._counted = total

    def close(self) -> None:
        """Ends players, worlds, and the cluster where this process started it."""
        self._pool.close()
        self.count_real()
        self.ray.shutdown()


def connect(settings: ScaleSettings, real: bool = False) -> Any:
    """The package ``ray``, connected with a cluster: a running one, or one that is started on this machine.

    Raises:
        UserError: it is not installed, or nobody answers at the address.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError("scale=ray needs the package ray: pip install 'imagination[scale]'") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "namespace": "imagination"}
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    try:
        if address:
            ray.init(address, **quiet)
        else:
            needed = settings.players * settings.cpus_per_player
            needed += settings.real_worlds * settings.cpus_per_real_world * real
            ray.init(num_cpus=max(cores(), math.ceil(needed)), **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"no cluster of Ray at {address or 'this machine'}: {error}") from error
    return ray


def _take_gpus(ray: Any, count: int) -> Any:
    """Takes the GPUs of the processes that learn, on this machine, so that no player gets them; returns who holds them.

    Raises:
        UserError: they are not free.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    seat = ray.remote(num_cpus=0, num_gpus=count, scheduling_strategy=here)(_Seat).remote()
    try:
        ids = ray.get(seat.gpus.remote(), timeout=_SEAT_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise UserError(f"the cluster has no {count} free GPUs on this machine, which the learner needs") from None
    if torch.cuda.is_available() and count == 1:
        torch.cuda.set_device(ids[0])
    return seat


class _Seat:
    def gpus(self) -> list[int]:
        import ray

        return [int(id) for id in ray.get_gpu_ids()]


def _resources(cpus: float, gpus: float, gb: float) -> dict[str, float]:
    return {"num_cpus": cpus, "num_gpus": gpus} | ({"memory": gb * 1e9} if gb else {})


class _RayPlayer:
    """A ``PlayerHandle`` of an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    async def load(self, version: int, weights: Any) -> None:
        await self._answer(self._actor.load.remote(version, *weights))

    async def play(self, group: Group) -> Sequence[Trajectory]:
        return await self._answer(self._actor.play.remote(group))

    def kill(self) -> None:
        self._ray.kill(self._actor)

    async def _answer(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return await reference
        except UserError as error:  # Ray's error is of the type of its cause as well
            raise UserError(str(getattr(error, "cause", error))) from None
        except errors.OutOfMemoryError as error:
            raise PlayerLost("memory", str(error).partition("\n")[0]) from None
        except errors.RayTaskError as error:
            raise PlayerLost("error", f"{type(error.cause).__name__}: {error.cause}") from error
        except errors.RayError as error:
            raise PlayerLost("died", str(error).partition("\n")[0]) from None


class _PlayerActor:
    def __init__(self, session: Session, data: PlayerData, worlds: Sequence[Any]) -> None:
        session = Session.open(session.config, session.run.path, "train")
        torch.set_num_threads(max(1, int(session.config.scale.cpus_per_player)))
        numbers = count()
        real = (lambda: _RemoteEnv(worlds[next(numbers) % len(worlds)])) if worlds else None
        self._player = Player(session, data, real)

    async def load(self, version: int, name: str, weights: Any) -> None:
        await self._player.load(version, name, weights)

    async def play(self, group: Group) -> list[Trajectory]:
        return await self._player.play(group)


class _Ledger:
    """Counts what is done in the real world, in a process that does not play."""

    def __init__(self) -> None:
        self._total = PoolStats()

    def add(self, stats: PoolStats) -> None:
        self._total = self._total + stats

    def total(self) -> PoolStats:
        return self._total


class _RealWorldActor:
    """``RealWorld``; failures are values, because Ray does not keep what an ``EnvFailure`` holds."""

    def __init__(self, session: Session, ledger: str) -> None:
        import ray

        add: Any = ray.get_actor(ledger).add

        async def charge(stats: PoolStats) -> None:
            await add.remote(stats)

        self._world = RealWorld(session, charge)

    async def reset(self, env: str, task: Task, seed: int) -> Observation | tuple[StopReason, str]:
        try:
            return await self._world.reset(env, task, seed)
        except EnvFailure as failure:
            return failure.reason, str(failure)

    async def step(self, env: str, action: str) -> StepResult | tuple[StopReason, str]:
        try:
            return await self._world.step(env, action)
        except EnvFailure as failure:
            return failure.reason, str(failure)

    async def close(self, env: str) -> None:
        await self._world.close(env)


class _RemoteEnv:
    """A real environment of another process, as an ``Env``."""

    def __init__(self, world: Any) -> None:
        self._world, self._id = world, secrets.token_hex(8)

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self._answer(self._world.reset.remote(self._id, task, seed))

    async def step(self, action: str) -> StepResult:
        return await self._answer(self._world.step.remote(self._id, action))

    async def close(self) -> None:
        self._world.close.remote(self._id)

    async def _answer(self, reference: Any) -> Any:
        from ray.exceptions import RayError

        try:
            answer = await reference
        except RayError as error:
            raise EnvFailure(StopReason.ENV_CRASHED, str(error).partition("\n")[0]) from error
        if isinstance(answer, tuple):
            raise EnvFailure(*answer)
        return answer
