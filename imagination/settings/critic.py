"""How a critic begins: its value head, fitted to the log's returns before PPO plays anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from worldmodel.synther.settings import SyntherSettings


@dataclass
class CriticSettings:
    """The value head before training, for algorithms with a critic.

    Attributes:
        agents: whose episodes it learns from, by the beginning of their names; none takes all of the log.
        steps: optimiser steps.
        batch: states of a step.
        lr: of its AdamW, down to 0 along a cosine.
        weight_decay: of the weights, for states and returns of deviation 1.
        synther: synthetic transitions beside the logged ones; synther.ratio=0 makes none.
    """

    agents: list[str] = field(default_factory=list)
    steps: int = 1000
    batch: int = 256
    lr: float = 1e-2
    weight_decay: float = 5.0
    synther: SyntherSettings = field(default_factory=SyntherSettings)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise ValueError("critic.steps and .batch must be at least 1")
        if self.lr <= 0 or self.weight_decay < 0:
            raise ValueError("critic.lr must be above 0 and critic.weight_decay 0 or more")
