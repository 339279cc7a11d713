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
        policy: folder in models/ of the policy to start from.
        first_episodes: by scripted agents, where the run has no log yet.
        tasks: that a round plays for real.
        group_size: real episodes of each of them.
        choice: scored takes tasks by what is known of them (loop.weights); uniform takes any, the baseline.
        weights: of the parts of a task's score.
        epsilon: share of tasks that are taken at random although others score higher.
        candidates: at most so many tasks, drawn at random, are scored in a round; 0 is all.
        looks: dreams of each of them, from which it is scored.
        fit_steps: optimiser steps of a refit, from the last version's weights; the rest is as in fit.
        fit_lr: highest learning rate of a refit.
        new_weight: of turns that no version in use has been fitted to, relative to others.
        tolerance: by how much a new version's log-likelihood of a held-back turn may be lower than the last one's, in
            nats.
        updates: of the policy in dreams, a round.
    """

    budget: int = 2000
    seconds: float = 0.0
    price: float = 0.0
    policy: str = "policy-clone"
    first_episodes: int = 60
    tasks: int = 8
    group_size: int = 2
    choice: Literal["scored", "uniform"] = "scored"
    weights: ChoiceWeights = field(default_factory=ChoiceWeights)
    epsilon: float = 0.1
    candidates: int = 64
    looks: int = 4
    fit_steps: int = 200
    fit_lr: float = 5e-4
    new_weight: float = 2.0
    tolerance: float = 0.01
    updates: int = 4

    def __post_init__(self) -> None:
        if min(self.budget, self.seconds, self.price, self.candidates, self.tolerance) < 0:
            raise ValueError("budget, seconds, price, candidates and tolerance must be 0 or more")
        if min(self.first_episodes, self.tasks, self.group_size, self.looks, self.fit_steps, self.updates) < 1:
            raise ValueError("first_episodes, tasks, group_size, looks, fit_steps and updates must be 1 or more")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must lie in [0, 1], got {self.epsilon}")
        if self.new_weight <= 0 or self.fit_lr <= 0:
            raise ValueError("new_weight and fit_lr must be above 0")
        parts = (self.weights.doubt, self.weights.gap, self.weights.variance, self.weights.thinness)
        if min(parts) < 0 or not any(parts):
            raise ValueError("the parts of weights must be 0 or more, one of them above 0")
