"""The protocol of a world model: history and action in, next observation, reward and end out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from real_envs.trajectory import Turn


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model believes an action does.

    Attributes:
        observation: the text seen after the action.
        reward: what the action earns.
        terminated: the world ends.
        confidence: probability, under the model, of exactly this observation, reward and end, in (0, 1].
        outcome_confidence: probability of this reward and end, given the observation, in (0, 1].
    """

    observation: str
    reward: float
    terminated: bool
    confidence: float
    outcome_confidence: float


class PredictionInvalid(Exception):
    """The model wrote something that is no prediction. Typed, counted, never shown as an observation."""


class WorldModel(Protocol):
    """Stateless for the caller: everything it needs is in the arguments; caching is the engine's business.

    ``session`` only names the episode for that cache. ``version`` identifies the weights (provenance of each dream).
    """

    version: str

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction: ...

    def release(self, session: object) -> None: ...
