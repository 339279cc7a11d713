"""Supervised episodes made of the log, beside it: reflections and relabelled failures, for ``clone.supplements``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass
class ReflectSettings:
    """Reflections: before an expert's action, what others would have done by the world model, and what it did.

    Attributes:
        agents: whose actions are the right ones, by the beginning of their names; none takes all experts of the log.
        proposer: a policy of the run, such as policy-clone, that proposes other actions; empty takes what other logged
            episodes of the task did.
        alternatives: other actions that are tried in the world model, for each turn.
        min_confidence: a predicted outcome that is less likely than this is left out.
        words: of an outcome that a reflection repeats, at most.
    """

    agents: list[str] = field(default_factory=list)
    proposer: str = ""
    alternatives: int = 2
    min_confidence: float = 0.5
    words: int = 8

    def __post_init__(self) -> None:
        if self.alternatives < 1 or self.words < 1:
            raise ValueError("alternatives and words must be at least 1")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence must lie in [0, 1], got {self.min_confidence}")


@dataclass
class HindsightSettings:
    """Failed episodes, retold with a goal that they did reach.

    Attributes:
        goals: pairs of a regular expression that is searched in an observation, and the goal that was reached where it
            is found; groups may be named, such as [["You open the (.+?)[.,]", "Open the \\1."]].
        place: a regular expression of the goal in the start, which the other goal replaces.
        max_turns: a goal that took longer is not taken; 0 is without bound.
    """

    goals: list[list[str]] = field(default_factory=list)
    place: str = r"\A[^\n]*"
    max_turns: int = 0

    def __post_init__(self) -> None:
        if any(len(pair) != 2 for pair in self.goals):
            raise ValueError(f"goals are pairs of a pattern and a goal, got {self.goals}")
        if self.max_turns < 0:
            raise ValueError(f"max_turns must be 0 (without bound) or more, got {self.max_turns}")
        try:
            for pattern, goal in self.goals:
                re.compile(rf"(?:{pattern})|").match("").expand(goal)  # type: ignore[union-attr]  # matches always
            re.compile(self.place)
        except (re.error, IndexError) as error:
            raise ValueError(f"goals or place: {error}") from error
