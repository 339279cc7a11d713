"""The advantage part of an algorithm: what it reads of episodes, and how it compares them.

Plain tensors, so that anyone's episodes can be judged. Settings are explained once, in ``AlgorithmSettings``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from imagination.learning.advantages import (
    best_of_groups,
    bilevel_gae,
    broadcast_over_tokens,
    gigpo,
    group_relative,
    leave_one_out,
    masked_gae,
    overlong_penalty,
    place_turn_rewards,
    reinforce_pp_baseline,
    returns_to_go,
    turn_gae,
    whiten_by,
    with_kl_penalty,
)
from imagination.learning.algorithms.loss import Kl, Sampling
from imagination.learning.shapes import check_positive, check_unit


@dataclass(frozen=True, slots=True)
class Episodes:
    """All episodes of one update; a row is an episode.

    Attributes:
        turn_rewards: ``[batch, turns]``, 0.0 for padding and for turns that the policy did not play; read where valid.
        action_turn_index: ``[batch, time]`` integers, the turn of an agent token and -1 for all others.
        group_ids: ``[batch]`` integers, equal where episodes share a start.
        valid: ``[batch]`` bool, false for failed episodes: they are in no mean, no deviation and no loss.
        loss_mask: ``[batch, time]`` bool, the tokens that are trained; ``None`` for all agent tokens.
        advantage_mask: ``[batch, time]`` bool, the tokens over which advantages are estimated; ``None`` for all agent
            tokens. The two are apart so that each can be switched off by itself (the ablation of Agent-R1, arXiv
            2511.14460); only algorithms of tokens and whole episodes have the second.
        anchors: ``[batch, turns]`` integers, what was observed before each turn; for gigpo.
        values: ``[batch, time]``, the critic before each token; for algorithms with a critic.
        bootstrap_value: ``[batch]``, the critic's value of the state in which a truncated row stops, 0.0 for terminated
            rows; ``None``: all terminated.
        kl: ``[batch, time]``, an estimate of the KL to the reference; where the KL is a reward.
        shaped: ``[batch, turns]``, what turns are judged by in place of ``turn_rewards`` (process rewards, progress),
            0.0 where there is no action token; read where valid. ``turn_rewards`` remain what the environment paid.
        sources: ``[batch]`` integers, equal for episodes of one world: what is whitened, is so for each by itself.
            ``None``: all are of one.
        token_rewards: ``[batch, time]``, a turn's reward on its last action token; ``with_penalties`` sets it.
    """

    turn_rewards: Tensor
    action_turn_index: Tensor
    group_ids: Tensor
    valid: Tensor
    loss_mask: Tensor | None = None
    advantage_mask: Tensor | None = None
    anchors: Tensor | None = None
    values: Tensor | None = None
    bootstrap_value: Tensor | None = None
    kl: Tensor | None = None
    shaped: Tensor | None = None
    sources: Tensor | None = None
    token_rewards: Tensor | None = None

    @property
    def acted(self) -> Tensor:
        """``[batch, time]`` bool, agent tokens of valid episodes."""
        return (self.action_turn_index >= 0) & self.valid[:, None]

    @property
    def judged_tokens(self) -> Tensor:
        """``[batch, time]`` bool, over which advantages are estimated."""
        return self.acted if self.advantage_mask is None else self.advantage_mask & self.valid[:, None]

    @property
    def valid_turns(self) -> Tensor:
        """``action_turn_index`` with -1 in failed episodes."""
        return self.action_turn_index.masked_fill(~self.valid[:, None], -1)

    @property
    def earned(self) -> Tensor:
        """``[batch, turns]``, ``turn_rewards`` with 0.0 in failed episodes."""
        return self.turn_rewards.masked_fill(~self.valid[:, None], 0.0)

    @property
    def groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """Undiscounted returns, ``group_ids`` and ``valid``, each ``[batch]``: what comparisons of groups read."""
        return self.turn_rewards.sum(1), self.group_ids, self.valid


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an algorithm makes of episodes.

    Attributes:
        advantages: ``[batch, time]``, constants.
        trained: ``[batch, time]`` bool, the tokens that the policy's loss reads.
        returns: ``[batch, time]``, targets of the critic; ``None`` without one.
        learned: ``[batch, time]`` bool, where the critic has a target; ``None`` without one.
    """

    advantages: Tensor
    trained: Tensor
    returns: Tensor | None = None
    learned: Tensor | None = None


@torch.no_grad()
def with_penalties(episodes: Episodes, kl: Kl, sampling: Sampling) -> Episodes:
    """The episodes as they are judged: ``shaped`` rewards where there are any, less the KL and the overlong penalty.

    ``turn_rewards`` and ``token_rewards`` of the result hold these, and zeros in failed episodes.

    Raises:
        ValueError: as ``place_turn_rewards``, ``with_kl_penalty`` and ``overlong_penalty``, or what they need is
            missing.
    """
    earned, index, acted = episodes.earned, episodes.valid_turns, episodes.acted
    shaped = earned if episodes.shaped is None else episodes.shaped.masked_fill(~episodes.valid[:, None], 0.0)
    tokens = place_turn_rewards(shaped, index)
    if kl.kl_coef and kl.kl_in == "reward":
        if episodes.kl is None:
            raise ValueError("the KL is a reward here: give Episodes.kl, or set kl_in=loss")
        tokens = with_kl_penalty(tokens, episodes.kl, acted, kl.kl_coef)
    if sampling.overlong_buffer:
        if sampling.max_tokens is None:
            raise ValueError("overlong_buffer needs max_tokens, the most agent tokens an episode can have")
        fines = overlong_penalty(
            acted.sum(1), sampling.max_tokens, sampling.overlong_buffer, sampling.overlong_penalty
        ).to(tokens.dtype)
        position = torch.arange(acted.shape[1], device=acted.device)
        last = torch.where(acted, position, 0).amax(1)  # without a token there is no penalty to place either
        tokens = tokens.scatter_add(1, last[:, None], fines[:, None])
    turns = torch.zeros_like(earned, dtype=tokens.dtype)
    if turns.numel():
        turns = turns.scatter_add(1, index.clamp(min=0), tokens.masked_fill(~acted, 0.0))
    return replace(episodes, turn_rewards=turns, token_rewards=tokens)


class AdvantagePart:
    """Frozen settings that, called with the episodes of ``with_penalties``, estimate their advantages.

    Attributes:
        needs_critic, needs_groups: values, and several episodes of one start.
        judges_turns: turns are judged, for which no mask is read.
        adds_up: only the sum of an episode's rewards is read, so how they are spread over its turns changes nothing.
    """

    __slots__ = ()
    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    judges_turns: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False

    def __call__(self, episodes: Episodes) -> Advantages:
        raise NotImplementedError


# --- with a critic ---


@dataclass(frozen=True, slots=True)
class TokenGae(AdvantagePart):
    """GAE over agent tokens; ``gamma`` is per token."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    needs_critic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_unit("GAE", gamma=self.gamma, lam=self.lam)

    def __call__(self, episodes: Episodes) -> Advantages:
        mask, values = episodes.judged_tokens, _values(episodes)
        gains, returns = masked_gae(
            _given_rewards(episodes), values, mask, self.gamma, self.lam, episodes.bootstrap_value
        )
        return Advantages(_whitened(episodes, gains, mask, self.whiten, returns), episodes.acted, returns, mask)


@dataclass(frozen=True, slots=True)
class TurnGae(AdvantagePart):
    """GAE over turns, one advantage for all tokens of a turn; ``gamma`` and ``lam`` are per turn."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    needs_critic: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_unit("turn_ppo", gamma=self.gamma, lam=self.lam)

    def __call__(self, episodes: Episodes) -> Advantages:
        _refuse_advantage_mask("turn_ppo", episodes)
        acted = episodes.acted
        gains, returns, learned = turn_gae(
            episodes.turn_rewards,
            _values(episodes),
            episodes.valid_turns,
            self.gamma,
            self.lam,
            episodes.bootstrap_value,
        )
        return Advantages(_whitened(episodes, gains, acted, self.whiten, returns), acted, returns, learned)


@dataclass(frozen=True, slots=True)
class BilevelGae(AdvantagePart):
    """GAE over turns, then over the tokens of each; RAGEN's 0.95 discounts turns."""

    turn_gamma: float = 0.95
    turn_lam: float = 0.95
    token_gamma: float = 1.0
    token_lam: float = 1.0
    whiten: bool = True
    needs_critic: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_unit("bilevel_ppo", turn_gamma=self.turn_gamma, turn_lam=self.turn_lam)
        check_unit("bilevel_ppo", token_gamma=self.token_gamma, token_lam=self.token_lam)

    def __call__(self, episodes: Episodes) -> Advantages:
        _refuse_advantage_mask("bilevel_ppo", episodes)
        acted = episodes.acted
        gains, returns = bilevel_gae(
            episodes.turn_rewards,
            _values(episodes),
            episodes.valid_turns,
            turn_gamma=self.turn_gamma,
            turn_lam=self.turn_lam,
            token_gamma=self.token_gamma,
            token_lam=self.token_lam,
            bootstrap_value=episodes.bootstrap_value,
        )
        return Advantages(_whitened(episodes, gains, acted, self.whiten, returns), acted, returns, acted)


# --- without a critic ---


@dataclass(frozen=True, slots=True)
class GroupRelative(AdvantagePart):
    """GRPO's comparison within a group; Dr.GRPO's without the deviation."""

    normalise_std: bool = True
    std_eps: float = 1e-4
    needs_groups: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("grpo", std_eps=self.std_eps)

    def __call__(self, episodes: Episodes) -> Advantages:
        return _per_episode(
            episodes, *group_relative(*episodes.groups, std_eps=self.std_eps, normalise_std=self.normalise_std)
        )


@dataclass(frozen=True, slots=True)
class LeaveOneOut(AdvantagePart):
    """RLOO: against the mean of the other episodes of the group. It has no settings."""

    needs_groups: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    def __call__(self, episodes: Episodes) -> Advantages:
        return _per_episode(episodes, *leave_one_out(*episodes.groups))


@dataclass(frozen=True, slots=True)
class ReturnsToGo(AdvantagePart):
    """REINFORCE and, whitened, REINFORCE++: what is still to be earned; ``gamma`` is per agent token."""

    gamma: float = 1.0
    whiten: bool = False

    def __post_init__(self) -> None:
        check_unit("reinforce", gamma=self.gamma)

    def __call__(self, episodes: Episodes) -> Advantages:
        mask = episodes.judged_tokens
        gains = returns_to_go(_given_rewards(episodes), mask, self.gamma)
        return Advantages(_whitened(episodes, gains, mask, self.whiten), episodes.acted)


@dataclass(frozen=True, slots=True)
class GroupBaseline(AdvantagePart):
    """REINFORCE++ with baseline: less the group's mean, whitened over the update. It has no settings."""

    needs_groups: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    def __call__(self, episodes: Episodes) -> Advantages:
        gains, counts = reinforce_pp_baseline(*episodes.groups, episodes.judged_tokens, episodes.sources)
        return Advantages(gains, episodes.acted & counts[:, None])


@dataclass(frozen=True, slots=True)
class GiGpo(AdvantagePart):
    """Episodes compared within the group, and turns that answered the same observation; ``gamma`` is per turn."""

    gamma: float = 0.95
    step_weight: float = 1.0
    normalise_std: bool = True
    std_eps: float = 1e-4
    needs_groups: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_unit("gigpo", gamma=self.gamma)
        check_positive("gigpo", std_eps=self.std_eps)
        if self.step_weight < 0.0:
            raise ValueError(f"gigpo: step_weight must be at least 0, got {self.step_weight}")

    def __call__(self, episodes: Episodes) -> Advantages:
        _refuse_advantage_mask("gigpo", episodes)
        if episodes.anchors is None:
            raise ValueError("gigpo compares turns that answered the same observation: give Episodes.anchors")
        gains, counts = gigpo(
            episodes.turn_rewards,
            episodes.valid_turns,
            episodes.anchors,
            episodes.group_ids,
            episodes.valid,
            gamma=self.gamma,
            step_weight=self.step_weight,
            normalise_std=self.normalise_std,
            std_eps=self.std_eps,
        )
        return Advantages(gains, episodes.acted & counts[:, None])


@dataclass(frozen=True, slots=True)
class BestOfGroups(AdvantagePart):
    """Filtered behaviour cloning: keep the best episodes, with advantage 1, and drop the others."""

    keep_fraction: float = 0.25
    keep_min_return: float = 0.99
    adds_up: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_fraction <= 1.0:
            raise ValueError(f"filtered_bc: keep_fraction must lie in (0, 1], got {self.keep_fraction}")

    def __call__(self, episodes: Episodes) -> Advantages:
        kept = best_of_groups(*episodes.groups, fraction=self.keep_fraction, min_return=self.keep_min_return)
        return _per_episode(episodes, kept.to(episodes.turn_rewards.dtype), kept)


def _per_episode(episodes: Episodes, per_row: Tensor, counts: Tensor) -> Advantages:
    """One number an episode; episodes that do not count are neither judged nor trained."""
    chosen = counts[:, None]
    return Advantages(broadcast_over_tokens(per_row, episodes.judged_tokens & chosen), episodes.acted & chosen)


def _whitened(episodes: Episodes, gains: Tensor, mask: Tensor, wanted: bool, targets: Tensor | None = None) -> Tensor:
    """Whitened over the mask of each source if that is wanted; zero outside the mask in any case.

    Args:
        targets: returns that ``gains`` are what is left of after values were taken off, where that is so.
    """
    if not wanted:
        return torch.where(mask, gains, 0.0)
    size = None if targets is None else float(torch.where(mask, targets, 0.0).abs().amax()) if mask.any() else 0.0
    return whiten_by(gains, mask, episodes.sources, size)


def _refuse_advantage_mask(name: str, episodes: Episodes) -> None:
    if episodes.advantage_mask is not None:
        raise ValueError(f"{name} judges turns, which have no advantage_mask: leave it out, or choose ppo or grpo")


def _values(episodes: Episodes) -> Tensor:
    if episodes.values is None:
        raise ValueError("this algorithm has a critic: give Episodes.values, or choose one without, such as grpo")
    return episodes.values


def _given_rewards(episodes: Episodes) -> Tensor:
    assert episodes.token_rewards is not None, "with_penalties comes first"
    return episodes.token_rewards
