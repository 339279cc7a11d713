from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from imagination.data.augmentation import REFLECTIONS, contrasts, with_reflections, write_supplement
from imagination.rollout.dream_env import Guard
from imagination.runs.lifecycle import run_stage
from imagination.runs.progress_bar import Bar
from imagination.session import Session
from imagination.settings import Config, UserError
from policy.lm.engine import ContextFull, EngineFailure, Sampling
from policy.lm.render import policy_prompt, spoken_action
from real_envs.seeding import derive_seed
from real_envs.trajectory import Owner, Source, Trajectory
from worldmodel.world_model import PredictionInvalid, WorldModel

Propose = Callable[[Trajectory, int], Awaitable[Sequence[str]]]


def reflect(config: Config, folder: Path) -> None:
    """Optional: write reflections, alternatives to the expert's actions with their predicted outcomes.

    Tries alternatives at every expert turn in the world model: actions of other episodes of the task, or those
    of reflect.proposer. Confident outcomes become reasoning before the expert's action.
    clone.supplements=[reflections] imitates both; the policy then reasons, within max_action_tokens.

    Reads: log/, models/worldmodel/
    Writes: supplements/reflections/

    Examples:
        imagine reflect run=mine
        imagine reflect run=mine reflect.proposer=policy-clone

    Raises:
        UserError: no expert in the log, no outcome that the world model is sure of, or an earlier stage is missing.
    """
    with run_stage(config, folder, "reflect") as run:
        session = Session(config, run)
        train = config.worldmodel.goal.relabel_log(session.log.train)  # dreamed outcomes are paid by the goal, too
        named = tuple(config.reflect.agents)
        experts = [t for t in train if (t.agent.startswith(named) if named else t.source is Source.EXPERT)]
        if not experts:
            agents = sorted({episode.agent for episode in train})
            raise UserError(f"no episode of the log is by an expert; name some in reflect.agents, it has {agents}")
        world = session.world_model(temperature=0.0)
        guard = replace(session.guard(), min_confidence=config.reflect.min_confidence)
        propose = asked_policy(session) if config.reflect.proposer else _logged(config, train)
        with Bar("reflect", len(experts), "turns") as bar:
            trials = Alternatives(world, guard, propose, config.seed, bar)
            episodes = asyncio.run(_all(trials, experts, config.reflect.words))
        counts = {"episodes": len(episodes), "tried": sum(trials.counts.values()), **trials.counts}
        run.update({"reflected": counts})
        if not episodes:
            raise UserError(f"no other action has an outcome to tell of, {counts}; lower reflect.min_confidence")
        place = write_supplement(run, REFLECTIONS, episodes)
    print(f"{counts['told']} of {counts['tried']} tried actions are told of, {counts}: {place}", file=sys.stderr)


def _logged(config: Config, log: Sequence[Trajectory]) -> Propose:
    """Proposes what other episodes of the task did, at whatever time."""
    done: dict[str, dict[str, None]] = {}
    for episode in log:
        done.setdefault(episode.task_id, {}).update(dict.fromkeys(turn.action for turn in episode.turns))

    async def propose(episode: Trajectory, k: int) -> Sequence[str]:
        rng = random.Random(derive_seed(f"alternatives/{episode.id}", config.seed, k))
        others = [action for action in done[episode.task_id] if action != episode.turns[k].action]
        return rng.sample(others, min(config.reflect.alternatives, len(others)))

    return propose


def asked_policy(session: Session) -> Propose:
    """Proposes what a policy of the run would do there. What it does not end within its limit is no action."""
    config, policy = session.config, session.policy(session.config.reflect.proposer)
    engine, chat = session.agent(policy).engine, policy.chat
    sampling = Sampling(config.max_action_tokens, chat.stop)

    async def propose(episode: Trajectory, k: int) -> Sequence[str]:
        ids = policy_prompt(chat, episode.start, episode.turns[:k], Owner.SCAFFOLD).ids
        seeds = (
            derive_seed(f"alternatives/{episode.id}", config.seed, k, n) for n in range(config.reflect.alternatives)
        )
        completions = [await engine.complete(ids, sampling, seed) for seed in seeds]
        actions = (spoken_action(chat.decode(one.ids[:-1])) for one in completions if one.stopped)
        return [action for action in dict.fromkeys(actions) if action and action != episode.turns[k].action]

    return propose


@dataclass(slots=True)
class Alternatives:
    """What the world model says of other actions."""

    world: WorldModel
    guard: Guard
    propose: Propose
    seed: int
    bar: Bar
    # actions that were tried, by what became of them: ``told``, ``unsure``, ``invalid``, ``no_contrast``,
    # ``context_full`` and ``engine_failed``
    counts: Counter[str] = field(default_factory=lambda: Counter(told=0))

    async def others(self, episode: Trajectory) -> list[list[tuple[str, str]]]:
        """For each turn, the other actions to tell of, each with the observation that is predicted."""
        outcomes_of_turns: list[list[tuple[str, str]]] = []
        for k in range(len(episode.turns)):
            try:
                actions = await self.propose(episode, k)
            except (ContextFull, EngineFailure) as error:
                self.counts["context_full" if isinstance(error, ContextFull) else "engine_failed"] += 1
                actions = []
            outcomes = [(action, await self._outcome(episode, k, action)) for action in actions]
            outcomes_of_turns.append([(action, seen) for action, seen in outcomes if seen is not None])
            self.bar.count()
        self.world.release(episode.id)
        return outcomes_of_turns

    async def _outcome(self, episode: Trajectory, k: int, action: str) -> str | None:
        history = episode.turns[:k]
        seed = derive_seed(f"reflect/{episode.id}", self.seed, k)
        try:
            prediction = await self.world.predict(episode.start, history, action, seed, episode.id)
        except PredictionInvalid:
            became = "invalid"
        except ContextFull:
            became = "context_full"
        except EngineFailure:
            became = "engine_failed"
        else:
            if not self.guard.trusts(prediction, sum(turn.reward or 0.0 for turn in history)):
                became = "unsure"
            elif not contrasts(episode.turns[k], prediction):
                became = "no_contrast"
            else:
                self.counts["told"] += 1
                return prediction.observation
        self.counts[became] += 1
        return None


async def _all(trials: Alternatives, experts: Sequence[Trajectory], words: int) -> list[Trajectory]:
    async def one(episode: Trajectory) -> Trajectory | None:
        others = await trials.others(episode)
        trials.bar.step()
        return with_reflections(episode, others, words)

    reflected = await asyncio.gather(*(one(episode) for episode in experts))
    return [episode for episode in reflected if episode is not None]
