"""The loop of a little reality and many dreams: what it may spend, where it acts, which world model it trusts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class ChoiceWeights:
    """What makes a task worth real episodes; each part lies in [0, 1], and what is not known of a task is left out.

    Attributes:
        doubt: disagreement of the world model's members on their dreams of it; of one member, its mean surprise.
        gap: distance of dreamed and real success there so far.
        variance: of success within its group of episodes: always solved, or never, teaches nothing.
        thinness: of the log there.
    """

    doubt: float = 1.0
    gap: float = 1.0
    variance: float = 1.0
    thinness: float = 1.0


@dataclass
class LoopSettings:
    """Rounds of acting a little for real, fitting the world model again, and improving the policy in its dreams.

    Episodes are as long as collect.max_turns allows.

    Attributes:
        budget: real steps of the whole loop, those of its first episodes included; raise it to go on with a finished
            loop.
        seconds: inside real requests after which no episode begins; 0 is no limit.
        price: that may be spent at env.price a real step; 0 is no limit.
        patience: seconds that a round waits for a real world that answers nothing, before it gives up.
        origin: another run, whose world model and policy meet this run's tasks, which must be others; its log stays
            known. Empty begins with the log of this run, or without one.
        policy: folder in models/ of the policy to start from.
        first_episodes: by scripted agents, where there is no log at all.
        tasks: that a round plays for real.
        group_size: real episodes of each of them.
        choice: scored takes tasks by what is known of them (loop.weights); uniform takes any, the baseline.
        weights: of the parts of a task's score.
        epsilon: share of tasks that are taken at random although others score higher.
        candidates: at most so many tasks, drawn at random, are scored in a round; 0 is all.
        looks: dreams of each of them, from which it is scored.
        fit_steps: optimiser steps of a refit, from the last version's weights; the rest is as in fit; 0 keeps the first
            version.
        fit_lr: highest learning rate of a refit.
        own_share: share of the episodes that a refit reads which the policy has played in the loop.
        tolerance: by how much a new version's log-likelihood of a held-back turn may be lower than the last one's, in
            nats.
        horizon: fixed dreams dream.max_turns; audited dreams as many turns as at least half of the held-back episodes
            stay true in this version, at least 2.
        updates: of the policy, a round.
        first_updates: of round 0, before anything was played for real; 0 is as many as in other rounds.
        real_share: share of an update's groups that are the round's real episodes, a number or points [update, share];
            0 only fits to them.
        overlap: play for real while the policy learns in dreams. What it learns from is then a round older, and slow
            worlds cost no time.
        keep: keep the policy of each round, in models/kept/loop-<round>.
    """

    budget: int = 2000
    seconds: float = 0.0
    price: float = 0.0
    patience: float = 120.0
    origin: str = ""
    policy: str = "policy-clone"
    first_episodes: int = 60
    tasks: int = 8
    group_size: int = 4
    choice: Literal["scored", "uniform"] = "scored"
    weights: ChoiceWeights = field(default_factory=ChoiceWeights)
    epsilon: float = 0.1
    candidates: int = 64
    looks: int = 4
    fit_steps: int = 300
    fit_lr: float = 5e-4
    own_share: float = 0.25
    tolerance: float = 0.1
    horizon: Literal["fixed", "audited"] = "fixed"
    updates: int = 4
    first_updates: int = 0
    real_share: float | list[list[float]] = 0.4
    overlap: bool = False
    keep: bool = False

    def __post_init__(self) -> None:
        least = (self.budget, self.seconds, self.price, self.patience, self.candidates, self.tolerance)
        if min(*least, self.fit_steps, self.first_updates) < 0:
            raise ValueError(
                "budget, seconds, price, patience, candidates, tolerance, fit_steps and first_updates must be 0 or more"
            )
        if min(self.first_episodes, self.tasks, self.group_size, self.looks, self.updates) < 1:
            raise ValueError("first_episodes, tasks, group_size, looks and updates must be 1 or more")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must lie in [0, 1], got {self.epsilon}")
        if not 0 < self.own_share < 1:
            raise ValueError(f"own_share must lie between 0 and 1, got {self.own_share}")
        if self.fit_lr <= 0:
            raise ValueError("fit_lr must be above 0")
        parts = (self.weights.doubt, self.weights.gap, self.weights.variance, self.weights.thinness)
        if min(parts) < 0 or not any(parts):
            raise ValueError("the parts of weights must be 0 or more, one of them above 0")
