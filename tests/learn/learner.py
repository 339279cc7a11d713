"""A policy of tables, its critic, and one update with any algorithm of the registry."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from imagination.learning.advantages.group import preferences
from imagination.learning.advantages.shaping import implicit_step_rewards
from imagination.learning.algorithms import Algorithm, Episodes, total
from imagination.learning.losses.auxiliary import EntropyHistory, trajectory_preference_loss
from imagination.learning.losses.policy import row_segments, turn_segments
from imagination.learning.losses.terms import LossInputs, token_entropy, token_logprobs
from imagination.settings.algorithm_parts import ImplicitSteps
from tests.learn.world import OBJECTS, STATES, VERBS, Played, play, value_of


class Tables(nn.Module):
    """Logits and values for every state, and for every state and verb."""

    def __init__(self) -> None:
        super().__init__()
        self.verbs = nn.Parameter(torch.zeros(STATES, VERBS))
        self.things = nn.Parameter(torch.zeros(STATES, VERBS, OBJECTS))
        self.worth = nn.Parameter(torch.zeros(STATES, VERBS + 1))

    def logits(self, played: Played) -> Tensor:
        """``[batch, time, 2]``; on tokens that are not the policy's anything."""
        state, first = played.state.clamp(min=0), played.first.clamp(min=0)
        return torch.where((played.first < 0)[..., None], self.verbs[state], self.things[state, first])

    def values(self, played: Played) -> Tensor:
        """``[batch, time]``, before each token."""
        return self.worth[played.state.clamp(min=0), played.first + 1]

    @torch.no_grad()
    def value(self) -> float:
        """Exact value of the policy."""
        both = self.verbs.softmax(-1)[..., None] * self.things.softmax(-1)
        return value_of(both.flatten(1).tolist())


@dataclass
class Learner:
    """A policy in training.

    Attributes:
        algorithm: from the registry.
        seed: of all that is sampled.
        group_size: episodes per start.
        steps: optimiser steps on the episodes of an update.
        lr: of Adam.
    """

    algorithm: Algorithm
    seed: int
    group_size: int = 16
    steps: int = 2
    lr: float = 0.05
    tables: Tables = field(default_factory=Tables)

    def __post_init__(self) -> None:
        self.algorithm.check_run(group_size=self.group_size, steps_per_update=self.steps)
        self.rng = torch.Generator().manual_seed(self.seed)
        self.optimizer = torch.optim.Adam(self.tables.parameters(), lr=self.lr)
        self.entropies = EntropyHistory()
        self.prm = Tables()
        part = self.algorithm.advantage
        lr = self.lr * part.prm_lr if isinstance(part, ImplicitSteps) else 0.0
        self.prm_optimizer = torch.optim.Adam(self.prm.parameters(), lr=lr)

    def step_rewards(self, played: Played, beta: float) -> Tensor:
        """``[batch, turns]``, after a step of the process reward model."""
        acted, turns = (played.turn >= 0) & played.valid[:, None], played.rewards.shape[1]

        def rewards() -> Tensor:
            logprobs = token_logprobs(self.prm.logits(played), played.token, mask=acted)
            return implicit_step_rewards(logprobs, played.logprobs, played.turn.where(acted, -1), turns, beta)

        valid = played.valid.nonzero()[:, 0]
        better, worse = preferences(played.rewards[valid].sum(1), played.groups[valid])
        if len(better):
            self.prm_optimizer.zero_grad()
            trajectory_preference_loss(rewards()[valid].nansum(1), better, worse).loss.backward()
            self.prm_optimizer.step()
        return rewards().detach()

    def update(self) -> None:
        """Play a group from each start, judge, step."""
        tables, algorithm = self.tables, self.algorithm
        played = play(tables.verbs.softmax(-1), tables.things.softmax(-1), self.group_size, self.rng)
        critic = algorithm.critic is not None
        old_values = tables.values(played).detach()
        part = algorithm.advantage
        step_rewards = self.step_rewards(played, part.prm_beta) if isinstance(part, ImplicitSteps) else None
        judged = algorithm.judge(
            Episodes(
                turn_rewards=played.rewards,
                action_turn_index=played.turn,
                group_ids=played.groups,
                valid=played.valid,
                anchors=played.anchors,
                step_rewards=step_rewards,
                values=old_values if critic else None,
            )
        )
        weight, denominator = algorithm.weigh(judged.trained)
        if not denominator:
            return
        for step in range(self.steps):
            logits = tables.logits(played)
            entropy = token_entropy(logits)
            terms = algorithm.losses(
                LossInputs(
                    logprobs=token_logprobs(logits, played.token, mask=judged.trained),
                    behavior_logprobs=played.logprobs,
                    advantages=judged.advantages,
                    weight=weight,
                    sequences=row_segments(judged.trained),
                    turns=turn_segments(played.turn),
                    entropy=entropy,
                    values=tables.values(played) if critic else None,
                    old_values=old_values if critic else None,
                    returns=judged.returns,
                    learned=judged.learned,
                ),
                denominator,
                critic_denominator=float(judged.learned.sum()) if judged.learned is not None else None,
                entropy_history=self.entropies.mean,
            )
            self.optimizer.zero_grad()
            total(terms).backward()
            self.optimizer.step()
            if step == 0:
                found = entropy.detach()[judged.trained].mean()
        self.entropies = self.entropies.add(float(found))
