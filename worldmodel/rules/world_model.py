"""A world model whose answers are checked, mended or replaced by rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from real_envs.seeding import derive_seed
from real_envs.trajectory import Turn
from worldmodel.rules.invariants import OUTCOME, Invariant
from worldmodel.rules.rule_set import RuleSet
from worldmodel.world_model import Prediction, PredictionInvalid, WorldModelWrapper


def _turn(action: str, prediction: Prediction) -> Turn:
    return Turn(action, prediction.observation, prediction.reward, prediction.terminated)


@dataclass(eq=False, repr=False)
class RuledWorldModel(WorldModelWrapper):
    """Any world model, with the rules that were mined from the log (``worldmodel/rules/mine.py``).

    Where a rule applies, it answers, in the log's words and without sampling. Where the first words of an answer are
    known, the model continues them. An answer that breaks an invariant is mended in as few words as possible
    (``invariants.mend``), or sampled again; an outcome that stays wrong is corrected.

    Args:
        mode: with ``refuse`` only rules that refuse an action answer; with ``repair`` all do, and broken answers are
            sampled again.
        resamples: how often at most. The first answer that breaks no invariant is taken, else the one that breaks
            fewest. A greedy model is resampled at temperature 1.
    """

    rules: RuleSet
    mode: Literal["refuse", "repair"] = "repair"
    resamples: int = 8
    mark = "+rules"

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        answer = self.rules.answer(start, history, action, session, refusals_only=self.mode == "refuse")
        if answer is None:
            return await self._repaired(start, history, action, seed, session)
        rule = answer.rule
        assert rule.reward is not None  # of those that answer
        return Prediction(
            observation=answer.observation,
            reward=rule.reward,
            terminated=rule.terminated,
            confidence=rule.precision,
            outcome_confidence=rule.precision,
            disagreement=0.0 if len(self.engines) > 1 else None,
            outcome_by="rule",
            rule=str(rule),
        )

    async def _repaired(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object
    ) -> Prediction:
        if self.mode == "refuse":
            return await self.model.predict(start, history, action, seed, session)
        known = self.rules.words(start, history, action, session)
        opening = known.observation if known is not None else self.rules.opening(start, history, action, session)
        begun: dict[str, Any] = {"opening": opening} if opening and getattr(self.model, "continues", False) else {}

        def mended(prediction: Prediction) -> tuple[Prediction, Sequence[Invariant]]:
            """The prediction with as few words changed as mend it, or with those that a rule knows; what it breaks."""
            if known is not None:
                changed = prediction.observation.strip() != known.observation.strip()
                best = replace(prediction, observation=known.observation, mended=changed, rule=str(known.rule))
                return best, self.rules.broken(start, history, _turn(action, best), session)
            text, broken = self.rules.mended(start, history, _turn(action, prediction), session)
            changed = text != prediction.observation
            return replace(prediction, observation=text, mended=True) if changed else prediction, broken

        best, broken = mended(await self.model.predict(start, history, action, seed, session, **begun))
        tries = 0
        while broken and tries < self.resamples:
            again = derive_seed("resample", seed, tries)
            tries += 1
            try:
                other, left = mended(await self.sampled.predict(start, history, action, again, session, **begun))
            except PredictionInvalid:
                continue
            if len(left) < len(broken):
                best, broken = other, left
        if broken and all(invariant.phrase == OUTCOME for invariant in broken):  # the words are right
            rule = broken[0]
            outcome = replace(
                best,
                reward=rule.reward,
                terminated=rule.terminated,
                outcome_confidence=rule.precision,
                mended=True,
                outcome_by="rule",
            )
            if not self.rules.broken(start, history, _turn(action, outcome), session):  # no other contradicts it
                best, broken = outcome, ()
        return replace(best, resampled=tries, broken=tuple(map(str, broken)))

    def release(self, session: object) -> None:
        self.rules.release(session)
        super().release(session)


DeclaredAnswer = Callable[[str, Sequence[Turn], str], tuple[str, float, bool] | None]


@dataclass(eq=False, repr=False)
class DeclaredAnswers(WorldModelWrapper):
    """Any world model, where what the world itself declares is answered without asking the model.

    Args:
        part: what is declared, such as ``schema``.
        answer: observation, reward and end after ``(start, history, action)``; ``None`` where the model is to say.
    """

    part: str
    answer: DeclaredAnswer

    def __post_init__(self) -> None:
        self.version = f"{self.model.version}+{self.part}"

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        declared = self.answer(start, history, action)
        if declared is None:
            return await self.model.predict(start, history, action, seed, session)
        sure = 0.0 if len(self.engines) > 1 else None
        return Prediction(*declared, 1.0, 1.0, disagreement=sure, outcome_by="predicate", rule=self.part)


@dataclass(eq=False, repr=False)
class AnsweredActions(WorldModelWrapper):
    """Any world model, asked again where it refuses what the world declares to be answered.

    Args:
        surely: whether an action after ``(start, history)`` is answered for sure.
        refusal: a regular expression of answers that refuse.
        resamples: how often at most. A greedy model is resampled at temperature 1.
    """

    surely: Callable[[str, Sequence[Turn], str], bool]
    refusal: str
    resamples: int
    mark = "+answered"

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        prediction = await self.model.predict(start, history, action, seed, session)
        tries = 0
        while re.match(self.refusal, prediction.observation) and self.surely(start, history, action):
            if tries == self.resamples:
                break
            tries += 1
            again = derive_seed("answered", seed, tries)
            with suppress(PredictionInvalid):
                prediction = await self.sampled.predict(start, history, action, again, session)
        return replace(prediction, resampled=prediction.resampled + tries)
