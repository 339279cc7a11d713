"""A language model as world model: it writes the next observation and a status line with reward and end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from policy.lm.engine import Completion, Engine, Sampling
from policy.lm.render import ChatFormat, world_model_prompt
from real_envs.trajectory import Trajectory, Turn
from worldmodel.form import Form, WholeText
from worldmodel.world_model import InvalidReason, Prediction, PredictionInvalid


@dataclass(frozen=True, slots=True)
class Written:
    """What the model wrote, token by token, and what it stands for.

    Attributes:
        prompt: the ids that it continued.
        completion: the ids that it wrote, the one that ends them included.
        status: index into them of the first token that reaches into the status line.
        observation, reward, terminated: what was read.
    """

    prompt: tuple[int, ...]
    completion: Completion
    status: int
    observation: str
    reward: float
    terminated: bool


class TextWorldModel:
    """Predicts the next observation as text (Word2World, arXiv 2512.18832, in the chat format of any LM).

    Args:
        engine: where tokens are sampled.
        chat: the model's chat template, cut into token ids.
        version: identifies the weights.
        max_tokens: the longest prediction.
        temperature: 0 predicts the most likely words; 1 samples from the model.
        form: how transitions are written, which must be that of the training rows; by default whole observations.

    Attributes:
        rejected: how often it wrote something that is no prediction, by reason.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        version: str,
        max_tokens: int = 160,
        temperature: float = 0.0,
        form: Form | None = None,
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.version = version
        self.sampling = Sampling(max_tokens=max_tokens, stop=chat.stop, temperature=temperature)
        self.form = form or WholeText()
        self.rejected: Counter[InvalidReason] = Counter()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.engine,)

    def at_temperature(self, temperature: float) -> TextWorldModel:
        """The same model in the same engine, which is dear to start twice."""
        return self._like(temperature, self.form)

    def apart_from(self, episodes: Sequence[Trajectory]) -> TextWorldModel:
        """The same model for judging it by these episodes: it is shown nothing of them."""
        return self._like(self.sampling.temperature, self.form.apart_from(episodes))

    def _like(self, temperature: float, form: Form) -> TextWorldModel:
        return TextWorldModel(self.engine, self.chat, self.version, self.sampling.max_tokens, temperature, form)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        """Predicts what ``action`` does after ``history``.

        The confidence is that of the very tokens that were written. Where several texts stand for one observation, as
        with edits, it is a lower bound.

        Raises:
            PredictionInvalid: the text has no status line, did not end, or is an edit that cannot be applied.
            ContextFull: the history no longer fits the context.
            EngineFailure: generation broke.
        """
        written = await self.write(start, history, action, seed, session)
        logprobs = written.completion.logprobs
        return Prediction(
            observation=written.observation,
            reward=written.reward,
            terminated=written.terminated,
            confidence=math.exp(sum(logprobs)),
            outcome_confidence=math.exp(sum(logprobs[written.status :])),
        )

    async def write(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Written:
        """``predict`` with the tokens; it raises the same."""
        answers, notes = self.form.answers(start, history), self.form.notes(start, history, action)
        prompt = world_model_prompt(self.chat, start, history, action, answers, notes)
        completion = await self.engine.complete(prompt.ids, self.sampling, seed, session)
        try:
            if not completion.stopped:
                limit = self.sampling.max_tokens
                raise PredictionInvalid(f"the prediction did not end within {limit} tokens", InvalidReason.UNFINISHED)
            text = self.chat.decode(completion.ids[:-1])
            observation, reward, terminated = self.form.read(text, start, history)
        except PredictionInvalid as error:
            self.rejected[error.reason] += 1
            raise
        status = self._status_start(completion.ids)
        return Written(tuple(prompt.ids), completion, status, observation, reward, terminated)

    def _status_start(self, ids: Sequence[int]) -> int:
        """Index of the first token whose text reaches into the status line."""
        for start in range(len(ids) - 2, -1, -1):
            if "\n[reward=" in self.chat.decode(ids[start:-1]):
                return start
        return 0

    def release(self, session: object) -> None:
        self.engine.release(session)
