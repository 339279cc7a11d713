"""How right is the world model one turn ahead? Its greedy predictions beside what the real world answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from policy.lm.engine import ContextFull, EngineFailure
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn, same_reward
from worldmodel.evaluation.calibration import ece, expected_calibration_error, reliability
from worldmodel.evaluation.intervals import SHARE, Estimate, clusters, estimate, proportion, ratio
from worldmodel.world_model import InvalidReason, Prediction, PredictionInvalid, WorldModel


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


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def audit_metrics(judged: Sequence[Judged]) -> dict[str, float | int | None]:
    """The numbers of the audit card; ``None`` where there was nothing to measure (no reward, none predicted).

    ``exact_match``: observation, reward and end all right. ``reward_precision``: of the turns predicted to pay, how
    many did; ``reward_recall``: of those that paid, how many were predicted to. ``end_accuracy``: the end rightly told.
    Malformed predictions count as wrong everywhere, and as ``invalid``; ``invalid_edit`` of them are rejected edits,
    ``invalid_reasoning`` such whose reasoning did not end.
    """
    rewards = [j.turn.reward or 0.0 for j in judged]
    claimed = [j.predicted.reward if j.predicted else 0.0 for j in judged]
    both = sum(p != 0 and same_reward(p, c) for p, c in zip(rewards, claimed, strict=True))
    n = len(judged)
    ends = sum(j.predicted is not None and j.predicted.terminated == j.turn.terminated for j in judged)
    f1 = sum(token_f1(j.predicted.observation, j.turn.observation) for j in judged if j.predicted)
    confidence = [(j.predicted.confidence, j.exact) for j in judged if j.predicted]
    return {
        "exact_match": _ratio(sum(j.exact for j in judged), n),
        "token_f1": f1 / n if n else None,
        "reward_precision": _ratio(both, sum(c != 0 for c in claimed)),
        "reward_recall": _ratio(both, sum(p != 0 for p in rewards)),
        "end_accuracy": _ratio(ends, n),
        "ece": expected_calibration_error(confidence),
        "invalid": sum(j.predicted is None for j in judged),
        "invalid_edit": sum(j.invalid is InvalidReason.EDIT for j in judged),
        "invalid_reasoning": sum(j.invalid is InvalidReason.REASONING for j in judged),
        "n": n,
    }


async def judge(
    model: WorldModel,
    trajectories: Sequence[Trajectory],
    concurrency: int = 64,
    failed: list[tuple[str, int]] | None = None,
    on_episode: Callable[[Trajectory], None] | None = None,
) -> list[Judged]:
    """Predicts every turn of every episode from its real history: greedily for an audit, sampled as in dreams.

    Turns that no longer fit the model's context, or whose reward nobody measured, are left out. So are those at which
    generation broke (a server that is down, a NaN): they say nothing of what the model knows.

    Args:
        failed: is told the episode and the index of each turn at which generation broke.
        on_episode: is called when an episode is done.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(trajectory: Trajectory) -> list[Judged]:
        judged: list[Judged] = []
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

    return [judged for found in await asyncio.gather(*map(one, trajectories)) for judged in found]


def in_new_situations(
    judged: Sequence[Judged], episodes: Iterable[Trajectory], log: Iterable[Trajectory]
) -> list[Judged]:
    """Those turns that no episode of the log has: the same task, actions so far, and action.

    Episodes that were held out still share their beginnings with those that a model was fitted to, and an expert plays
    the same one again and again. What a model answers there, it may know by heart.

    Args:
        judged: turns of ``episodes``.
        log: what the model was fitted to.
    """
    known = {situation for trajectory in log for situation in _situations(trajectory)}
    new = {(t.id, k) for t in episodes for k, situation in enumerate(_situations(t)) if situation not in known}
    return [j for j in judged if (j.trajectory_id, j.index) in new]


def _situations(trajectory: Trajectory) -> list[tuple[str, ...]]:
    """For each turn the task, its beginning, and all actions up to and with that of the turn."""
    actions = [turn.action for turn in trajectory.turns]
    return [(trajectory.task_id, trajectory.start, *actions[: k + 1]) for k in range(len(actions))]


def _seed(trajectory_id: str, turn: int) -> int:
    """Of its own for each turn: with one for all, a model that samples would make the same choices everywhere."""
    return derive_seed(f"logged turn of {trajectory_id}", turn)


def changed_lines(before: str, after: str) -> int:
    """How many lines were added to or removed from the last observation: the size of the change to be predicted.

    Lines are compared as bags, without white space at their ends. EnvSimBench finds world models right where nothing
    changes and wrong where much does (its "state-change cliff"), which an average hides.
    """
    a, b = (Counter(line.strip() for line in text.splitlines() if line.strip()) for text in (before, after))
    return sum((a - b).values()) + sum((b - a).values())


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
    ``text``). ``token_f1`` counts a malformed prediction as 0. Values are ``Estimate.to_json``.
    """
    f1 = [(token_f1(j.predicted.observation, j.turn.observation) if j.predicted else 0.0, 1.0) for j in judged]
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
    groups: dict[Any, list[Judged]] = {}
    for j in judged:
        groups.setdefault(key(j), []).append(j)
    return {str(name): share(groups[name], [j.exact for j in groups[name]]).to_json() for name in sorted(groups)}


def outcome_metrics(judged: Sequence[Judged], seed: int) -> dict[str, Any]:
    """Precision, recall and accuracy of reward and end, and the calibration of both confidences.

    A reward counts as rightly told where its amount is right. Malformed predictions claim nothing: they cost recall and
    accuracy, and enter no calibration. ``outcome`` calibrates ``outcome_confidence`` against reward and end alone;
    ``deciding`` does so where the prediction pays or ends, which is where the guard of a dream reads it. Values are
    ``Estimate.to_json``; ``reward.by_task`` is by task id.
    """
    readable = [j for j in judged if j.predicted is not None]
    deciding = [j for j in readable if j.predicted and (j.predicted.reward != 0 or j.predicted.terminated)]
    return {
        "reward": {**_reward(judged), "by_task": {task: _reward(some) for task, some in by_task(judged).items()}},
        "end": _end(judged),
        "calibration": {
            "whole": _calibration(readable, "confidence", [j.exact for j in readable], seed),
            "outcome": _calibration(readable, "outcome_confidence", [j.outcome_right for j in readable], seed),
            "deciding": _calibration(deciding, "outcome_confidence", [j.outcome_right for j in deciding], seed),
        },
    }


def by_task(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """The turns of each task, tasks in order of their names."""
    groups: dict[str, list[Judged]] = {}
    for j in judged:
        groups.setdefault(j.task_id, []).append(j)
    return {task: groups[task] for task in sorted(groups)}


def _reward(judged: Sequence[Judged]) -> dict[str, Any]:
    claimed = [j for j in judged if j.predicted is not None and j.predicted.reward != 0]
    rewarded = [j for j in judged if j.turn.reward]
    return {
        "precision": share(claimed, [j.reward_right for j in claimed]).to_json(),
        "recall": share(rewarded, [j.reward_right for j in rewarded]).to_json(),
        "accuracy": share(judged, [j.reward_right for j in judged]).to_json(),
    }


def _end(judged: Sequence[Judged]) -> dict[str, Any]:
    claimed = [j for j in judged if j.predicted is not None and j.predicted.terminated]
    ended = [j for j in judged if j.turn.terminated]
    return {
        "precision": share(claimed, [j.end_right for j in claimed]).to_json(),
        "recall": share(ended, [j.end_right for j in ended]).to_json(),
        "accuracy": share(judged, [j.end_right for j in judged]).to_json(),
    }


def _calibration(judged: Sequence[Judged], attribute: str, right: Sequence[bool], seed: int) -> dict[str, Any]:
    pairs = [(float(getattr(j.predicted, attribute)), r) for j, r in zip(judged, right, strict=True)]
    n = len(pairs)
    return {
        "ece": ece(pairs, cluster_of(judged), seed).to_json(),
        "confidence": sum(c for c, _ in pairs) / n if n else None,
        "right": sum(r for _, r in pairs) / n if n else None,
        "bins": reliability(pairs),
    }
