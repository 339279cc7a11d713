"""Does it pay and end rightly, and does it know when? What a policy that trains inside it will seek out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worldmodel.evaluation.confidence import ece, reliability
from worldmodel.evaluation.transitions import Judged, cluster_of, share


def outcome_metrics(judged: Sequence[Judged], seed: int) -> dict[str, Any]:
    """Precision, recall and accuracy of reward and end, and the calibration of both confidences.

    A reward counts as rightly told where its amount is right. Malformed predictions claim nothing: they cost recall and
    accuracy, and enter no calibration. ``outcome`` calibrates ``outcome_confidence`` against reward and end alone;
    ``deciding`` does so where the prediction pays or ends, which is where the guard of a dream reads it. Values are
    ``Estimate.to_json``; ``reward.by_task`` is by task id.
    """
    told = [j for j in judged if j.predicted is not None]
    deciding = [j for j in told if j.predicted and (j.predicted.reward != 0 or j.predicted.terminated)]
    return {
        "reward": {**_reward(judged), "by_task": {task: _reward(some) for task, some in by_task(judged).items()}},
        "end": _end(judged),
        "calibration": {
            "whole": _calibration(told, "confidence", [j.exact for j in told], seed),
            "outcome": _calibration(told, "outcome_confidence", [j.outcome_right for j in told], seed),
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
    paid = [j for j in judged if j.turn.reward]
    return {
        "precision": share(claimed, [j.reward_right for j in claimed]).to_json(),
        "recall": share(paid, [j.reward_right for j in paid]).to_json(),
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
