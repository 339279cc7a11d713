"""How much of a language the models must speak: the length of what they write, and how new other tasks' words are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from policy.lm.render import ChatFormat
from real_envs.trajectory import Trajectory
from worldmodel.formats.full import FullObservation, TransitionFormat

_WORD = re.compile(r"\w+")


def language_metrics(
    chat: ChatFormat, log: Sequence[Trajectory], elsewhere: Sequence[Trajectory], form: TransitionFormat | None = None
) -> dict[str, Any]:
    """Tokens of an action and of an observation of the log, and how many observations elsewhere have an unread word.

    ``{"tokens_per_action": 3.1, "tokens_per_observation": 41.0, "tokens_per_prediction": 12.5, "unread_words": 0.04,
    "n": 1825}``: of 1,825 observations of other tasks, 4 % hold a word that the log never had. One action a token is a
    table, no language. A prediction is what the world model writes for a turn in its form, reward and end included:
    whole texts or edits.
    """
    form = form or FullObservation()
    turns = [turn for episode in log for turn in episode.turns]
    read = {word for e in log for text in (e.start, *_texts(e)) for word in _words(text)}
    there = [turn.observation for episode in elsewhere for turn in episode.turns]
    lengths: dict[str, int] = {}

    def tokens(text: str) -> int:
        if text not in lengths:
            lengths[text] = len(chat.encode(text))
        return lengths[text]

    return {
        "tokens_per_action": _mean([tokens(turn.action) for turn in turns]),
        "tokens_per_observation": _mean([tokens(turn.observation) for turn in turns]),
        "tokens_per_prediction": _mean([tokens(text) for e in log for text in form.answers(e.start, e.turns)]),
        "unread_words": _mean([not _words(text) <= read for text in there]),
        "n": len(there),
    }


def _texts(episode: Trajectory) -> list[str]:
    return [text for turn in episode.turns for text in (turn.action, turn.observation)]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
