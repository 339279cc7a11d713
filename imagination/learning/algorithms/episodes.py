"""What algorithms read and what they say: plain tensors, so that anyone's episodes can be judged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from imagination.learning.advantages import overlong_penalty, place_turn_rewards, with_kl_penalty


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


@dataclass(frozen=True, slots=True)
class Rewards:
    """What valid episodes earned, with everything that shapes it. Failed ones have zeros.

    Attributes:
        tokens: ``[batch, time]``, a turn's reward on its last action token.
        turns: ``[batch, turns]``, sums of ``tokens``.
        earned: ``[batch]``, what the environment paid, without shaping.
    """

    tokens: Tensor
    turns: Tensor
    earned: Tensor

    @property
    def returns(self) -> Tensor:
        """``[batch]``, undiscounted."""
        return self.turns.sum(1)


@dataclass(frozen=True, slots=True)
class Judged:
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
def rewards_of(
    episodes: Episodes, *, kl_coef: float = 0.0, max_tokens: int | None = None, buffer: int = 0, penalty: float = 1.0
) -> Rewards:
    """Rewards of the environment, or what they were shaped to, less KL and overlong penalties where asked for.

    Raises:
        ValueError: as ``place_turn_rewards``, ``with_kl_penalty`` and ``overlong_penalty``, or what they need is
            missing.
    """
    paid = episodes.turn_rewards.masked_fill(~episodes.valid[:, None], 0.0)
    index, acted = episodes.valid_turns, episodes.acted
    shaped = paid if episodes.shaped is None else episodes.shaped.masked_fill(~episodes.valid[:, None], 0.0)
    tokens = place_turn_rewards(shaped, index)
    if kl_coef:
        if episodes.kl is None:
            raise ValueError("the KL is a reward here: give Episodes.kl, or set kl_in=loss")
        tokens = with_kl_penalty(tokens, episodes.kl, acted, kl_coef)
    if buffer:
        if max_tokens is None:
            raise ValueError("overlong_buffer needs max_tokens, the most agent tokens an episode can have")
        fines = overlong_penalty(acted.sum(1), max_tokens, buffer, penalty).to(tokens.dtype)
        position = torch.arange(acted.shape[1], device=acted.device)
        last = torch.where(acted, position, 0).amax(1)  # without a token there is no penalty to place either
        tokens = tokens.scatter_add(1, last[:, None], fines[:, None])
    turns = torch.zeros_like(paid, dtype=tokens.dtype)
    if turns.numel():
        turns = turns.scatter_add(1, index.clamp(min=0), tokens.masked_fill(~acted, 0.0))
    return Rewards(tokens, turns, paid.sum(1))
