"""Logs of one's own."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from real_envs.errors import UserError
from worldmodel.goal import Goal

if TYPE_CHECKING:
    from real_envs.chat_server import ChatServer


@dataclass
class ChatServerSettings:
    """A server that speaks OpenAI's chat completions.

    Attributes:
        url: of its API, such as http://localhost:8000/v1; empty asks nobody.
        model: its name there.
        key_env: name of the environment variable that holds the key; empty sends none.
        timeout: seconds for one answer.
        retries: further attempts where nobody answers.
    """

    url: str = ""
    model: str = ""
    key_env: str = ""
    timeout: float = 60.0
    retries: int = 2

    def __post_init__(self) -> None:
        if self.retries < 0 or self.timeout <= 0:
            raise ValueError("retries is 0 or more, timeout above 0")

    def open(self, section: str) -> ChatServer:
        """
        Args:
            section: where these settings stand, for messages.

        Raises:
            UserError: the model or its key is missing.
        """
        from real_envs.chat_server import ChatServer

        if not self.model:
            raise UserError(f"{section}.model is missing: the name that the server has for it")
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        if self.key_env and not key:
            raise UserError(f"the environment has no {self.key_env}, which {section}.key_env names")
        return ChatServer(self.url, self.model, key, timeout=self.timeout, retries=self.retries)


@dataclass
class JudgeSettings(ChatServerSettings):
    """A language model that decides success where a log says nothing of it.

    Attributes:
        checked: episodes of known success that it judges first, to measure how often it is right.
        at_once: questions at the same time.
        characters: of an episode that it is shown; what is longer loses its middle.
    """

    checked: int = 50
    at_once: int = 8
    characters: int = 24_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checked < 0 or self.at_once < 1 or self.characters < 100:
            raise ValueError("checked is 0 or more, at_once 1, characters 100 or more")


@dataclass
class RulesSettings(ChatServerSettings):
    """A language model that proposes rules beside those that are counted; they are judged by the same test.

    Attributes:
        questions: how many times it is asked, each time shown other turns that no rule answers.
    """

    questions: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.questions < 1:
            raise ValueError("questions is 1 or more")


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
