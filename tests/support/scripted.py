"""An engine and a world model whose answers are given."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from policy.lm.engine import Completion, Sampling
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Turn
from worldmodel.world_model import Prediction

CHAT = ChatFormat(train_tokenizer(["-= Hall =-"], 270))


class Says:
    """An engine that writes the given text, each token with probability 1/2, and notes its prompts."""

    context, version = 4096, 0

    def __init__(self, *texts: str) -> None:
        self.texts, self.prompts = list(texts), []  # type: ignore[var-annotated]

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        self.prompts.append(list(ids))
        written = CHAT.encode(self.texts.pop(0))
        if len(written) + 1 > sampling.max_tokens:
            return Completion(written[: sampling.max_tokens], (math.log(0.5),) * sampling.max_tokens, False)
        return Completion((*written, CHAT.stop), (math.log(0.5),) * (len(written) + 1), True)

    def release(self, session: Hashable) -> None: ...

    def update_weights(self) -> None: ...


def says(observation: str, confidence: float = 0.9, reward: float = 0.0, sure: float = 1.0) -> Prediction:
    return Prediction(observation, reward, False, confidence, sure)


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
