"""Plays the episodes of a comparison in both worlds, and keeps account of what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from imagination.evaluation.compare.pairs import Pair, pair_up
from imagination.rollout.dream_env import DreamEnv, Guard, Start
from imagination.rollout.engines import Engines
from imagination.rollout.play import Episode, Provenance, Replay, plan, play_with_bar
from imagination.session import Session
from policy.agent import LanguageModelAgent
from real_envs.env import Env, StepResult, Task, TaskSet
from real_envs.trajectory import Observation, Owner, Source, StopReason, Trajectory
from worldmodel.world_model import WorldModel

DREAMS, REALS = 128, 64  # episodes at a time


class CountedEnv:
    """An ``Env`` that counts the steps asked of it on a ledger."""

    def __init__(self, env: Env, ledger: Ledger) -> None:
        self._env, self._ledger = env, ledger

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self._env.reset(task, seed)

    async def step(self, action: str) -> StepResult:
        self._ledger.steps += 1
        return await self._env.step(action)

    async def close(self) -> None:
        await self._env.close()


@dataclass(slots=True)
class Ledger:
    """What the parts of a comparison cost: real steps, seconds and sampled tokens, of ``dream``, ``real``, ``replay``
    and ``log``."""

    engines: Engines
    steps: int = 0
    cost: dict[str, dict[str, float]] = field(
        default_factory=lambda: {"real_steps": {}, "seconds": {}, "generated_tokens": {}}
    )

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        steps, tokens, start = self.steps, self.engines.tokens, time.monotonic()
        yield
        spent = (self.steps - steps, time.monotonic() - start, self.engines.tokens - tokens)
        for kind, amount in zip(self.cost.values(), spent, strict=True):
            kind[name] = round(kind.get(name, 0) + amount, 2)


@dataclass(slots=True)
class ComparisonPlayer:
    """Plays the episodes of a comparison in both worlds."""

    session: Session
    world: WorldModel
    guard: Guard
    reality: TaskSet | None
    agent: LanguageModelAgent | None
    policy_version: str | None
    ledger: Ledger

    async def dream(
        self,
        what: str,
        episodes: Sequence[Episode],
        agent: Any,
        starts: dict[str, Start],
        limit: Any,
        version: Any,
        world: WorldModel,
    ) -> list[Trajectory]:
        stamp = Provenance(Source.DREAM, version, world.version, self.session.solved_at)
        from_starts = [replace(e, task=Task(e.task.id, {"start": e.task.id})) for e in episodes]
        make_env = partial(DreamEnv, world, starts, self.guard)
        return await play_with_bar(what, from_starts, make_env, agent, stamp, limit, DREAMS)

    async def real(
        self, what: str, episodes: Sequence[Episode], agent: Any, limit: Any, version: Any
    ) -> list[Trajectory]:
        assert self.reality is not None
        make_env, stamp = self.reality.make_env, Provenance(Source.REAL, version)
        return await play_with_bar(
            what, episodes, lambda: CountedEnv(make_env(), self.ledger), agent, stamp, limit, REALS
        )

    async def policy(
        self, split: str, tasks: Sequence[Task], starts: dict[str, Start]
    ) -> tuple[list[Trajectory], list[Trajectory] | None, list[Pair]]:
        """The policy's dreams, its free play for real, and the dreams paired with their replays."""
        agent, config = self.agent, self.session.config
        assert agent is not None
        limit, count, seed = config.evaluate.max_turns, config.compare.episodes, config.seed
        reals: list[Trajectory] | None = None
        if self.reality is not None:
            with self.ledger.part("real"):
                episodes = plan(tasks, count, f"real/{split}", seed)
                reals = await self.real(f"play {split}", episodes, agent, limit, self.policy_version)
            starts = {e.task_id: Start(e.task_id, e.start) for e in reals if not e.stop.is_failure} | starts
        # planned over all tasks, so that a dream has the seed of its task's free play
        episodes = [e for e in plan(tasks, count, f"dream/{split}", seed) if e.task.id in starts]
        with self.ledger.part("dream"):
            dreams = await self.dream(f"dream {split}", episodes, agent, starts, limit, self.policy_version, self.world)
        if reals is None:
            return dreams, None, []
        attempts = {dream.id: unanswered(dream, agent) for dream in dreams}
        scripts = {d.id: (*(t.action for t in d.turns), *attempts[d.id]) for d in dreams}
        played = [e for e in episodes if scripts[e.id]]
        with self.ledger.part("replay"):
            replays = await self.real(
                f"replay {split}", played, lambda e: Replay(scripts[e.id]), lambda e: len(scripts[e.id]), None
            )
        by_id = {dream.id: dream for dream in dreams}
        pairs = [
            pair_up(e.id, "dream", split, by_id[e.id], replay, "".join(attempts[e.id]))
            for e, replay in zip(played, replays, strict=True)
        ]
        return dreams, reals, pairs

    async def logged(self, split: str, log: Sequence[Trajectory], world: WorldModel) -> list[Pair]:
        """Logged episodes, dreamed again with their own actions in ``world``, which is shown nothing of them.

        A declared goal decides what dreams pay, so it says what they should have paid.
        """
        log = self.session.config.worldmodel.goal.relabel_log(log)
        starts = {e.id: Start(e.task_id, e.start) for e in log}
        actions = {e.id: tuple(turn.action for turn in e.turns) for e in log}
        episodes = [Episode(e.id, Task(e.id), e.group_id, e.seed) for e in log]
        what = f"dream the log, {split}"
        with self.ledger.part("log"):
            dreams = await self.dream(
                what, episodes, lambda e: Replay(actions[e.id]), starts, lambda e: len(actions[e.id]), None, world
            )
        return [pair_up(f"log/{real.id}", "log", split, dream, real) for dream, real in zip(dreams, log, strict=True)]


def unanswered(dream: Trajectory, agent: LanguageModelAgent) -> tuple[str, ...]:
    """The action to which a dream's answer could not be read, which is in no turn; nothing where there is none."""
    if dream.stop is not StopReason.PREDICTION_INVALID or dream.trace is None:
        return ()
    tokens = [*zip(dream.trace.ids, dream.trace.owners, dream.trace.turns, strict=True)][dream.trace.spans[-1][0] :]
    ids = [t for t, owner, turn in tokens if owner == Owner.AGENT and turn == len(dream.turns)]
    return (agent.chat.decode([t for t in ids if t != agent.chat.stop]).strip(),)
