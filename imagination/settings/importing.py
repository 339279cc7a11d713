"""Logs of one's own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from worldmodel.outcome import Goal


@dataclass
class JudgeSettings:
    """A language model that decides success where a log says nothing of it.

    Attributes:
        url: of a server that speaks OpenAI's chat completions, such as http://localhost:8000/v1; empty asks nobody.
        model: its name there.
        key_env: name of the environment variable that holds the key; empty sends none.
        checked: episodes of known success that it judges first, to measure how often it is right.
        timeout: seconds for one answer.
        retries: further attempts where nobody answers.
        at_once: questions at the same time.
        characters: of an episode that it is shown; what is longer loses its middle.
    """

    url: str = ""
    model: str = ""
    key_env: str = ""
    checked: int = 50
    timeout: float = 60.0
    retries: int = 2
    at_once: int = 8
    characters: int = 24_000

    def __post_init__(self) -> None:
        if self.checked < 0 or self.retries < 0 or self.at_once < 1 or self.timeout <= 0 or self.characters < 100:
            raise ValueError("checked and retries are 0 or more, at_once 1, timeout above 0, characters 100 or more")


@dataclass
class ImportSettings:
    """Logged episodes from files: how they are read, judged, split and masked.

    Attributes:
        format: of the files, the first bare word of the command; auto looks at each.
        files: files and folders, the other bare words.
        agent: who acted, where a record names nobody; clone.agents chooses by it.
        solved_at: total reward from which an episode is solved that does not state success itself; null is unknown.
        judge: decides success where neither the record nor its rewards do.
        goal: decides it by patterns in place of a judge, as worldmodel.goal does in dreams.
        heldout: share of the tasks that nothing is trained on.
        mask: secrets (addresses, keys, tokens, cookies) are masked before anything is stored.
        system: whether system messages of chats belong to what the agent sees at the start.
        mapping: columns of a table by what they are, imports.mapping.action=cmd; also observation, episode, task,
            agent, start, success, reward, done, truncated.
        observation: whether a mapped observation was seen before or after the action beside it.
        reward: whether a mapped reward is what a step earned or the score so far.
        done: whether a mapped done means that the world ended, or only that the episode did (time-outs, too).
        names: of the values of Minari's discrete spaces, imports.names.action=[left,right].
    """

    format: str = "auto"
    files: list[str] = field(default_factory=list)
    agent: str = "log"
    solved_at: float | None = None
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    goal: Goal = field(default_factory=Goal)
    heldout: float = 0.1
    mask: bool = True
    system: bool = True
    mapping: dict[str, str] = field(default_factory=dict)
    observation: Literal["", "before", "after"] = ""
    reward: Literal["step", "cumulative"] = "step"
    done: Literal["terminated", "ended"] = "terminated"
    names: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.heldout < 1:
            raise ValueError(f"heldout is a share of the tasks, 0 or more and below 1, got {self.heldout}")
        if self.solved_at is not None and not math.isfinite(self.solved_at):
            raise ValueError(f"solved_at is a finite number or null, got {self.solved_at}")
