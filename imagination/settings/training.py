"""What one run of updates consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class SelfImitationSettings:
    """The policy's own recent episodes above the running median, learned from again (SPEAR).

    Attributes:
        share: of replayed episodes among those of an update; 0 replays none.
        coef: weight of their loss, PPO's clip around the policy that played them.
        clip_high: ratios above 1 + clip_high have no gradient.
        capacity: episodes kept, and returns that the median is of.
        max_age: updates after which an episode is too old.
    """

    share: float = 0.0
    coef: float = 0.1
    clip_high: float = 0.2
    # The paper has 2048, where an update plays far more: of 72 episodes an update, that many reach back to the start.
    capacity: int = 512
    max_age: int = 5


@dataclass
class TrainSettings:
    """Policy updates.

    Attributes:
        updates: how often the policy is updated.
        groups: start states per update.
        group_size: episodes per start state.
        extra_groups: most further groups for each of these, in place of groups whose episodes all earned the same.
        epochs: passes over the episodes of an update.
        minibatches: optimiser steps per pass.
        lr: of AdamW.
        lr_end: share of it that the last update has; it falls in a straight line. 1 keeps it as it is.
        weight_decay: of AdamW.
        grad_clip: largest norm of the gradient.
        max_kl: largest KL divergence, in nats a token, of the policy after an update from the one before it; a longer
            step is halved until it is no longer. 0 is off.
        micro_tokens: that a forward pass computes; changes memory and speed, not the gradient.
        real_share: share of an update's groups that are played in the real games beside the dreams; 0 takes no real
            step. Also points [update, share] with straight lines between, [[0,0.5],[12,0]].
        expert_share: share of expert episodes among those of an update, a number or points as above; 0 where the log
            has no solved ones.
        expert_coef: weight of their loss.
        expert_form: cross_entropy; luffy, by the expert's advantage among the episodes of its task, fastest where the
            policy finds a token unlikely; luffy_constant, the same with an advantage of 1. Never a ratio.
        self_imitation: replays the policy's own good episodes.
        reward_tiers: outcome to reward, such as [[0.5,0.3],[1,1]]; each turn earns what it climbs; [] is as paid (SSL).
        process: number of the turn's record that judges it, such as disagreement, probability; empty is none.
        process_coef: reward per unit of it; below 0 the policy avoids it.
        tasks: whose tasks are played: those that the models were fitted to, or the held-out ones, by whose logged
            episodes dreams then begin and facts are known.
        task_episodes: at most so many logged episodes of each held-out task are known; 0 is all.
        validation_tasks: so many tasks are left out of the dreams that are learned from; dreams of them say which
            policy of the training was best, and that one is kept. 0 keeps the last one.
        validate_every: updates between two validations.
        seed: of start states, rollouts and minibatches; null is that of the run. Results hang on it, so try several.
        seeds: how many training seeds demo-seeds gives each clone.
        world: real plays the same updates in the real games, the control that costs real steps.
        checkpoint_every: updates between two saved training states.
        keep_every: keep the policy every so many updates, in models/kept/, for the audit to rank; 0 keeps none.
    """

    updates: int = 24
    groups: int = 6
    group_size: int = 12
    extra_groups: float = 0.0
    epochs: int = 1
    minibatches: int = 2
    lr: float = 5e-4
    lr_end: float = 1.0
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    max_kl: float = 0.0
    micro_tokens: int = 4096
    real_share: float | list[list[float]] = 0.0
    expert_share: float | list[list[float]] = 0.1
    expert_coef: float = 0.1
    expert_form: Literal["cross_entropy", "luffy", "luffy_constant"] = "cross_entropy"
    self_imitation: SelfImitationSettings = field(default_factory=SelfImitationSettings)
    reward_tiers: list[list[float]] = field(default_factory=list)
    process: str = ""
    process_coef: float = 0.0
    tasks: Literal["train", "heldout"] = "train"
    task_episodes: int = 0
    validation_tasks: int = 0
    validate_every: int = 4
    seed: int | None = None
    seeds: int = 3
    world: Literal["dream", "real"] = "dream"
    checkpoint_every: int = 4
    keep_every: int = 0
