"""What an algorithm reads of episodes, and how each advantage part compares them.

Plain tensors, so that anyone's episodes can be judged. Settings are explained once, in ``settings/algorithm_parts.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from imagination.learning.advantages.gae import bilevel_gae, masked_gae, turn_gae
from imagination.learning.advantages.group import best_of_groups, gigpo, group_relative, istar, leave_one_out
from imagination.learning.advantages.reinforce import reinforce, reinforce_pp_baseline, whiten_by
from imagination.learning.advantages.shaping import overlong_penalty, with_kl_penalty
from imagination.learning.advantages.turns import broadcast_over_tokens, place_turn_rewards
from imagination.settings.algorithm_parts import (
    AdvantagePart,
    BestOfGroups,
    BilevelGae,
    DynamicSampling,
    GiGpo,
    GroupBaseline,
    GroupRelative,
    ImplicitSteps,
    Kl,
    LeaveOneOut,
    ReturnsToGo,
    TokenGae,
    TurnGae,
)


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
        step_rewards: ``[batch, turns]``, of a process reward model, NaN for turns without one; for istar.
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
    step_rewards: Tensor | None = None
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
def with_penalties(episodes: Episodes, kl: Kl, sampling: DynamicSampling) -> Episodes:
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
        tokens = with_kl_penalty(tokens, episodes.kl, acted, kl)
    if sampling.overlong_buffer:
        fines = overlong_penalty(acted.sum(1), sampling).to(tokens.dtype)
        position = torch.arange(acted.shape[1], device=acted.device)
        last = torch.where(acted, position, 0).amax(1)  # without a token there is no penalty to place either
        tokens = tokens.scatter_add(1, last[:, None], fines[:, None])
    turns = torch.zeros_like(earned, dtype=tokens.dtype)
    if turns.numel():
        turns = turns.scatter_add(1, index.clamp(min=0), tokens.masked_fill(~acted, 0.0))
    return replace(episodes, turn_rewards=turns, token_rewards=tokens)


# --- with a critic ---


def _token_gae(episodes: Episodes, part: TokenGae) -> Advantages:
    mask = episodes.judged_tokens
    gains, returns = masked_gae(_rewards(episodes), _values(episodes), mask, part, episodes.bootstrap_value)
    return Advantages(_whitened(episodes, gains, mask, part.whiten, returns), episodes.acted, returns, mask)


def _turn_gae(episodes: Episodes, part: TurnGae) -> Advantages:
    _refuse_advantage_mask("turn_ppo", episodes)
    acted, read = episodes.acted, (episodes.turn_rewards, _values(episodes), episodes.valid_turns)
    gains, returns, learned = turn_gae(*read, part, episodes.bootstrap_value)
    return Advantages(_whitened(episodes, gains, acted, part.whiten, returns), acted, returns, learned)


def _bilevel_gae(episodes: Episodes, part: BilevelGae) -> Advantages:
    _refuse_advantage_mask("bilevel_ppo", episodes)
    acted, read = episodes.acted, (episodes.turn_rewards, _values(episodes), episodes.valid_turns)
    gains, returns = bilevel_gae(*read, part, episodes.bootstrap_value)
    return Advantages(_whitened(episodes, gains, acted, part.whiten, returns), acted, returns, acted)


# --- without a critic ---


def _group_relative(episodes: Episodes, part: GroupRelative) -> Advantages:
    return _per_episode(episodes, *group_relative(*episodes.groups, part))


def _leave_one_out(episodes: Episodes, part: LeaveOneOut) -> Advantages:
    return _per_episode(episodes, *leave_one_out(*episodes.groups))


def _returns_to_go(episodes: Episodes, part: ReturnsToGo) -> Advantages:
    gains = reinforce(_rewards(episodes), episodes.judged_tokens, episodes.valid, part, episodes.sources)
    return Advantages(gains, episodes.acted)


def _group_baseline(episodes: Episodes, part: GroupBaseline) -> Advantages:
    gains, counts = reinforce_pp_baseline(*episodes.groups, episodes.judged_tokens, episodes.sources)
    return Advantages(gains, episodes.acted & counts[:, None])


def _gigpo(episodes: Episodes, part: GiGpo) -> Advantages:
    _refuse_advantage_mask("gigpo", episodes)
    if episodes.anchors is None:
        raise ValueError("gigpo compares turns that answered the same observation: give Episodes.anchors")
    turns = episodes.turn_rewards, episodes.valid_turns, episodes.anchors
    gains, counts = gigpo(*turns, episodes.group_ids, episodes.valid, part)
    return Advantages(gains, episodes.acted & counts[:, None])


def _istar(episodes: Episodes, part: ImplicitSteps) -> Advantages:
    _refuse_advantage_mask("istar", episodes)
    if episodes.step_rewards is None:
        raise ValueError("istar compares turns by a process reward model: give Episodes.step_rewards")
    gains, counts = istar(
        episodes.turn_rewards, episodes.valid_turns, episodes.step_rewards, *episodes.groups[1:], part
    )
    return Advantages(gains, episodes.acted & counts[:, None])


def _best_of_groups(episodes: Episodes, part: BestOfGroups) -> Advantages:
    kept = best_of_groups(*episodes.groups, part)
    return _per_episode(episodes, kept.to(episodes.turn_rewards.dtype), kept)


ESTIMATORS: Mapping[type[AdvantagePart], Callable[[Episodes, Any], Advantages]] = MappingProxyType(
    {
        TokenGae: _token_gae,
        TurnGae: _turn_gae,
        BilevelGae: _bilevel_gae,
        GroupRelative: _group_relative,
        LeaveOneOut: _leave_one_out,
        ReturnsToGo: _returns_to_go,
        GroupBaseline: _group_baseline,
        GiGpo: _gigpo,
        ImplicitSteps: _istar,
        BestOfGroups: _best_of_groups,
    }
)


def estimate(episodes: Episodes, part: AdvantagePart) -> Advantages:
    """Advantages of the episodes of ``with_penalties`` by the settings of a part.

    Raises:
        ValueError: episodes lack what the part reads, or shapes disagree.
    """
    return ESTIMATORS[type(part)](episodes, part)


def _per_episode(episodes: Episodes, per_row: Tensor, counts: Tensor) -> Advantages:
    """One number an episode; episodes that do not count are neither judged nor trained."""
    chosen = counts[:, None]
    return Advantages(broadcast_over_tokens(per_row, episodes.judged_tokens & chosen), episodes.acted & chosen)


def _whitened(episodes: Episodes, gains: Tensor, mask: Tensor, wanted: bool, returns: Tensor) -> Tensor:
    """Whitened over the mask of each source if that is wanted; zero outside the mask in any case."""
    if not wanted:
        return torch.where(mask, gains, 0.0)
    # the gains are what is left of returns after values were taken off: rounding is relative to the former
    size = float(torch.where(mask, returns, 0.0).abs().amax()) if mask.any() else 0.0
    return whiten_by(gains, mask, episodes.sources, size)


def _refuse_advantage_mask(name: str, episodes: Episodes) -> None:
    if episodes.advantage_mask is not None:
        raise ValueError(f"{name} judges turns, which have no advantage_mask: leave it out, or choose ppo or grpo")


def _values(episodes: Episodes) -> Tensor:
    if episodes.values is None:
        raise ValueError("this algorithm has a critic: give Episodes.values, or choose one without, such as grpo")
    return episodes.values


def _rewards(episodes: Episodes) -> Tensor:
    assert episodes.token_rewards is not None, "with_penalties comes first"
    return episodes.token_rewards
