"""How long does a dream stay true? The model's own words are fed back, along the actions of a real episode."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from policy.lm.engine import ContextFull, EngineFailure
from real_envs.trajectory import StopReason, Trajectory, Turn
from worldmodel.evaluation.intervals import clusters, proportion
from worldmodel.evaluation.transitions import Judged
from worldmodel.rules.rule_set import RulePrediction, RuleSet
from worldmodel.world_model import Prediction, PredictionInvalid, WorldModel


@dataclass(frozen=True, slots=True)
class Rolled:
    """An open-loop dream along a real episode.

    Attributes:
        right: one entry per turn of the episode: text, reward and end as in reality. False from where the dream broke
            off (malformed, or it believed in an end) to the episode's end.
    """

    trajectory_id: str
    task_id: str
    right: tuple[bool, ...]

    @property
    def parts_at(self) -> int | None:
        """How many turns were true before the first wrong one; ``None`` if all were true."""
        return None if all(self.right) else self.right.index(False)


async def roll(model: WorldModel, trajectories: Sequence[Trajectory], turns: int) -> list[Rolled]:
    """Dreams along at most ``turns`` actions of real episodes, on the model's own words (Word2World's open loop).

    Episodes without a turn that can be judged are left out; one that outgrows the context, or at which generation
    breaks, is cut there.
    """
    gate = asyncio.Semaphore(64)

    async def roll_episode(trajectory: Trajectory) -> Rolled:
        right: list[bool] = []
        history: list[Turn] = []
        session, over = ("audit-roll", trajectory.id), False
        async with gate:
            for k, turn in enumerate(trajectory.turns[:turns]):
                if not turn.known:
                    break  # what follows cannot be judged, and nothing before it is lost
                predicted: Prediction | None = None
                if not over:
                    try:
                        predicted = await model.predict(
                            trajectory.start, tuple(history), turn.action, seed=0, session=session
                        )
                    except PredictionInvalid:
                        over = True
                    except (EngineFailure, ContextFull):
                        break
                right.append(Judged(trajectory.id, k, turn, predicted).exact)
                if predicted is not None:
                    history.append(Turn(turn.action, predicted.observation, predicted.reward, predicted.terminated))
                    over = predicted.terminated
            model.release(session)
        return Rolled(trajectory.id, trajectory.task_id, tuple(right))

    own = [t for t in trajectories if not t.prefix_turns]
    return [rolled for rolled in await asyncio.gather(*map(roll_episode, own)) if rolled.right]


def drift_metrics(rolled: Sequence[Rolled]) -> dict[str, Any]:
    """By turn k = 1, 2, ...: of the episodes that long, how many are right at k, and how many were right all along.

    ``first_divergence`` counts dreams by how many turns were true before the first wrong one; ``never`` those in which
    none was wrong.
    """
    longest = max((len(r.right) for r in rolled), default=0)
    at, still = {}, {}
    for k in range(1, longest + 1):
        long = [r for r in rolled if len(r.right) >= k]
        cluster = clusters([r.task_id for r in long], [r.trajectory_id for r in long])
        at[str(k)] = proportion([r.right[k - 1] for r in long], cluster).to_json()
        still[str(k)] = proportion([all(r.right[:k]) for r in long], cluster).to_json()
    parted = Counter(r.parts_at for r in rolled)
    return {
        "n": len(rolled),
        "exact_at": at,
        "true_until": still,
        "first_divergence": {str(k): parted[k] for k in sorted(k for k in parted if k is not None)},
        "never": parted[None],
    }


def horizon(metrics: dict[str, Any], least: float, least_n: int) -> int:
    """The last turn up to which open-loop exact match stays at or above ``least``, each on ``least_n`` episodes."""
    last = 0
    for k, at in metrics["exact_at"].items():
        if at["n"] < least_n or at["value"] < least:
            break
        last = int(k)
    return last


class Contradiction(StrEnum):
    """How a turn contradicts what the episode said before."""

    ACCEPTED = "accepted"  # what a rule refuses was done: a move where no exit is, a thing taken that is not there
    REFUSED = "refused"  # what a rule knows to be possible was refused
    CHANGED = "changed"  # a text that should have come back is another: a room that changed behind one's back
    WORDS = "words"  # another answer than the one that the log always gives
    OUTCOME = "outcome"  # the words are right, reward or end are not: paid twice, or not at all
    INVARIANT = "invariant"  # says what such answers never say, or leaves out what they all say: a room of another name
    RETRIED = "retried"  # refused, and then accepted, with nothing but refusals in between


def contradiction(answer: RulePrediction | None, turn: Turn, rules: RuleSet) -> Contradiction | None:
    """How a turn contradicts what the rules foretell of it; ``None`` where it does not, or no rule applies."""
    if answer is None:
        return None
    rule, refused = answer.rule, rules.language.refuses(turn.action, turn.observation)
    if rule.is_right(answer.observation, turn):
        return None
    if turn.observation.strip() == answer.observation.strip():
        return Contradiction.OUTCOME
    if rule.refuses:
        return None if refused else Contradiction.ACCEPTED
    if refused:
        return Contradiction.REFUSED
    return Contradiction.WORDS if rule.copy.kind == "say" else Contradiction.CHANGED


def contradictions_of(trajectory: Trajectory, rules: RuleSet) -> list[Contradiction | None]:
    """One entry for each of the episode's own turns, without one that the guard rejected."""
    kinds: list[Contradiction | None] = []
    just_refused: set[str] = set()
    session = ("contradictions", trajectory.id)
    believed = len(trajectory.turns) - (trajectory.stop is StopReason.UNSURE)
    for k, turn in enumerate(trajectory.turns[:believed]):
        refused = rules.language.refuses(turn.action, turn.observation)
        if k >= trajectory.prefix_turns:
            start, history = trajectory.start, trajectory.turns[:k]
            answer = rules.answer(start, history, turn.action, session)
            answer = answer or rules.words(start, history, turn.action, session)
            kind = contradiction(answer, turn, rules)
            if answer is None and rules.broken(start, history, turn, session):
                kind = Contradiction.INVARIANT
            if kind is None and not refused and turn.action in just_refused:
                kind = Contradiction.RETRIED
            kinds.append(kind)
        just_refused = just_refused | {turn.action} if refused else set()
    rules.release(session)
    return kinds


def contradiction_metrics(episodes: Sequence[Trajectory], rules: RuleSet) -> dict[str, Any]:
    """``rate`` of turns that contradict their episode, ``by_kind`` as shares of all ``turns``."""
    turns = [(episode, kind) for episode in episodes for kind in contradictions_of(episode, rules)]
    kinds, n = Counter(kind for _, kind in turns), len(turns)
    cluster = clusters([episode.task_id for episode, _ in turns], [episode.id for episode, _ in turns])
    return {
        "rate": proportion([kind is not None for _, kind in turns], cluster).to_json(),
        "by_kind": {kind.value: kinds[kind] / n if n else 0.0 for kind in Contradiction},
        "turns": n,
    }
