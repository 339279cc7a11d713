"""Are the users of a dream like those of the log? What people answer, predicted and logged, side by side.

Simulated users differ from people in known ways: they are agreeable, say what nobody asked for, and make up what they
were not told ("easy mode"; tau-bench, arXiv 2406.12045, counts the user's own mistakes among failed dialogues).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from real_envs.calls import parse_calls
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.intervals import clusters, estimate, ratio
from worldmodel.evaluation.transitions import Judged

_AGREES = re.compile(r"(yes|yeah|yep|sure|ok|okay|great|perfect|thanks|thank|fine|absolutely|correct)\b", re.IGNORECASE)
# names, numbers and ids: what one must have been told to say it
_DETAIL = re.compile(r"\b[\w@.-]*\d[\w@.-]*\b|(?<=[a-z,;] )[A-Z][a-z]+\b")


def user_metrics(judged: Sequence[Judged], episodes: Sequence[Trajectory], seed: int) -> dict[str, Any]:
    """How dreamed users differ from logged ones, in answers to the same messages after the same dialogue.

    A user answers an action that calls no tool; in a log without calls there are no users.

    Returns:
        ``{}``, or ``turns`` and, each as ``{"logged", "dreamed", "difference"}`` (estimates; dreamed minus logged, by
        turns): ``words`` a message; ``agrees``, the share that begins with yes, sure, thanks and the like; ``told``,
        names and numbers of what the user was told (``Trajectory.world_facts``) said for the first time; ``invented``,
        the share with a name or number that nobody told the user and nobody has said; ``ends``, the share that ends
        the dialogue. Malformed predictions are left out.
    """
    by_id = {t.id: t for t in episodes}
    if not any(_calls(turn.action) for t in episodes for turn in t.turns):
        return {}
    answered = [j for j in judged if j.predicted is not None and not _calls(j.turn.action)]
    pairs = []
    for j in answered:
        episode = by_id[j.trajectory_id]
        past = episode.turns[: j.index]
        known = _details([episode.start, *(text for t in past for text in (t.action, t.observation)), j.turn.action])
        facts = _details(episode.world_facts)
        assert j.predicted is not None
        answers = ((j.turn.observation, j.turn.terminated), (j.predicted.observation, j.predicted.terminated))
        pairs.append([_measures(text, ends, known, facts) for text, ends in answers])
    if not pairs:
        return {}
    cluster = clusters([j.task_id for j in answered], [j.trajectory_id for j in answered])

    def mean(values: Iterable[float]) -> dict[str, Any]:
        return estimate([(value, 1.0) for value in values], cluster, ratio, seed).to_json()

    return {"turns": len(pairs)} | {
        key: {
            "logged": mean(logged[key] for logged, _ in pairs),
            "dreamed": mean(dreamed[key] for _, dreamed in pairs),
            "difference": mean(dreamed[key] - logged[key] for logged, dreamed in pairs),
        }
        for key in pairs[0][0]
    }


def _measures(text: str, ends: bool, known: set[str], facts: set[str]) -> dict[str, float]:
    new = _details([text]) - known
    return {
        "words": float(len(text.split())),
        "agrees": float(_AGREES.match(text.strip()) is not None),
        "told": float(len(new & facts)),
        "invented": float(bool(new - facts)),
        "ends": float(ends),
    }


def _details(texts: Iterable[str]) -> set[str]:
    return {word.strip(".-").lower() for text in texts for word in _DETAIL.findall(text)}


def _calls(action: str) -> bool:
    try:
        return bool(parse_calls(action))
    except ValueError:
        return False
