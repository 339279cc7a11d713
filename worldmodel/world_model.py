"""The protocol of a world model: history and action in, next observation, reward and end out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from real_envs.trajectory import Trajectory, Turn

if TYPE_CHECKING:  # settings are read before anything heavy is imported
    from policy.lm.engine import Engine


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model predicts an action does."""

    observation: str
    reward: float
    terminated: bool
    confidence: float  # probability, under the model, of exactly this observation, reward and end, in (0, 1]
    outcome_confidence: float  # probability of this reward and end, given the observation, in (0, 1]
    # of the members of an ensemble on it, in nats, 0 where they agree (see ``EnsembleWorldModel``); ``None`` where
    # there is one model only
    disagreement: float | None = None
    # who decided reward and end: the model, a declared goal or the world itself, a mined rule, or the log of the task
    outcome_by: Literal["model", "predicate", "rule", "log"] = "model"
    # what the model wrote before the prediction, for people to read; ``None`` where it does not reason. Both
    # confidences are conditional on it, and do not include its own probability.
    reasoning: str | None = None
    rule: str | None = None  # the rule that answered in place of the model, in words (see ``RuledWorldModel``)
    # words of it were changed, because they broke an invariant. Both confidences are those of the answer before the
    # change.
    mended: bool = False
    resampled: int = 0  # how many answers were discarded before this one, because they broke an invariant
    broken: tuple[str, ...] = ()  # the invariants that it still breaks, in words

    def record(self) -> dict[str, float | str | bool]:
        """``Turn.info`` of the turn."""
        info: dict[str, float | str | bool] = {
            "confidence": self.confidence,
            "outcome_confidence": self.outcome_confidence,
            "outcome_by": self.outcome_by,
        }
        if self.disagreement is not None:
            info["disagreement"] = self.disagreement
        if self.reasoning is not None:
            info["reasoning"] = self.reasoning
        if self.rule is not None:
            info["rule"] = self.rule
        if self.mended:
            info["mended"] = True
        if self.resampled:
            info["resampled"] = float(self.resampled)
        if self.broken:
            info["broken"] = "; ".join(self.broken)
        return info


class InvalidReason(StrEnum):
    """Why a written text is no prediction."""

    UNFINISHED = "unfinished"  # it did not end within the limit of tokens
    NO_STATUS = "no_status"  # no line with reward and end
    EDIT = "edit"  # an edit that cannot be applied
    REASONING = "reasoning"  # no line that ends the reasoning within its limit
    CODE = "code"  # a step function broke, took too long, or returned something else


class PredictionInvalid(Exception):
    """The model wrote a text that is no prediction. It is counted by reason, and is never an observation."""

    def __init__(self, message: str, reason: InvalidReason = InvalidReason.NO_STATUS) -> None:
        super().__init__(message)
        self.reason = reason


class WorldModel(Protocol):
    """Stateless for the caller: everything it needs is in the arguments; caching is the engine's business.

    ``session`` only names the episode for that cache. ``version`` identifies the weights (provenance of each dream).
    """

    version: str

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction: ...

    def release(self, session: object) -> None: ...


class LanguageWorldModel(WorldModel, Protocol):
    """A world model made of language models, each in its engine: what the stages load."""

    @property
    def engines(self) -> tuple[Engine, ...]: ...

    @property
    def temperature(self) -> float:
        """0 predicts the most likely words; 1 samples from the model."""
        ...

    def at_temperature(self, temperature: float) -> LanguageWorldModel: ...

    def excluding(self, episodes: Sequence[Trajectory]) -> LanguageWorldModel:
        """The same model for judging it by these episodes: it is shown nothing of them."""
        ...


@dataclass(eq=False, repr=False)
class WorldModelWrapper:
    """A world model around another one, whose predictions it changes; what else it is made of are its fields."""

    model: LanguageWorldModel
    version: str = field(init=False)
    mark: ClassVar[str] = ""  # of the version, behind that of the model

    def __post_init__(self) -> None:
        self.version = self.model.version + self.mark

    def around(self, model: LanguageWorldModel) -> Self:
        """The same around another model."""
        return replace(self, model=model)

    @cached_property
    def sampled(self) -> LanguageWorldModel:
        """The model for asking again: a greedy one at temperature 1, as it would repeat its answer."""
        return self.model.at_temperature(1.0) if self.model.temperature == 0 else self.model

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.model.engines

    @property
    def temperature(self) -> float:
        return self.model.temperature

    def at_temperature(self, temperature: float) -> Self:
        return self.around(self.model.at_temperature(temperature))

    def excluding(self, episodes: Sequence[Trajectory]) -> Self:
        return self.around(self.model.excluding(episodes))

    def release(self, session: object) -> None:
        self.model.release(session)


def lines(text: str) -> Counter[str]:
    """How often each line stands in a text, without white space at its ends; empty ones are none."""
    return Counter(line.strip() for line in text.splitlines() if line.strip())
