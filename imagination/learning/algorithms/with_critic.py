"""Advantages that read values: GAE over tokens, over turns, over both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from imagination.learning.advantages import bilevel_gae, masked_gae, turn_gae
from imagination.learning.algorithms.advantage import refuse_advantage_mask, whitened
from imagination.learning.algorithms.episodes import Episodes, Judged, Rewards
from imagination.learning.shapes import check_unit


@dataclass(frozen=True, slots=True)
class TokenGae:
    """GAE over agent tokens.

    Attributes:
        gamma: discount per agent token.
        lam: of GAE.
        whiten: advantages of the update to mean 0 and deviation 1.
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    needs_critic: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = False
    judges_turns: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_unit("GAE", gamma=self.gamma, lam=self.lam)

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        mask, values = episodes.judged_tokens, _values(episodes)
        gains, returns = masked_gae(rewards.tokens, values, mask, self.gamma, self.lam, episodes.bootstrap_value)
        return Judged(whitened(gains, mask, self.whiten, episodes.sources, returns), episodes.acted, returns, mask)


@dataclass(frozen=True, slots=True)
class TurnGae:
    """GAE over turns, one advantage for all tokens of a turn.

    Attributes:
        gamma: discount per turn.
        lam: of GAE, per turn.
        whiten: advantages of the update to mean 0 and deviation 1, over tokens.
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    needs_critic: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = False
    judges_turns: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_unit("turn_ppo", gamma=self.gamma, lam=self.lam)

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        refuse_advantage_mask("turn_ppo", episodes)
        gains, returns, learned = turn_gae(
            rewards.turns, _values(episodes), episodes.valid_turns, self.gamma, self.lam, episodes.bootstrap_value
        )
        return Judged(
            whitened(gains, episodes.acted, self.whiten, episodes.sources, returns), episodes.acted, returns, learned
        )


@dataclass(frozen=True, slots=True)
class BilevelGae:
    """GAE over turns, then over the tokens of each.

    Attributes:
        turn_gamma: discount per turn; RAGEN's 0.95.
        turn_lam: of GAE over turns.
        token_gamma: discount per token of a turn.
        token_lam: of GAE over the tokens of a turn.
        whiten: advantages of the update to mean 0 and deviation 1.
    """

    turn_gamma: float = 0.95
    turn_lam: float = 0.95
    token_gamma: float = 1.0
    token_lam: float = 1.0
    whiten: bool = True
    needs_critic: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = False
    judges_turns: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_unit("bilevel_ppo", turn_gamma=self.turn_gamma, turn_lam=self.turn_lam)
        check_unit("bilevel_ppo", token_gamma=self.token_gamma, token_lam=self.token_lam)

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        refuse_advantage_mask("bilevel_ppo", episodes)
        gains, returns = bilevel_gae(
            rewards.turns,
            _values(episodes),
            episodes.valid_turns,
            turn_gamma=self.turn_gamma,
            turn_lam=self.turn_lam,
            token_gamma=self.token_gamma,
            token_lam=self.token_lam,
            bootstrap_value=episodes.bootstrap_value,
        )
        return Judged(
            whitened(gains, episodes.acted, self.whiten, episodes.sources, returns),
            episodes.acted,
            returns,
            episodes.acted,
        )


def _values(episodes: Episodes) -> Tensor:
    if episodes.values is None:
        raise ValueError("this algorithm has a critic: give Episodes.values, or choose one without, such as grpo")
    return episodes.values
