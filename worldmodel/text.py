"""A language model as world model: it writes the next observation and a status line with reward and end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policy.lm.engine import Completion, Engine, Sampling
from policy.lm.render import ChatFormat
from real_envs.trajectory import Trajectory, Turn
from worldmodel.formats.full import FullObservation, TransitionFormat, prompt_tokens
from worldmodel.formats.reasoning import split_reasoning
from worldmodel.world_model import InvalidReason, Prediction, PredictionInvalid


@dataclass(frozen=True, slots=True)
class ParsedPrediction:
    """A prediction with its tokens."""

    prompt: tuple[int, ...]  # the ids before it: those that the model continued, and its reasoning where it reasons
    completion: Completion
    status_start: int  # index into them of the first token that reaches into the status line
    prediction: Prediction
    begun: int = 0  # of these tokens, those of a given opening, which nobody had to find likely


def parse_completion(
    chat: ChatFormat,
    form: TransitionFormat,
    prompt: Sequence[int],
    completion: Completion,
    start: str,
    history: Sequence[Turn],
    max_tokens: int,
) -> ParsedPrediction:
    """Reads a completion of a prompt of ``form``.

    Raises:
        PredictionInvalid: the reasoning or the prediction did not end within its limit, or the format cannot read it.
    """
    ids = completion.ids[:-1] if completion.stopped else completion.ids
    split = split_reasoning(chat, ids, form.reasoning_tokens) if form.reasoning_tokens else None
    begin = split.begin if split else 0
    if not completion.stopped or len(completion.ids) - begin > max_tokens:
        raise PredictionInvalid(f"the prediction did not end within {max_tokens} tokens", InvalidReason.UNFINISHED)
    observation, reward, terminated = form.read(split.prediction if split else chat.decode(ids), start, history)
    own = replace(completion, ids=completion.ids[begin:], logprobs=completion.logprobs[begin:])
    status = _status_start(chat, own.ids)
    prediction = Prediction(
        observation=observation,
        reward=reward,
        terminated=terminated,
        confidence=math.exp(sum(own.logprobs)),
        outcome_confidence=math.exp(sum(own.logprobs[status:])),
        reasoning=split.reasoning if split else None,
    )
    return ParsedPrediction((*prompt, *completion.ids[:begin]), own, status, prediction)


def _status_start(chat: ChatFormat, ids: Sequence[int]) -> int:
    """The first token whose text reaches into the status line."""
    for start in range(len(ids) - 2, -1, -1):
        if "\n[reward=" in chat.decode(ids[start:-1]):
            return start
    return 0


class TextWorldModel:
    """Predicts the next observation as text (Word2World, arXiv 2512.18832), in the chat format of any LM.

    Args:
        max_tokens: the longest prediction; a reasoning before it has the limit of its format.
        form: how transitions are written, as in the training rows; by default whole observations.

    Attributes:
        rejected: number of texts that were no predictions, by reason.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        version: str,
        max_tokens: int = 160,
        temperature: float = 0.0,
        form: TransitionFormat | None = None,
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.version = version
        self.form = form or FullObservation()
        self.max_tokens = max_tokens
        self.sampling = Sampling(max_tokens + self.form.reasoning_tokens, chat.stop, temperature)
        self.rejected: Counter[InvalidReason] = Counter()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.engine,)

    @property
    def temperature(self) -> float:
        return self.sampling.temperature

    def at_temperature(self, temperature: float) -> TextWorldModel:
        return self._like(temperature, self.form)

    def excluding(self, episodes: Sequence[Trajectory]) -> TextWorldModel:
        return self._like(self.sampling.temperature, self.form.excluding(episodes))

    def _like(self, temperature: float, form: TransitionFormat) -> TextWorldModel:
        return type(self)(self.engine, self.chat, self.version, self.max_tokens, temperature, form)

    @property
    def continues(self) -> bool:
        """Whether its answer can be made to begin with given words, as it can for whole observations."""
        return isinstance(self.form, FullObservation)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None, opening: str = ""
    ) -> Prediction:
        """Predicts what ``action`` does after ``history``.

        With an ``opening`` the observation begins with these words, and the confidence is that of the rest given them.

        The confidence is the probability of the tokens that were written. Where several texts stand for one
        observation, as with edits, it is a lower bound. Where the model reasons first, it is conditional on the
        sampled reasoning, p(o, r, e | reasoning), however unlikely or wrong that is.

        Raises:
            PredictionInvalid: the text has no status line, did not end, or is an edit that cannot be applied; or its
                reasoning did not end.
            ContextFull: the history no longer fits the context.
            EngineFailure: generation broke.
        """
        return (await self.write(start, history, action, seed, session, opening)).prediction

    async def write(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None, opening: str = ""
    ) -> ParsedPrediction:
        """``predict`` with the tokens; it raises the same."""
        prompt = prompt_tokens(self.chat, self.form, start, history, action).ids
        begun = tuple(self.chat.encode(opening)) if opening else ()
        answer = await self.engine.complete((*prompt, *begun), self.sampling, seed, session)
        if begun:
            answer = replace(answer, ids=(*begun, *answer.ids), logprobs=(*[0.0] * len(begun), *answer.logprobs))
        return replace(self._parsed(prompt, answer, start, history), begun=len(begun))

    def _parsed(
        self, prompt: Sequence[int], completion: Completion, start: str, history: Sequence[Turn]
    ) -> ParsedPrediction:
        try:
            return parse_completion(self.chat, self.form, prompt, completion, start, history, self.max_tokens)
        except PredictionInvalid as error:
            self.rejected[error.reason] += 1
            raise

    def release(self, session: object) -> None:
        self.engine.release(session)
