"""How right is the world model? Its greedy predictions beside what the real world answered."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from policy.lm.engine import ContextFull, EngineFailure
from real_envs.trajectory import Trajectory, Turn
from worldmodel.world_model import InvalidReason, Prediction, PredictionInvalid, WorldModel


@dataclass(frozen=True, slots=True)
class Judged:
    """One turn of a real episode and what the model predicted for it (``None``: nothing that could be parsed)."""

    trajectory_id: str
    index: int
    turn: Turn
    predicted: Prediction | None
    invalid: InvalidReason | None = None  # why nothing could be parsed; None also where generation broke

    @property
    def exact(self) -> bool:
        """The stripped observation, the reward and the end are all right."""
        p = self.predicted
        return (
            p is not None
            and p.observation.strip() == self.turn.observation.strip()
            and _same_reward(p.reward, self.turn.reward or 0.0)
            and p.terminated == self.turn.terminated
        )

    @property
    def outcome_right(self) -> bool:
        """The reward and the end are right, whatever the words."""
        p = self.predicted
        return (
            p is not None and _same_reward(p.reward, self.turn.reward or 0.0) and p.terminated == self.turn.terminated
        )


def _same_reward(a: float, b: float) -> bool:
    return abs(a - b) < 1e-5  # a status line keeps six decimals: 1/3 is written, and at best predicted, as 0.333333


def token_f1(predicted: str, true: str) -> float:
    """F1 of the two bags of words, in [0, 1] (SQuAD's definition; Rajpurkar et al. 2016). Both empty count as 1."""
    a, b = Counter(predicted.split()), Counter(true.split())
    if not a and not b:
        return 1.0
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values()))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def audit_metrics(judged: Sequence[Judged]) -> dict[str, float | int | None]:
    """The numbers of the audit card; ``None`` where there was nothing to measure (no reward, none predicted).

    ``exact_match``: observation, reward and end all right. ``reward_precision``: of the turns predicted to pay, how
    many did; ``reward_recall``: of those that paid, how many were predicted to. ``end_accuracy``: the end rightly told.
    Malformed predictions count as wrong everywhere, and as ``invalid``; ``invalid_edit`` of them are rejected edits.
    """
    paid = [j.turn.reward or 0.0 for j in judged]
    claimed = [j.predicted.reward if j.predicted else 0.0 for j in judged]
    both = sum(p != 0 and _same_reward(p, c) for p, c in zip(paid, claimed, strict=True))
    n = len(judged)
    ends = sum(j.predicted is not None and j.predicted.terminated == j.turn.terminated for j in judged)
    f1 = sum(token_f1(j.predicted.observation, j.turn.observation) for j in judged if j.predicted)
    confidence = [(j.predicted.confidence, j.exact) for j in judged if j.predicted]
    return {
        "exact_match": _ratio(sum(j.exact for j in judged), n),
        "token_f1": f1 / n if n else None,
        "reward_precision": _ratio(both, sum(c != 0 for c in claimed)),
        "reward_recall": _ratio(both, sum(p != 0 for p in paid)),
        "end_accuracy": _ratio(ends, n),
        "ece": expected_calibration_error(confidence),
        "invalid": sum(j.predicted is None for j in judged),
        "invalid_edit": sum(j.invalid is InvalidReason.EDIT for j in judged),
        "n": n,
    }


def expected_calibration_error(pairs: Sequence[tuple[float, bool]], bins: int = 10) -> float | None:
    """Mean gap between confidence and accuracy over equal-width bins, weighted by size (Naeini et al. 2015)."""
    if not pairs:
        return None
    groups: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for confidence, right in pairs:
        groups[min(int(confidence * bins), bins - 1)].append((confidence, right))
    gap = sum(abs(sum(c for c, _ in g) - sum(r for _, r in g)) for g in groups if g)
    return gap / len(pairs)


async def judge(model: WorldModel, trajectories: Sequence[Trajectory], concurrency: int = 64) -> list[Judged]:
    """Predicts every turn of every episode from its real history: greedily for an audit, sampled as in dreams.

    Turns that no longer fit the model's context, or whose reward nobody measured, are left out.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(trajectory: Trajectory) -> list[Judged]:
        found: list[Judged] = []
        session = ("audit", trajectory.id)
        async with gate:
            for k, turn in enumerate(trajectory.turns):
                if k < trajectory.prefix_turns or turn.reward is None:
                    continue
                predicted, reason = None, None
                try:
                    predicted = await model.predict(
                        trajectory.start, trajectory.turns[:k], turn.action, _seed(trajectory.id, k), session
                    )
                except PredictionInvalid as error:
                    reason = error.reason
                except EngineFailure:
                    pass
                except ContextFull:
                    break
                found.append(Judged(trajectory.id, k, turn, predicted, reason))
            model.release(session)
        return found

    return [judged for found in await asyncio.gather(*map(one, trajectories)) for judged in found]


def _seed(trajectory_id: str, turn: int) -> int:
    """Of its own for each turn: with one for all, a model that samples would make the same choices everywhere."""
    return zlib.crc32(f"{trajectory_id}/{turn}".encode())
