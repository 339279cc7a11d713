"""Engines and world models whose answers are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import cycle
from typing import Any

from policy.lm.engine import Completion, Sampling
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Observation, Trajectory, Turn
from worldmodel.world_model import Prediction

CHAT = ChatFormat(train_tokenizer(["-= Hall =-"], 270))


class Says:
    """An engine that writes the given texts, each token with probability 1/2, and notes what it was asked."""

    context, version = 4096, 0

    def __init__(self, *texts: str, chat: ChatFormat = CHAT) -> None:
        self.texts, self.chat, self.prompts, self.limits = list(texts), chat, list[list[int]](), set[int]()

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        self.prompts.append(list(ids))
        self.limits.add(sampling.max_tokens)
        written = (*self.chat.encode(self.texts.pop(0)), self.chat.stop)[: sampling.max_tokens]
        return Completion(written, (math.log(0.5),) * len(written), written[-1] == self.chat.stop)

    def release(self, session: Hashable) -> None: ...

    def update_weights(self) -> None: ...


class Acts:
    """An agent that does the same actions over and over, in each episode from the first one on."""

    name = "script"

    def __init__(self, *actions: str) -> None:
        self._actions, self._next = actions, cycle(actions)

    def start(self, observation: Observation, seed: int) -> Acts:
        return Acts(*self._actions)

    async def act(self) -> str:
        return next(self._next)

    def observe(self, observation: Observation) -> None: ...

    def trace(self) -> None: ...

    def close(self) -> None: ...


def says(observation: str, confidence: float = 0.9, reward: float = 0.0, sure: float = 1.0) -> Prediction:
    return Prediction(observation, reward, False, confidence, sure)


class Answering:
    """A world model that answers by a function of the observations so far and the action; notes what it is asked."""

    version, temperature, engines = "answering", 1.0, ()

    def __init__(self, answer: Callable[[tuple[str, ...], str], Prediction | Exception]) -> None:
        self.answer = answer
        self.asked, self.released = list[tuple[str, tuple[str, ...], str]](), list[object]()

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        seen = tuple(turn.observation for turn in history)
        self.asked.append((start, seen, action))
        found = self.answer(seen, action)
        if isinstance(found, Exception):
            raise found
        return found

    def at_temperature(self, temperature: float) -> Any:
        return self

    def excluding(self, episodes: Sequence[Trajectory]) -> Any:
        return self

    def release(self, session: object) -> None:
        self.released.append(session)


class Table:
    """A world model that knows what some actions do, and of all others the same; notes what it is asked."""

    version = "table"

    def __init__(self, answers: dict[str, Prediction | Exception], other: str = "Nothing.") -> None:
        self.answers, self.asked, self.released = answers, list[tuple[int, str]](), list[object]()
        self.other = says(other)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        self.asked.append((len(history), action))
        found = self.answers.get(action, self.other)
        if isinstance(found, Exception):
            raise found
        return found

    def release(self, session: object) -> None:
        self.released.append(session)
