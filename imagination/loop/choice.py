"""Where to act: which tasks are worth real episodes.

A score is the weighted mean of parts, each a function of its own of what is known of a task, and each in [0, 1]. A part
that nothing is known for is ``None``, which is not 0: it is left out of the mean.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from imagination.loop.acting import POLICY, policy_folder, round_of
from imagination.loop.origin import of_new_tasks
from imagination.rollout.dream_env import DreamEnv, starts_from_log
from imagination.rollout.play import Provenance, plan, play_with_bar
from imagination.session import Session
from imagination.settings import ChoiceWeights
from real_envs.env import Task
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory
from worldmodel.evaluation.proportions import summarise

_LEAST = 1e-12  # a confidence that was rounded to 0 would be an infinite surprise


@dataclass(frozen=True, slots=True)
class TaskStats:
    """What is known of a task before its next real episodes."""

    logged: int = 0  # episodes of it in the log
    dreamed: tuple[int, int] = (0, 0)  # solved and played, by the policy as it is, in the world model as it is
    real: tuple[int, int] = (0, 0)  # solved and played, by the policy in the real world so far
    confidences: Sequence[float] = ()  # of each dreamed turn, the probability of its prediction
    disagreements: Sequence[float] = ()  # of each dreamed turn, in nats; empty with a single world model
    members: int = 1  # of the world model


def doubt(known: TaskStats) -> float | None:
    """How unsure the world model is of its dreams.

    With an ensemble, the mean disagreement of its members over its maximum ``log M``: what more data could settle
    (BALD; Houlsby et al. 2011, arXiv 1112.5745; for exploration: Sekar et al. 2020, arXiv 2005.05960). With one model,
    one minus the geometric mean of its confidences, which holds the chance of the world itself as well.

    Example: ``doubt(TaskStats(confidences=[1.0, 0.25]))`` is 0.5 = 1 - sqrt(1 * 0.25).
    """
    if known.disagreements:
        return min(1.0, sum(known.disagreements) / len(known.disagreements) / math.log(known.members))
    if not known.confidences:
        return None
    surprise = -sum(math.log(max(c, _LEAST)) for c in known.confidences) / len(known.confidences)
    return 1.0 - math.exp(-max(surprise, 0.0))


def gap(known: TaskStats) -> float | None:
    """Distance of dreamed and real success.

    Example: ``gap(TaskStats(dreamed=(3, 4), real=(1, 4)))`` is 0.5.
    """
    dreamed, real = _rate(known.dreamed), _rate(known.real)
    return None if dreamed is None or real is None else abs(dreamed - real)


def variance(known: TaskStats) -> float | None:
    """Variance of success, ``p (1 - p)``, over its maximum, a quarter; dreamed and real episodes count alike.

    Groups whose episodes all end alike have advantages of 0 (Yu et al. 2025, arXiv 2503.14476, section 3.2).

    Example: ``variance(TaskStats(dreamed=(1, 4)))`` is 0.75 = 4 * 1/4 * 3/4.
    """
    p = _rate((known.dreamed[0] + known.real[0], known.dreamed[1] + known.real[1]))
    return None if p is None else 4 * p * (1 - p)


def thinness(known: TaskStats) -> float:
    """``1 / sqrt(1 + n)`` of n logged episodes, the exploration bonus of counts (Bellemare et al. 2016, arXiv
    1606.01868, section 4).

    Example: ``thinness(TaskStats(logged=3))`` is 0.5.
    """
    return 1 / math.sqrt(1 + known.logged)


_PARTS: tuple[Callable[[TaskStats], float | None], ...] = (doubt, gap, variance, thinness)
PARTS: Mapping[str, Callable[[TaskStats], float | None]] = {part.__name__: part for part in _PARTS}


def score(known: TaskStats, weights: ChoiceWeights) -> float:
    """Weighted mean of the parts that are known; 0 where none with a weight is.

    Example::

        score(TaskStats(logged=3, dreamed=(1, 4)), ChoiceWeights(doubt=5, gap=5, variance=1, thinness=3))  # 0.5625
    """
    parts = [(PARTS[f.name](known), float(getattr(weights, f.name))) for f in fields(weights)]
    total = sum(weight for value, weight in parts if value is not None)
    return sum(value * weight for value, weight in parts if value is not None) / total if total else 0.0


def choose(scores: Mapping[str, float], count: int, epsilon: float, seed: int) -> list[str]:
    """``count`` tasks, none twice before each was taken once.

    Each is drawn in proportion to the scores (0 or more) of those that are left, or uniformly with probability
    ``epsilon``.

    Raises:
        ValueError: there is no task.
    """
    if not scores:
        raise ValueError("there is no task to choose from")
    rng = random.Random(derive_seed("loop draw", seed))
    chosen, left = list[str](), list[str]()
    while len(chosen) < count:
        left = left or sorted(scores)
        weights = [scores[task] for task in left]
        uniform = rng.random() < epsilon or not any(weights)
        chosen.append(rng.choice(left) if uniform else rng.choices(left, weights)[0])
        left.remove(chosen[-1])
    return chosen


def _rate(counts: tuple[int, int]) -> float | None:
    return counts[0] / counts[1] if counts[1] else None


def choose_tasks(session: Session) -> tuple[list[str], list[float]]:
    """The tasks that this round plays for real, with their scores; a function of seed, round, models and log."""
    tasks, loop, seed = session.tasks(), session.config.loop, session.config.seed
    number = session.run.summary["loop"]["round"]
    known = {task.id: task for task in tasks.tasks("train")}
    asyncio.run(tasks.close())
    names = list(known)
    if loop.candidates and len(names) > loop.candidates:
        names = sorted(random.Random(derive_seed("loop candidates", seed, number)).sample(names, loop.candidates))
    scores = dict.fromkeys(names, 1.0)
    if loop.choice != "uniform":
        evidence = _evidence(session, number, {name: known[name] for name in names})
        scores = {name: score(evidence[name], loop.weights) for name in names}
    chosen = choose(scores, loop.tasks, loop.epsilon, derive_seed("loop choice", seed, number))
    return chosen, [round(scores[name], 6) for name in chosen]


def _evidence(session: Session, number: int, tasks: Mapping[str, Task]) -> dict[str, TaskStats]:
    """What log and dreams say of each task; the policy of now dreams each a few times, which costs no real step."""
    config, (train, held) = session.config, session.log
    own = of_new_tasks([*train, *held])
    starts = starts_from_log([*of_new_tasks(train), *session.unplayed], branch=False)
    first = {start.task_id: name for name, start in starts.items()}
    policy = session.policy(policy_folder(session.run, number))
    agent = session.agent(policy, name=POLICY)
    world, guard = session.paying(session.world_model()), session.guard()
    known = [replace(task, spec={"start": first[name]}) for name, task in tasks.items() if name in first]
    dreams = asyncio.run(
        play_with_bar(
            "look where to act",
            plan(known, config.loop.looks, f"look/{number}", derive_seed("loop looks", config.seed, number)),
            lambda: DreamEnv(world, starts, guard),
            agent,
            Provenance(Source.DREAM, policy.version, world.version, session.solved_at),
            config.dream.max_turns,
            concurrency=128,
        )
    )
    logged = Counter(t.task_id for t in own)
    real = [t for t in own if round_of(t) is not None and t.agent == POLICY]
    return {
        name: TaskStats(
            logged=logged[name],
            dreamed=_solved(dreams, name),
            real=_solved(real, name),
            confidences=_numbers(dreams, name, "confidence"),
            disagreements=_numbers(dreams, name, "disagreement"),
            members=config.worldmodel.members,
        )
        for name in tasks
    }


def _solved(episodes: Sequence[Trajectory], task: str) -> tuple[int, int]:
    success = summarise(t for t in episodes if t.task_id == task).success
    return success.successes, success.n


def _numbers(dreams: Sequence[Trajectory], task: str, key: str) -> list[float]:
    return [float(u.info[key]) for t in dreams if t.task_id == task for u in t.own_turns if key in u.info]
