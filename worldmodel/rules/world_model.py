"""A world model that is asked only what no rule knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from real_envs.trajectory import Trajectory, Turn
from worldmodel.rules.rule_set import RuleSet
from worldmodel.world_model import LanguageWorldModel, Prediction

if TYPE_CHECKING:  # settings are read before anything heavy is imported
    from policy.lm.engine import Engine


class RuledWorldModel:
    """Any world model, with rules mined from the log before it (``worldmodel/rules/mine.py``).

    What a rule is sure of is answered by the rule, in the log's own words and without a token. A dream then
    keeps to what it has said itself: rooms stay as they were seen, and what cannot be done is refused.

    Args:
        model: what answers the rest.
        rules: of the same log.
        mode: ``refuse`` lets only those rules answer that refuse an action, ``repair`` all.

    Attributes:
        answered: how many turns each rule has answered, by its words; those of the model under ``""``.
    """

    def __init__(self, model: LanguageWorldModel, rules: RuleSet, mode: Literal["refuse", "repair"] = "repair") -> None:
        self.model, self.rules, self.mode = model, rules, mode
        self.version = f"{model.version}+rules"
        self.answered: Counter[str] = Counter()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.model.engines

    def at_temperature(self, temperature: float) -> RuledWorldModel:
        return RuledWorldModel(self.model.at_temperature(temperature), self.rules, self.mode)

    def excluding(self, episodes: Sequence[Trajectory]) -> RuledWorldModel:
        return RuledWorldModel(self.model.excluding(episodes), self.rules, self.mode)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        """See ``WorldModel``; raises what the model raises."""
        found = self.rules.answer(start, history, action, session, refusals_only=self.mode == "refuse")
        if found is None:
            self.answered[""] += 1
            return await self.model.predict(start, history, action, seed, session)
        rule = found.rule
        self.answered[str(rule)] += 1
        return Prediction(
            observation=found.observation,
            reward=rule.reward,
            terminated=rule.terminated,
            confidence=rule.precision,
            outcome_confidence=rule.precision,
            disagreement=0.0 if len(self.engines) > 1 else None,
            outcome_by="rule",
            rule=str(rule),
        )

    def release(self, session: object) -> None:
        self.rules.release(session)
        self.model.release(session)
