"""Which transitions fail, and in what way: each wrong prediction in one group, with examples to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from real_envs.trajectory import Trajectory
from worldmodel.evaluation.transitions import Judged, share
from worldmodel.rules.refusals import Refusals

GROUPS = {
    "malformed": "Malformed: nothing that could be read as a prediction",
    "missed_refusal": "Allowed what the world refuses",
    "invented_refusal": "Refused what the world does",
    "other_refusal": "Refused rightly, in the wrong words",
    "reward": "Right words, wrong reward",
    "end": "Right words and reward, wrong end",
    "other_state": "Another state: words that this task has, but not here (a wrong room, a wrong place of a thing)",
    "unseen_words": "Words that no logged turn of this task has",
}


def group(j: Judged, refusals: Refusals, known: set[tuple[str, str]]) -> str | None:
    """The group of a wrong prediction; ``None`` where it is right. ``known``: ``(task, stripped observation)``."""
    if j.predicted is None:
        return "malformed"
    if j.exact:
        return None
    if j.text_right:
        return "end" if j.reward_right else "reward"
    really, believed = refusals.refuses(j.turn.action, j.turn.observation), model_refuses(j, refusals)
    if really and not believed:
        return "missed_refusal"
    if believed and not really:
        return "invented_refusal"
    if believed and really:
        return "other_refusal"
    return "other_state" if (j.task_id, j.predicted.observation.strip()) in known else "unseen_words"


def known_answers(log: Iterable[Trajectory]) -> set[tuple[str, str]]:
    """What each task of a log ever answered."""
    return {(t.task_id, turn.observation.strip()) for t in log for turn in t.turns}


def failure_groups(
    judged: Sequence[Judged],
    episodes: Sequence[Trajectory],
    refusals: Refusals,
    known: set[tuple[str, str]],
    examples: int = 3,
) -> dict[str, Any]:
    """Counts and examples by group, most frequent first.

    ``wrong_reward`` counts, across groups, predictions whose reward is wrong; it is what a policy exploits. Examples of
    a group are of different actions where there are such, the surest first: what the model is sure of no guard catches.
    """
    by_id = {t.id: t for t in episodes}
    groups: dict[str, list[Judged]] = {}
    for j in judged:
        if (name := group(j, refusals, known)) is not None:
            groups.setdefault(name, []).append(j)
    wrong = sum(map(len, groups.values()))
    return {
        "n": len(judged),
        "wrong": wrong,
        "wrong_reward": sum(not j.reward_right for j in judged),
        "groups": [
            {
                "group": name,
                "title": GROUPS[name],
                "n": len(some),
                "share_of_wrong": len(some) / wrong,
                "examples": [_example(j, by_id) for j in _different(some, examples)],
            }
            for name, some in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        ],
    }


def _different(some: Sequence[Judged], limit: int) -> list[Judged]:
    surest = sorted(some, key=lambda j: (-(j.predicted.confidence if j.predicted else 0.0), j.trajectory_id, j.index))
    first: dict[tuple[str, str], Judged] = {}
    for j in surest:
        first.setdefault((j.task_id, j.turn.action), j)
    return list(first.values())[:limit]


def _example(j: Judged, by_id: dict[str, Trajectory]) -> dict[str, Any]:
    return {
        "episode": j.trajectory_id,
        "task": j.task_id,
        "turn": j.index,
        "actions_before": [turn.action for turn in by_id[j.trajectory_id].turns[: j.index]],
        "action": j.turn.action,
        "real": _fields(j.turn, *_ANSWER),
        "predicted": j.predicted and _fields(j.predicted, *_ANSWER, "confidence", "outcome_confidence"),
    }


_ANSWER = ("observation", "reward", "terminated")


def _fields(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def refusal_metrics(judged: Sequence[Judged], refusals: Refusals) -> dict[str, Any]:
    """How often the model refuses what was refused (in whatever words, or in the right ones), and accepts the rest.

    Malformed predictions do neither.
    """
    no = [j for j in judged if refusals.refuses(j.turn.action, j.turn.observation)]
    yes = [j for j in judged if not refusals.refuses(j.turn.action, j.turn.observation)]
    return {
        "patterns": len(refusals.patterns),
        "refused_too": share(no, [model_refuses(j, refusals) is True for j in no]).to_json(),
        "refused_in_its_words": share(no, [j.text_right for j in no]).to_json(),
        "accepted_too": share(yes, [model_refuses(j, refusals) is False for j in yes]).to_json(),
    }


def model_refuses(j: Judged, refusals: Refusals) -> bool | None:
    """Whether the prediction refuses; ``None`` where it is malformed."""
    return None if j.predicted is None else refusals.refuses(j.turn.action, j.predicted.observation)
