"""What a player does: it plays groups of episodes with a policy and a world model of its own.

Plain classes: ``ray_players.py`` makes actors of them.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from imagination.rollout.dream_env import Start
from imagination.rollout.play import Provenance, play_all
from imagination.runs.models import adapted
from imagination.scale.pool import ENV_LOST, Group
from imagination.session import Session
from policy.lm.engine import Completion, Engine, Sampling
from real_envs.env import Env
from real_envs.trajectory import Source, Trajectory

Weights = Mapping[str, np.ndarray]


class PlayerData(NamedTuple):
    """What players need beside the run's folder: episodes that the world model may look up, and states to begin in."""

    known: Sequence[Trajectory]
    starts: Mapping[str, Start]


def trained_weights(model: torch.nn.Module) -> Weights:
    """The trained weights by name, as bytes: NumPy arrays are read by all processes of a machine without a copy."""
    return {
        name: p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: Weights) -> None:
    """Raises ``KeyError``: the model has no parameter of a name."""
    parameters = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, data in weights.items():
            p = parameters[name]
            p.copy_(torch.from_numpy(data).view(p.dtype).view_as(p))


class PausableEngine:
    """An ``Engine`` whose requests wait while its weights change: what one of them sampled is of one version."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await self._engine.complete(ids, sampling, seed, session)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No request runs, and those that come wait."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()


class Player:
    """Plays by the latest weights that it was given.

    Args:
        real: makes environments of the real world, where groups are played there.
    """

    def __init__(self, session: Session, data: PlayerData, real: Callable[[], Env] | None = None) -> None:
        self._session = session
        self._data, self._real = data, real
        self._versions: dict[int, int] = {}  # of the policy, by those of the engine
        self._policy_version = ""

    async def load(self, version: int, name: str, weights: Weights) -> None:
        """
        Args:
            version: of the policy: how many updates it has learned from.
            name: the hash of the weights, for the episodes that begin from now on.

        Raises:
            UserError: the run is not as far, or what it needs is not installed here.
        """
        if not self._versions:
            self._build()
        async with self._engine.paused():
            load_weights(self._model, weights)
            self._engine.update_weights()
            self._versions[self._engine.version] = version
            self._policy_version = name

    def _build(self) -> None:
        session, config = self._session, self._session.config
        policy = session.policy("policy-clone")
        self._model = adapted(policy.model, config.policy)
        self._agent = session.agent(replace(policy, model=self._model))
        self._agent.engine = self._engine = PausableEngine(self._agent.engine)
        self._worlds: dict[Source, _World] = {}
        if config.train.world == "dream":
            world_model = session.world_model(self._data.known)
            dreams = session.dreams(world_model, self._data.starts, self._data.known)
            self._worlds[Source.DREAM] = _World(dreams, world_model.version, session.solved_at)
        if self._real is not None:
            self._worlds[Source.REAL] = _World(self._real)

    async def play(self, group: Group) -> list[Trajectory]:
        """Episodes whose real world was lost are played again, ``scale.attempts`` times in all."""
        world = self._worlds[group.source]
        stamp = Provenance(group.source, self._policy_version, world.version, world.solved_at)
        played, left = dict[str, Trajectory](), group.episodes
        for _ in range(self._session.config.scale.attempts):
            done = await play_all(left, world.make_env, self._agent, stamp, group.max_turns, len(left))
            played |= {trajectory.id: _with_versions(trajectory, self._versions) for trajectory in done}
            left = tuple(e for e in left if (played[e.id].failure or "").startswith(ENV_LOST))
            if not left:
                break
        return [played[episode.id] for episode in group.episodes]


@dataclass(frozen=True, slots=True)
class _World:
    make_env: Callable[[], Env]
    version: str | None = None
    solved_at: float | None = None


def _with_versions(trajectory: Trajectory, versions: Mapping[int, int]) -> Trajectory:
    """With versions of the policy in place of the engine's, which begin anew with each player."""
    if trajectory.trace is None:
        return trajectory
    trace = replace(trajectory.trace, versions=tuple(versions[v] for v in trajectory.trace.versions))
    return replace(trajectory, trace=trace)
