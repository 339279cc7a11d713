"""Where logged episodes come from: the real environment, its tasks, scripted agents, and imported files."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from imagination.settings.schema import require
from real_envs.errors import UserError
from worldmodel.rewards import Goal

if TYPE_CHECKING:
    from real_envs.chat_server import ChatServer


@dataclass
class EnvSettings:
    """The real environment; env=textworld_express is short for all of it."""

    #: of the environment, such as textworld; packages add their own (entry point imagination.envs)
    name: str = "textworld"
    price: float = 0.0  #: of a real step, in any currency; 0 is none. Changes only what the report says
    #: of that environment, such as env.options.game=twc; see its file in configs/env/
    options: dict[str, str | int | float | bool] = field(default_factory=dict)


@dataclass
class GamesSettings:
    """How many tasks (games) to generate. Every seed of a run has its own."""

    train: int = 6  #: training tasks, to log, dream and evaluate in
    heldout: int = 6  #: held-out tasks, never trained on
    #: held-out tasks that stay the same for all seeds: a name in configs/panels, or a file that `imagine panel` wrote;
    #: empty draws games.heldout tasks by the seed
    panel: str = ""
    #: a run in whose training tasks a policy was trained: training tasks are drawn in proportion to how often it fails
    #: where the parameters are theirs (EnvGen), of four times as many; empty draws them uniformly
    focus: str = ""
    rooms: int = 3  #: of a TextWorld game
    objects: int = 5  #: of a TextWorld game, distractors included
    quest_length: int = 5  #: commands of the shortest solution of a TextWorld game; the goal names only the last


@dataclass
class CollectSettings:
    """The log: episodes of scripted agents of many skills in the real environment."""

    episodes: int = 800  #: per training task
    #: training tasks that are played, the first ones; of others the log has what a reset shows, and they are dreamed as
    #: well. 0 is all
    tasks: int = 0
    heldout_episodes: int = 10  #: per held-out task, only to evaluate the world model there
    max_turns: int = 12  #: turn limit of a logged episode
    validation: float = 0.05  #: share of the episodes of training tasks that no model trains on
    workers: int = 4  #: processes that play real episodes, for every stage

    def __post_init__(self) -> None:
        require(self, "1 or more", "max_turns", "workers")
        require(self, "in [0, 1)", "validation")


@dataclass
class ChatServerSettings:
    """A server with OpenAI's chat completions API."""

    url: str = ""  #: of its API, such as http://localhost:8000/v1; empty uses no server
    model: str = ""  #: its name on the server
    key_env: str = ""  #: environment variable that holds the API key; empty sends none
    timeout: float = 60.0  #: seconds for one answer
    retries: int = 2  #: further attempts where the server does not answer

    def __post_init__(self) -> None:
        require(self, "above 0", "timeout")

    def open(self, section: str) -> ChatServer:
        """Raises ``UserError``: the model or its key is missing, which belongs into ``section``."""
        from real_envs.chat_server import ChatServer

        if not self.model:
            raise UserError(f"{section}.model is missing: the name that the server has for it")
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        if self.key_env and not key:
            raise UserError(f"the environment has no {self.key_env}, which {section}.key_env names")
        return ChatServer(self.url, self.model, key, timeout=self.timeout, retries=self.retries)


@dataclass
class JudgeSettings(ChatServerSettings):
    """A language model that labels success where a log does not state it."""

    checked: int = 50  #: episodes of known success that it labels first, to measure its accuracy
    at_once: int = 8  #: concurrent requests
    characters: int = 24_000  #: of an episode in the prompt; longer episodes lose their middle

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "1 or more", "at_once")
        if self.characters < 100:
            raise ValueError(f"characters must be 100 or more, got {self.characters}")


@dataclass
class RulesSettings(ChatServerSettings):
    """A language model that proposes rules beside the mined ones; both must pass the same test."""

    questions: int = 6  #: number of requests, each with other turns that no rule explains

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "1 or more", "questions")


@dataclass
class LearnExperienceSettings(ChatServerSettings):
    """A language model that compares groups of episodes and writes experiences for the policy's prompt.

    Without a url, the action that most sets the best episodes of a group apart is one.
    """

    policy: str = "policy-clone"  #: folder under models/ of the policy that plays
    world: Literal["dream", "real"] = "dream"  #: where it plays, at most dream.max_turns turns an episode
    rounds: int = 3  #: over all tasks; each is played with the experiences of the rounds before
    group_size: int = 5  #: episodes per task and round, which are compared with each other
    tasks: int = 0  #: training tasks, at most, the first ones; 0 is all
    entries: int = 16  #: experiences, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "1 or more", "rounds", "group_size", "entries")


@dataclass
class ImportSettings:
    """Logged episodes from files: how they are read, labelled, split and masked."""

    format: str = "auto"  #: of the files, the first bare word of the command; auto detects it for each file
    files: list[str] = field(default_factory=list)  #: files and folders, the other bare words
    agent: str = "log"  #: name of the agent where a record has none; clone.agents selects by it
    solved_at: float | None = None  #: return from which an episode without a success label is solved; null is unknown
    #: labels success where neither the record nor its rewards do
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    #: labels success by patterns, without a judge, as worldmodel.goal does in dreams
    goal: Goal = field(default_factory=Goal)
    heldout: float = 0.1  #: share of the tasks that is never trained on
    mask: bool = True  #: mask secrets (addresses, keys, tokens, cookies) before anything is stored
    system: bool = True  #: whether system messages of chats are part of the first observation
    #: columns of a table by meaning, imports.mapping.action=cmd; also observation, episode, task, agent, start,
    #: success, reward, done, truncated
    mapping: dict[str, str] = field(default_factory=dict)
    #: whether a mapped observation was seen before or after the action beside it
    observation: Literal["", "before", "after"] = ""
    reward: Literal["step", "cumulative"] = "step"  #: whether a mapped reward is that of the step or cumulative
    #: whether a mapped done means that the environment terminated, or any end of the episode (time-outs, too)
    done: Literal["terminated", "ended"] = "terminated"
    #: of the values of Minari's discrete spaces, imports.names.action=[left,right]
    names: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self, "in [0, 1)", "heldout")
        if self.solved_at is not None and not math.isfinite(self.solved_at):
            raise ValueError(f"solved_at is a finite number or null, got {self.solved_at}")
