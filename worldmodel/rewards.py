"""What pays in a dream: a declared goal, a predicate over the transcript, or what the log saw pay in the same task.

Where one can say what counts as success, the dream need not guess it, and a policy cannot find a place where the guess
is wrong (goal predicates over the transcript: arXiv 2607.16204). Elsewhere a world model that has learned when agents
are paid, and not what for, pays whoever acts alike: whoever puts something into the box after reading the problem. The
log of the task knows better.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from real_envs.seeding import derive_seed
from real_envs.trajectory import StopReason, Trajectory, Turn
from worldmodel.world_model import Prediction, PredictionInvalid, WorldModelWrapper


@dataclass
class Goal:
    """A goal that decides reward and end of dreams in place of the model. It is met once an episode at most.

    Patterns are regular expressions that are searched, so ``^`` and ``$`` anchor them to the whole text.

    Raises:
        ValueError: a pattern is no regular expression, or stands without ``observation``.
    """

    observation: str = ""  #: what the observation says when the goal is met; empty declares no goal
    action: str = ""  #: what the action says that meets it; empty takes any
    earlier: list[str] = field(default_factory=list)  #: each must have been said by some observation before that one
    reward: float = 1.0  #: earned when it is met; all other turns earn 0
    ends: bool = True  #: meeting it ends the episode, and nothing else does

    def __post_init__(self) -> None:
        for pattern in (self.observation, self.action, *self.earlier):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        if not self.observation and (self.action or self.earlier):
            raise ValueError("a goal needs a pattern for the observation: set goal.observation")

    @property
    def declared(self) -> bool:
        return bool(self.observation)

    def met(self, start: str, turns: Sequence[Turn]) -> bool:
        """Whether the last of ``turns`` meets the goal, and none before it did."""
        return self._matches(start, turns) and not any(self._matches(start, turns[:k]) for k in range(1, len(turns)))

    def relabel(self, trajectory: Trajectory) -> Trajectory:
        """The episode with the goal's rewards and ends, solved where it is met; what came after its end is cut off."""
        turns: list[Turn] = []
        for turn in trajectory.turns:
            met = self.met(trajectory.start, [*turns, turn])
            turns.append(replace(turn, reward=self.reward if met else 0.0, terminated=met and self.ends))
            if turns[-1].terminated:
                break
        stop = StopReason.TERMINATED if turns and turns[-1].terminated else StopReason.TURN_LIMIT
        success = any(turn.reward for turn in turns) if self.reward > 0 else None
        return replace(trajectory, turns=tuple(turns), stop=stop, trace=None, success=success)

    def relabel_log(self, log: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The log with the goal's rewards and ends; as it is where no goal is declared.

        By the log's own rewards, some dreams would begin where they are over.
        """
        return [self.relabel(t) for t in log] if self.declared else log

    def _matches(self, start: str, turns: Sequence[Turn]) -> bool:
        *history, last = turns
        if not (re.search(self.observation, last.observation) and re.search(self.action, last.action)):
            return False
        seen = [start, *(turn.observation for turn in history)]
        return all(any(re.search(pattern, text) for text in seen) for pattern in self.earlier)


@dataclass(eq=False, repr=False)
class GoalWorldModel(WorldModelWrapper):
    """A world model whose reward and end are decided by a goal.

    The predicate is a function of the transcript, so the outcome is as sure as the observation: its confidence is 1,
    and that of the whole prediction becomes that of the observation alone, p(o, r, e) / p(r, e | o) = p(o). Of a rule
    only the precision of the whole is known, which stays.
    """

    goal: Goal

    def __post_init__(self) -> None:
        if not self.goal.declared:
            raise ValueError("the goal declares nothing")
        super().__post_init__()

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        predicted = await self.model.predict(start, history, action, seed, session)
        met = self.goal.met(start, [*history, Turn(action, predicted.observation, None, False)])
        given = 1.0 if predicted.outcome_by == "rule" else predicted.outcome_confidence
        return replace(
            predicted,
            reward=self.goal.reward if met else 0.0,
            terminated=met and self.goal.ends,
            confidence=min(1.0, predicted.confidence / given) if predicted.confidence else 0.0,
            outcome_confidence=1.0,
            outcome_by="predicate",
        )


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


@dataclass(eq=False, repr=False)
class KnownRewardsWorldModel(WorldModelWrapper):
    """A world model that pays in a logged task only for actions that were paid there.

    A prediction that pays for another action is sampled again; one that pays each time pays nothing. What a declared
    goal or the world's own rules pay is no guess and stays.

    Args:
        rewarded: see ``rewarded_actions``; other tasks are dreamed as they were.
        resamples: how often at most.
    """

    rewarded: Mapping[str, frozenset[str]]
    resamples: int = 4
    mark = "+rewards"

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        predicted = await self.model.predict(start, history, action, seed, session)
        rewarded = self.rewarded.get(start)
        if rewarded is None or action in rewarded or predicted.reward <= 0 or predicted.outcome_by == "predicate":
            return predicted
        for k in range(self.resamples):
            try:
                other = await self.sampled.predict(start, history, action, derive_seed("rewards", seed, k), session)
            except PredictionInvalid:
                continue
            if other.reward <= 0:
                return replace(other, resampled=other.resampled + k + 1)
        return replace(predicted, reward=0.0, outcome_by="log")
