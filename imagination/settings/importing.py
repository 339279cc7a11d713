"""Logs of one's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class ImportSettings:
    """Logged episodes from files: how they are read, judged, split and masked.

    Attributes:
        format: of the files, the first bare word of the command; auto looks at each.
        files: files and folders, the other bare words.
        agent: who acted, where a record names nobody; clone.agents chooses by it.
        solved_at: total reward from which an episode is solved that does not state success itself; null is unknown.
        heldout: share of the tasks that nothing is trained on.
        mask: secrets (addresses, keys, tokens, cookies) are masked before anything is stored.
        system: whether system messages of chats belong to what the agent sees at the start.
        mapping: columns of a table by what they are, imports.mapping.action=cmd; also observation, episode, task,
            agent, start, success, reward, done, truncated.
        observation: whether a mapped observation was seen before or after the action beside it.
        reward: whether a mapped reward is what a step earned or the score so far.
        done: whether a mapped done means that the world ended, or only that the episode did (time-outs, too).
    """

    format: str = "auto"
    files: list[str] = field(default_factory=list)
    agent: str = "log"
    solved_at: float | None = None
    heldout: float = 0.1
    mask: bool = True
    system: bool = True
    mapping: dict[str, str] = field(default_factory=dict)
    observation: Literal["", "before", "after"] = ""
    reward: Literal["step", "cumulative"] = "step"
    done: Literal["terminated", "ended"] = "terminated"

    def __post_init__(self) -> None:
        if not 0 <= self.heldout < 1:
            raise ValueError(f"heldout is a share of the tasks, 0 or more and below 1, got {self.heldout}")
