"""How right is the world model one turn ahead? Its greedy predictions beside what the real world answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from policy.lm.engine import ContextFull, EngineFailure
from real_envs.grouping import grouped
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn, same_reward
from worldmodel.evaluation.calibration import ece, expected_calibration_error, reliability
from worldmodel.evaluation.intervals import SHARE, Estimate, clusters, estimate, proportion, ratio
from worldmodel.world_model import InvalidReason, Prediction, PredictionInvalid, WorldModel, lines


@dataclass(frozen=True, slots=True)
class Judged:
    """One turn of a real episode and what the model predicted for it (``None``: nothing that could be parsed)."""

    trajectory_id: str
    index: int
    turn: Turn
    predicted: Prediction | None
    task_id: str = ""
    before: str = ""  # what was seen before the action
    invalid: InvalidReason | None = None  # why nothing could be parsed

    @property
    def text_right(self) -> bool:
        """The stripped observation is right, whatever the reward and the end."""
        return self.predicted is not None and self.predicted.observation.strip() == self.turn.observation.strip()

    @property
    def reward_right(self) -> bool:
        return self.predicted is not None and same_reward(self.predicted.reward, self.turn.reward or 0.0)

    @property
    def end_right(self) -> bool:
        return self.predicted is not None and self.predicted.terminated == self.turn.terminated

    @property
    def exact(self) -> bool:
        """The stripped observation, the reward and the end are all right."""
        return self.text_right and self.outcome_right

    @property
    def outcome_right(self) -> bool:
        """The reward and the end are right, whatever the words."""
        return self.reward_right and self.end_right


def token_f1(predicted: str, true: str) -> float:
    """F1 of the two bags of words, in [0, 1] (SQuAD's definition; Rajpurkar et al. 2016). Both empty count as 1."""
    a, b = Counter(predicted.split()), Counter(true.split())
    if not a and not b:
        return 1.0
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values()))


def _token_f1(judged: Judged) -> float:
    """0 for a malformed prediction."""
    return token_f1(judged.predicted.observation, judged.turn.observation) if judged.predicted else 0.0


def audit_metrics(judged: Sequence[Judged]) -> dict[str, float | int | None]:
    """The numbers of the audit card; ``None`` where there was nothing to measure (no reward, none predicted).

    Malformed predictions count as wrong everywhere, and as ``invalid``; ``invalid_edit`` of them are rejected edits,
    ``invalid_reasoning`` such whose reasoning did not end.
    """
    rewarded = [j for j in judged if j.turn.reward]
    claimed = sum(j.predicted is not None and j.predicted.reward != 0 for j in judged)
    both, n = sum(j.reward_right for j in rewarded), len(judged)

    def share(part: float, whole: int) -> float | None:
        return part / whole if whole else None

    return {
        "exact_match": share(sum(j.exact for j in judged), n),
        "token_f1": share(sum(map(_token_f1, judged)), n),
        "reward_precision": share(both, claimed),
        "reward_recall": share(both, len(rewarded)),
        "end_accuracy": share(sum(j.end_right for j in judged), n),
        "ece": expected_calibration_error([(j.predicted.confidence, j.exact) for j in judged if j.predicted]),
        "invalid": sum(j.predicted is None for j in judged),
        "invalid_edit": sum(j.invalid is InvalidReason.EDIT for j in judged),
        "invalid_reasoning": sum(j.invalid is InvalidReason.REASONING for j in judged),
        "n": n,
    }


async def judge(
    model: WorldModel,
    trajectories: Sequence[Trajectory],
    concurrency: int | None = None,
    failed: list[tuple[str, int]] | None = None,
    on_episode: Callable[[Trajectory], None] | None = None,
) -> list[Judged]:
    """Predicts every turn of every episode from its real history.

    Turns that no longer fit the model's context, or whose answer or reward nobody logged, are left out. So are those
    at which generation broke (a server that is down, a NaN); the episode and index of each are added to ``failed``.
    ``concurrency`` is of episodes: by default as many as the model's engines have slots for, 64 at least.
    """
    slots = [getattr(engine, "slots", 0) for engine in getattr(model, "engines", ())]
    gate = asyncio.Semaphore(concurrency or max([64, *slots]))

    async def judge_episode(trajectory: Trajectory) -> list[Judged]:
        judged: list[Judged] = []
        session = ("audit", trajectory.id)
        async with gate:
            for k, turn in enumerate(trajectory.turns):
                if k < trajectory.prefix_turns or not turn.known:
                    continue
                predicted, reason = None, None
                try:
                    # with one seed for all turns, a model that samples would make the same choices everywhere
                    seed = derive_seed(f"logged turn of {trajectory.id}", k)
                    predicted = await model.predict(trajectory.start, trajectory.turns[:k], turn.action, seed, session)
                except PredictionInvalid as error:
                    reason = error.reason
                except EngineFailure:
                    if failed is not None:
                        failed.append((trajectory.id, k))
                    continue
                except ContextFull:
                    break
                before = trajectory.turns[k - 1].observation if k else trajectory.start
                judged.append(Judged(trajectory.id, k, turn, predicted, trajectory.task_id, before, reason))
            model.release(session)
        if on_episode is not None:
            on_episode(trajectory)
        return judged

    return [turn for turns in await asyncio.gather(*map(judge_episode, trajectories)) for turn in turns]


def in_new_situations(
    judged: Sequence[Judged], episodes: Iterable[Trajectory], log: Iterable[Trajectory]
) -> list[Judged]:
    """Those turns that no episode of the log has: the same task, actions so far, and action.

    Episodes that were held out still share their beginnings with those of ``log`` that a model was fitted to: what it
    answers there, it may know by heart.
    """
    known = {situation for trajectory in log for situation in _situations(trajectory)}
    new = {(t.id, k) for t in episodes for k, situation in enumerate(_situations(t)) if situation not in known}
    return [j for j in judged if (j.trajectory_id, j.index) in new]


def _situations(trajectory: Trajectory) -> list[tuple[str, ...]]:
    """For each turn the task, its beginning, and all actions up to and with that of the turn."""
    actions = [turn.action for turn in trajectory.turns]
    return [(trajectory.task_id, trajectory.start, *actions[: k + 1]) for k in range(len(actions))]


def changed_lines(before: str, after: str) -> int:
    """How many lines were added to or removed from the last observation, as bags, without white space at their ends.

    EnvSimBench finds world models right where nothing changes and wrong where much does ("state-change cliff").
    """
    a, b = lines(before), lines(after)
    return (a - b).total() + (b - a).total()


MANY_CHANGES = 8


def change_size(judged: Judged) -> str:
    """``"0"`` (nothing changed), ``"1"`` to ``"7"``, or ``"8+"`` lines."""
    size = changed_lines(judged.before, judged.turn.observation)
    return str(size) if size < MANY_CHANGES else f"{MANY_CHANGES}+"


def cluster_of(judged: Sequence[Judged]) -> Sequence[str]:
    """By what turns are clustered for their intervals."""
    return clusters([j.task_id for j in judged], [j.trajectory_id for j in judged])


def share(judged: Sequence[Judged], hits: Sequence[bool]) -> Estimate:
    """The share of turns that hit, with the interval of its clusters."""
    return proportion(hits, cluster_of(judged))


def transition_metrics(judged: Sequence[Judged], seed: int) -> dict[str, Any]:
    """Exact match and token F1, in all, by the index of the turn and by the size of the change.

    ``exact``: observation, reward and end (Word2World, arXiv 2512.18832, which judges the observation alone: that is
    ``text``). Values are ``Estimate.to_json``.
    """
    f1 = [(_token_f1(j), 1.0) for j in judged]
    return {
        "n": len(judged),
        "episodes": len({j.trajectory_id for j in judged}),
        "tasks": len({j.task_id for j in judged}),
        "exact": share(judged, [j.exact for j in judged]).to_json(),
        "text": share(judged, [j.text_right for j in judged]).to_json(),
        "token_f1": estimate(f1, cluster_of(judged), ratio, seed, bounds=SHARE).to_json(),
        "malformed": share(judged, [j.predicted is None for j in judged]).to_json(),
        "by_step": _exact_by(judged, lambda j: j.index),
        "by_changes": _exact_by(judged, change_size),
        "by_task": _exact_by(judged, lambda j: j.task_id),
    }


def _exact_by(judged: Sequence[Judged], key: Callable[[Judged], Any]) -> dict[str, Any]:
    groups = sorted(grouped(judged, key).items())
    return {str(name): share(some, [j.exact for j in some]).to_json() for name, some in groups}


def outcome_metrics(judged: Sequence[Judged], seed: int) -> dict[str, Any]:
    """Precision, recall and accuracy of reward and end, and the calibration of both confidences.

    A reward counts as rightly told where its amount is right. Malformed predictions claim nothing: they cost recall and
    accuracy, and enter no calibration. ``outcome`` calibrates ``outcome_confidence`` against reward and end alone;
    ``deciding`` does so where the prediction pays or ends, which is where the guard of a dream reads it. Values are
    ``Estimate.to_json``; ``reward.by_task`` is by task id.
    """
    readable = [j for j in judged if j.predicted is not None]
    deciding = [j for j in readable if j.predicted and (j.predicted.reward != 0 or j.predicted.terminated)]
    by_task = sorted(grouped(judged, lambda j: j.task_id).items())
    return {
        "reward": {**_reward(judged), "by_task": {task: _reward(some) for task, some in by_task}},
        "end": _claim_metrics(judged, lambda p: p.terminated, lambda t: t.terminated, lambda j: j.end_right),
        "calibration": {
            "whole": _calibration(readable, "confidence", [j.exact for j in readable], seed),
            "outcome": _calibration(readable, "outcome_confidence", [j.outcome_right for j in readable], seed),
            "deciding": _calibration(deciding, "outcome_confidence", [j.outcome_right for j in deciding], seed),
        },
    }


def _reward(judged: Sequence[Judged]) -> dict[str, Any]:
    return _claim_metrics(judged, lambda p: p.reward != 0, lambda t: bool(t.reward), lambda j: j.reward_right)


def _claim_metrics(
    judged: Sequence[Judged],
    claims: Callable[[Prediction], bool],
    happens: Callable[[Turn], bool],
    right: Callable[[Judged], bool],
) -> dict[str, Any]:
    """How right claims of one kind are: where it is claimed, where it happens, and anywhere."""
    claimed = [j for j in judged if j.predicted is not None and claims(j.predicted)]
    happened = [j for j in judged if happens(j.turn)]
    sides = {"precision": claimed, "recall": happened, "accuracy": judged}
    return {name: share(some, list(map(right, some))).to_json() for name, some in sides.items()}


def _calibration(judged: Sequence[Judged], attribute: str, right: Sequence[bool], seed: int) -> dict[str, Any]:
    pairs = [(float(getattr(j.predicted, attribute)), r) for j, r in zip(judged, right, strict=True)]
    n = len(pairs)
    return {
        "ece": ece(pairs, cluster_of(judged), seed).to_json(),
        "confidence": sum(c for c, _ in pairs) / n if n else None,
        "right": sum(r for _, r in pairs) / n if n else None,
        "bins": reliability(pairs),
    }
