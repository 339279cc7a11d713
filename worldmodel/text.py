"""A language model as world model: it writes the next observation and a status line with reward and end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policy.lm.engine import Engine, Sampling
from policy.lm.render import ChatFormat, parse_prediction, world_model_prompt
from real_envs.trajectory import Turn
from worldmodel.world_model import Prediction, PredictionInvalid


class TextWorldModel:
    """Predicts the whole next observation as text (Word2World, arXiv 2512.18832, in the chat format of any LM).

    Args:
        engine: where tokens are sampled.
        chat: the model's chat template, cut into token ids.
        version: identifies the weights.
        max_tokens: the longest prediction.
        temperature: 0 predicts the most likely words; 1 samples from the model.
    """

    def __init__(
        self, engine: Engine, chat: ChatFormat, version: str, max_tokens: int = 160, temperature: float = 0.0
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.version = version
        self.sampling = Sampling(max_tokens=max_tokens, stop=chat.stop, temperature=temperature)

    def at_temperature(self, temperature: float) -> TextWorldModel:
        """The same model in the same engine, which is dear to start twice."""
        return TextWorldModel(self.engine, self.chat, self.version, self.sampling.max_tokens, temperature)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        """Predicts what ``action`` does after ``history``.

        Raises:
            PredictionInvalid: the text has no status line or did not end.
            ContextFull: the history no longer fits the context.
            EngineFailure: generation broke.
        """
        prompt = world_model_prompt(self.chat, start, history, action)
        completion = await self.engine.complete(prompt.ids, self.sampling, seed, session)
        if not completion.stopped:
            raise PredictionInvalid(f"the prediction did not end within {self.sampling.max_tokens} tokens")
        text = self.chat.decode(completion.ids[:-1])
        parsed = parse_prediction(text)
        if parsed is None:
            raise PredictionInvalid(f"no status line such as [reward=0] at the end of {text[-60:]!r}")
        observation, reward, terminated = parsed
        return Prediction(
            observation=observation,
            reward=reward,
            terminated=terminated,
            confidence=math.exp(sum(completion.logprobs)),
            outcome_confidence=math.exp(sum(completion.logprobs[self._status_start(completion.ids) :])),
        )

    def _status_start(self, ids: Sequence[int]) -> int:
        """Index of the first token whose text reaches into the status line."""
        for start in range(len(ids) - 2, -1, -1):
            if "\n[reward=" in self.chat.decode(ids[start:-1]):
                return start
        return 0

    def release(self, session: object) -> None:
        self.engine.release(session)
