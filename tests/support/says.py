"""An engine that says what it is told to."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from policy.lm.engine import Completion, Sampling
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer

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
