"""What pays in a task is what the log saw pay in it: no dream of a logged task pays for anything else.

A world model that has learned when agents are paid, and not what for, pays whoever acts alike: whoever puts something
into the box after reading the problem. The log of the task knows better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn
from worldmodel.world_model import LanguageWorldModel, Prediction, PredictionInvalid, WorldModelWrapper


def rewarded_actions(log: Sequence[Trajectory]) -> dict[str, frozenset[str]]:
    """The actions that earned something, by the text that their episodes begin with; tasks in which nothing was earned
    are left out, as little is known of them.
    """
    rewarded: dict[str, set[str]] = {}
    for episode in log:
        for turn in episode.turns:
            if turn.reward is not None and turn.reward > 0:
                rewarded.setdefault(episode.start, set()).add(turn.action)
    return {start: frozenset(actions) for start, actions in rewarded.items()}


class KnownRewardsWorldModel(WorldModelWrapper):
    """A world model that pays in a logged task only for actions that were paid there.

    A prediction that pays for another action is sampled again; one that pays each time pays nothing. What a declared
    goal or the world's own rules pay is no guess and stays.

    Args:
        rewarded: see ``rewarded_actions``; other tasks are dreamed as they were.
        resamples: how often at most.
    """

    def __init__(self, model: LanguageWorldModel, rewarded: Mapping[str, frozenset[str]], resamples: int = 4) -> None:
        super().__init__(model)
        self.rewarded, self.resamples = rewarded, resamples
        self.version = f"{model.version}+rewards"
        self._sampled = model.at_temperature(1.0) if model.temperature == 0 else model

    def around(self, model: LanguageWorldModel) -> KnownRewardsWorldModel:
        return KnownRewardsWorldModel(model, self.rewarded, self.resamples)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        predicted = await self.model.predict(start, history, action, seed, session)
        rewarded = self.rewarded.get(start)
        if rewarded is None or action in rewarded or predicted.reward <= 0 or predicted.outcome_by == "predicate":
            return predicted
        for k in range(self.resamples):
            try:
                other = await self._sampled.predict(start, history, action, derive_seed("rewards", seed, k), session)
            except PredictionInvalid:
                continue
            if other.reward <= 0:
                return replace(other, resampled=other.resampled + k + 1)
        return replace(predicted, reward=0.0, outcome_by="log")
