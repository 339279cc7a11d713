"""Players and real worlds as actors of Ray, on one machine or on many."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from imagination.runs.models import weights_version
from imagination.runs.processes import count as processes
from imagination.scale.dispatch import groups_at_once
from imagination.scale.ledger import Ledger
from imagination.scale.player import Player, PlayerData, trained_weights
from imagination.scale.pool import Group, PlayerLost, PlayerPool, PoolLimits
from imagination.scale.ray_envs import (
    MANY,
    RemoteEnvs,
    connect,
    disconnect,
    elsewhere,
    here,
    host_envs,
    real_envs_of,
    resources,
)
from imagination.session import Session
from imagination.settings import UserError
from real_envs.trajectory import Trajectory
from real_envs.worker_pool import PoolStats, count_elsewhere

_SEAT_SECONDS = 60.0
_FINISH_SECONDS = 30.0


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
        real_cpus = settings.real_worlds * settings.cpus_per_real_world * real
        self.ray = ray = connect(settings, settings.players * settings.cpus_per_player + real_cpus)
        self._seat = _take_gpus(ray, processes()) if settings.gpus_per_player else None
        ledger = f"ledger {secrets.token_hex(8)}"  # a name: actors that hold others do not restart
        file = session.run.path.resolve() / "checkpoints" / "real.jsonl"
        self._ledger = ray.remote(num_cpus=0, scheduling_strategy=here(ray))(Ledger).options(name=ledger).remote(file)
        self._counted, self._gauges = PoolStats(), dict[str, Any]()
        session, shared, worlds = elsewhere(session), ray.put(data), list[Any]()
        if real:
            needs = resources(settings.cpus_per_real_world, 0.0, settings.gb_per_real_world)
            worlds = host_envs(ray, session, real_envs_of, settings.real_worlds, needs, ledger)
        self._worlds = worlds
        needs = resources(settings.cpus_per_player, settings.gpus_per_player, settings.gb_per_player)
        actor = ray.remote(max_concurrency=MANY, **needs)(_PlayerActor)
        train, room = session.config.train, max(64, session.config.engine.slots)
        at_once = groups_at_once(room // train.played_per_group, train.groups, train.max_staleness, settings.players)
        self.pool = PlayerPool(
            lambda place: _RayPlayer(ray, lambda name: actor.remote(session, shared, worlds, name), worlds),
            settings.players,
            PoolLimits(at_once, settings.start_seconds, settings.hang_seconds, settings.attempts),
        )

    def publish(self, version: int, model: torch.nn.Module, wait: bool) -> str:
        """Players go over to the model's weights as they are now; returns their hash. See ``PlayerPool.publish``."""
        name = weights_version(model)
        weights = self.ray.put(trained_weights(model))  # one copy on each machine, which its players read
        self.pool.publish(version, (name, weights), wait)
        return name

    def counted_before(self, stats: PoolStats | None) -> None:
        """What the summary has of the real world already: more was done where a process that learned was killed before
        it could count. ``None``: a training that begins.
        """
        if stats is None:
            self.ray.get(self._ledger.clear.remote())
        elif (missing := stats - self.ray.get(self._ledger.total.remote())).steps > 0:  # without players, say
            self.ray.get(self._ledger.add.remote(missing))
        self._counted = stats or PoolStats()

    def count_real(self) -> None:
        """What players did in the real world since the last call counts as done by this process."""
        total = self.ray.get(self._ledger.total.remote())
        count_elsewhere(total - self._counted)
        self._counted = total

    def show(self, metrics: Mapping[str, float]) -> None:
        """Metrics of an update for Ray's dashboard and its Prometheus endpoint, as ``imagination_<name>``."""
        from ray.util.metrics import Gauge

        for name, value in {**metrics, **self.pool.speed()}.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"imagination_{name}", description=f"{name} of the last update")
            self._gauges[name].set(float(value))

    def finish(self) -> None:
        """Ends players, and counts what they still did in the real world; once they have ended it does no more."""
        self.pool.close()
        if self._worlds:
            still = [world.clients_lost.remote() for world in self._worlds]
            self.ray.wait(still, num_returns=len(still), timeout=_FINISH_SECONDS)
        self.count_real()

    def close(self) -> None:
        """Ends players, worlds, and the cluster where this process started it."""
        try:
            self.finish()
        finally:
            disconnect(self.ray)


def _take_gpus(ray: Any, count: int) -> Any:
    """Takes the GPUs of the processes that learn, on this machine, so that no player gets them; returns who holds them.

    Raises:
        UserError: they are not free.
    """
    seat = ray.remote(num_cpus=0, num_gpus=count, scheduling_strategy=here(ray))(_Seat).remote()
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


class _RayPlayer:
    """A ``PlayerHandle`` of an actor."""

    def __init__(self, ray: Any, make: Callable[[str], Any], worlds: Sequence[Any]) -> None:
        self._name = secrets.token_hex(8)
        self._ray, self._actor, self._worlds = ray, make(self._name), worlds

    async def load(self, version: int, weights: Any) -> None:
        await self._answer(self._actor.load.remote(version, *weights))

    async def play(self, group: Group) -> Sequence[Trajectory]:
        return await self._answer(self._actor.play.remote(group))

    def kill(self) -> None:
        self._ray.kill(self._actor)
        for world in self._worlds:
            world.client_lost.remote(self._name)

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
    def __init__(self, session: Session, data: PlayerData, worlds: Sequence[Any], name: str) -> None:
        session = Session.open(session.config, session.run.path, "train")
        torch.set_num_threads(max(1, int(session.config.scale.cpus_per_player)))
        self._player = Player(session, data, RemoteEnvs(worlds, name) if worlds else None)

    async def load(self, version: int, name: str, weights: Any) -> None:
        await self._player.load(version, name, weights)

    async def play(self, group: Group) -> list[Trajectory]:
        return await self._player.play(group)
