"""Advantages that read rewards alone: comparisons within groups, returns to go, a choice of the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from imagination.learning.advantages import (
    best_of_groups,
    gigpo,
    group_relative,
    leave_one_out,
    reinforce_pp_baseline,
    returns_to_go,
)
from imagination.learning.algorithms.advantage import per_row_advantages, refuse_advantage_mask, whitened
from imagination.learning.algorithms.episodes import Episodes, Judged, Rewards
from imagination.learning.shapes import check_positive, check_unit


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """GRPO's comparison within a group; Dr.GRPO's without the deviation.

    Attributes:
        normalise_std: divide by the deviation of the group.
        std_eps: added to the deviation, in units of reward.
    """

    normalise_std: bool = True
    std_eps: float = 1e-4
    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("grpo", std_eps=self.std_eps)

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        per_row, counts = group_relative(
            rewards.returns,
            episodes.group_ids,
            episodes.valid,
            std_eps=self.std_eps,
            normalise_std=self.normalise_std,
        )
        return per_row_advantages(episodes, per_row, counts)


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """RLOO: against the mean of the other episodes of the group. It has no settings."""

    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        return per_row_advantages(episodes, *leave_one_out(rewards.returns, episodes.group_ids, episodes.valid))


@dataclass(frozen=True, slots=True)
class ReturnsToGo:
    """REINFORCE and REINFORCE++: what is still to be earned.

    Attributes:
        gamma: discount per agent token.
        whiten: returns of the update to mean 0 and deviation 1 (REINFORCE++).
    """

    gamma: float = 1.0
    whiten: bool = False
    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    judges_turns: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_unit("reinforce", gamma=self.gamma)

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        mask = episodes.judged_tokens
        gains = returns_to_go(rewards.tokens, mask, self.gamma)
        return Judged(whitened(gains, mask, self.whiten, episodes.sources), episodes.acted)


@dataclass(frozen=True, slots=True)
class GroupBaseline:
    """REINFORCE++ with baseline: less the group's mean, whitened over the update. It has no settings."""

    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        gains, counts = reinforce_pp_baseline(
            rewards.returns, episodes.group_ids, episodes.valid, episodes.judged_tokens, episodes.sources
        )
        return Judged(gains, episodes.acted & counts[:, None])


@dataclass(frozen=True, slots=True)
class GiGpo:
    """Episodes compared within the group, and turns that answered the same observation.

    Attributes:
        gamma: discount per turn, of the step's return.
        step_weight: of the step's advantage.
        normalise_std: divide by the deviation, at both levels.
        std_eps: added to the deviation, in units of reward.
    """

    gamma: float = 0.95
    step_weight: float = 1.0
    normalise_std: bool = True
    std_eps: float = 1e-4
    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_unit("gigpo", gamma=self.gamma)
        check_positive("gigpo", std_eps=self.std_eps)
        if self.step_weight < 0.0:
            raise ValueError(f"gigpo: step_weight must be at least 0, got {self.step_weight}")

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        refuse_advantage_mask("gigpo", episodes)
        if episodes.anchors is None:
            raise ValueError("gigpo compares turns that answered the same observation: give Episodes.anchors")
        gains, counts = gigpo(
            rewards.turns,
            episodes.valid_turns,
            episodes.anchors,
            episodes.group_ids,
            episodes.valid,
            gamma=self.gamma,
            step_weight=self.step_weight,
            normalise_std=self.normalise_std,
            std_eps=self.std_eps,
        )
        return Judged(gains, episodes.acted & counts[:, None])


@dataclass(frozen=True, slots=True)
class BestOfGroups:
    """Filtered behaviour cloning: keep the best episodes, with advantage 1, and drop the others.

    Attributes:
        keep_fraction: of each group, ties with the last one included.
        keep_min_return: least return of a kept episode; a solved task adds up to 1.
    """

    keep_fraction: float = 0.25
    keep_min_return: float = 0.99
    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    judges_turns: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_fraction <= 1.0:
            raise ValueError(f"filtered_bc: keep_fraction must lie in (0, 1], got {self.keep_fraction}")

    def __call__(self, episodes: Episodes, rewards: Rewards) -> Judged:
        kept = best_of_groups(
            rewards.returns,
            episodes.group_ids,
            episodes.valid,
            fraction=self.keep_fraction,
            min_return=self.keep_min_return,
        )
        return per_row_advantages(episodes, kept.to(rewards.turns.dtype), kept)
