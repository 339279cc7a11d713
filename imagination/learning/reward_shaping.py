"""Rewards of the turns of an episode before anything is judged: tiers, judgements, the penalty for uncertainty."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from imagination.learning.advantages.shaping import tiered_rewards
from imagination.settings import UserError
from real_envs.trajectory import RETURN_ROUNDING, StopReason, Trajectory

# Rewards of tiers are multiples of it: differences and sums of such numbers are exact, in fp32 too, up to 256. Two ways
# up to one tier would differ by rounding otherwise, and a group of equal outcomes would look informative.
GRAIN = 2.0**-16
_UNCERTAIN = (StopReason.UNSURE, StopReason.PREDICTION_INVALID)


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """By default what the environment, or the dream, paid.

    Attributes:
        tiers: ``(threshold, reward)``, as ``tiered_rewards`` takes them; none leave rewards as they are.
        process: name of a number in ``Turn.info`` that judges the turn; empty judges none.
        refusals: regular expression for observations that say that the action was not carried out; empty tells no
            turn from another.
        worst: by number of turns, the worst return that the log has for them, see ``worst_returns``; empty: 0.
        longest: most turns of an episode; decides how many are lost to uncertainty.
    """

    tiers: Sequence[Sequence[float]] = ()
    process: str = ""
    refusals: str = ""
    worst: tuple[float, ...] = ()
    longest: int = 0

    def rewards(self, episode: Trajectory) -> list[float]:
        """What each turn earned; 0.0 for turns copied from a log, which the policy did not play.

        With tiers, a turn earns the height that it climbs on the staircase (Sweet Spot Learning, arXiv 2601.22491):
        the tier of all that was earned up to it, less the tier before it. So an episode adds up to the tier of its
        outcome, less that of the state in which it began, and a reward stays with the turn that brought it.

        Rewards are rounded to ``GRAIN``, so that all ways up to a tier add up to the same number.

        Example::

            rewards 0, 0.5, 0, 0.5 and tiers (0.5, 0.3), (1, 1): 0, 0.3, 0, 0.7
        """
        rewards = [turn.reward or 0.0 for turn in episode.turns]
        if self.tiers:
            reached = torch.tensor([0.0, *accumulate(rewards)], dtype=torch.float64)
            reached += RETURN_ROUNDING  # nine times 0.111111 reaches a threshold of 1, as in Trajectory.solved
            steps = [(threshold, round(reward / GRAIN) * GRAIN) for threshold, reward in self.tiers]
            rewards = [after - before for before, after in pairwise(tiered_rewards(reached, steps).tolist())]
        for k in range(episode.prefix_turns, len(rewards)):
            if episode.turns[k].info.get("doubted") is True:  # unpaid is too much where turns cost something
                rewards[k] = min(rewards[k], self._worst_of(1))
        return [0.0] * episode.prefix_turns + rewards[episode.prefix_turns :]

    def turns_lost(self, episode: Trajectory) -> int:
        """That a dream could still have had when uncertainty or nonsense of the world model ended it; 0 otherwise."""
        return max(self.longest - len(episode.own_turns), 0) if episode.stop in _UNCERTAIN else 0

    def uncertainty_penalty(self, episode: Trajectory) -> float:
        """What the action earns at which uncertainty or nonsense of the world model ended a dream: the worst of as many
        turns of the log, or 0.

        With rewards that are never negative this is 0: unpaid. Where every turn costs 0.1, to end a dream early would
        be the cheapest thing to do if it cost nothing.
        """
        if episode.stop not in _UNCERTAIN:
            return 0.0
        # the uncertain turn itself is recorded, with a reward of 0; one without an answer is not
        return self._worst_of(self.turns_lost(episode) + (episode.stop is StopReason.UNSURE))

    def _worst_of(self, turns: int) -> float:
        return self.worst[min(turns, len(self.worst) - 1)] if self.worst else 0.0

    def judgements(self, episode: Trajectory) -> list[float]:
        """The number ``process`` of each turn, NaN for turns copied from a log; empty where none is asked for.

        The turn at which a guard ended a dream earned nothing, and is judged all the same: a price of uncertainty must
        be paid there above all.

        Raises:
            UserError: a turn has no such number. Unmeasured is not zero.
        """
        if not self.process:
            return []
        numbers = [math.nan] * episode.prefix_turns
        for k, turn in enumerate(episode.own_turns, start=episode.prefix_turns):
            value = turn.info.get(self.process)
            if not isinstance(value, int | float) or not math.isfinite(value):
                others = [key for key, x in turn.info.items() if isinstance(x, int | float)]
                raise UserError(
                    f"train.process={self.process}: turn {k} of episode {episode.id} has no such number, only "
                    f"{', '.join(others) or 'none at all'}; set train.process to one that it has, or to '' with "
                    "train.process_coef=0"
                )
            numbers.append(float(value))
        return numbers

    def carried_out(self, episode: Trajectory) -> list[bool]:
        """Whether each turn's action was carried out, by the words of the answer; empty without ``refusals``."""
        if not self.refusals:
            return []
        return [not re.search(self.refusals, turn.observation) for turn in episode.turns]


def worst_returns(log: Iterable[Sequence[float]], longest: int) -> tuple[float, ...]:
    """By number of turns n = 0, 1, ..., ``longest``: the least sum of at most n rewards in a row, and at most 0.

    Where the log has no such number of turns in a row, as bad as two shorter stretches of it one after the other.

    Args:
        log: rewards of each logged episode, turn by turn.

    Example::

        worst_returns([[-0.1, -0.1, 1.0], [0.0, -0.3]], 4)  # 0, -0.3, -0.3, -0.3, -0.6
    """
    costly = [rewards for rewards in log if min(rewards, default=0.0) < 0]
    upto = [[0.0, *accumulate(rewards)] for rewards in costly]
    known = min(max(map(len, costly), default=0), longest)
    worst = [0.0]
    for n in range(1, known + 1):
        sums = [after - before for sums in upto for before, after in zip(sums, sums[n:], strict=False)]
        worst.append(min([worst[-1], *sums]))
    for n in range(known + 1, longest + 1):
        worst.append(worst[known] + worst[n - known] if known else 0.0)
    return tuple(worst)


def check_tiers(tiers: Sequence[Sequence[float]]) -> str | None:
    """What is wrong with ``train.reward_tiers``; ``None`` if nothing is."""
    if any(len(tier) != 2 for tier in tiers):
        return "train.reward_tiers is a list of [outcome, reward], such as [[0.5,0.3],[1,1]]"
    steps = [(0.0, 0.0), *((threshold, reward) for threshold, reward in tiers)]
    if any(after <= before or high - low < GRAIN for (before, low), (after, high) in pairwise(steps)):
        return f"outcomes and rewards of train.reward_tiers must both rise, from above 0 on, got {list(tiers)}"
    if tiers and (steps[-1][0] > 1 or steps[-1][1] > 100):
        return (
            "train.reward_tiers: a solved task has the outcome 1, so no tier can lie above it, and rewards go up to "
            f"100, got {list(tiers[-1])}"
        )
    return None
