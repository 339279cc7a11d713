"""All settings of a run: one dataclass per component, with the defaults of the demo. YAML only selects among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from policy.lm.settings import ModelSettings


class UserError(ValueError):
    """Something the user can mend. The message says what is wrong and what to do; no traceback is shown."""


@dataclass
class GamesSettings:
    """Which TextWorld games to generate. Every seed of a run has its own games."""

    train: int = 6
    heldout: int = 6
    rooms: int = 3
    objects: int = 5
    quest_length: int = 5


@dataclass
class CollectSettings:
    """The log: how many scripted episodes per training game, by whom, and how long.

    ``mediocre`` names the agents whose episodes the policy is cloned from; ``validation`` is the share of episodes that
    no model trains on; ``heldout_episodes`` per held-out game serve only to measure the world model there.
    """

    episodes: int = 500
    heldout_episodes: int = 10
    max_turns: int = 12
    validation: float = 0.05
    workers: int = 4


@dataclass
class FitSettings:
    """Supervised training of either model: AdamW, warm-up, cosine decay to a tenth."""

    steps: int = 1200
    batch_tokens: int = 3072
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 50
    precision: Literal["bf16", "fp32"] = "bf16"


@dataclass
class CloneSettings(FitSettings):
    """Behaviour cloning of the starting policy from the part of the log that ``agents`` played.

    A policy without a checkpoint of its own starts from the weights of the world model (``from_world_model``), which
    has read the same log: it knows the world before it learns to act in it.
    """

    steps: int = 250
    lr: float = 1e-3
    agents: list[str] = field(default_factory=lambda: ["noisy"])
    from_world_model: bool = True


@dataclass
class DreamSettings:
    """How the world model is dreamed in.

    ``branch`` is the share of groups that start in the middle of a logged episode (short branched rollouts; MBPO,
    Janner et al. 2019); ``temperature`` 0 dreams the most likely world. The guard ends a dream, unpaid, where the
    world model gives its own prediction less than ``min_confidence``, or a reward or end less than
    ``min_outcome_confidence``.
    """

    max_turns: int = 12
    branch: float = 0.5
    temperature: float = 1.0
    min_confidence: float = 0.8
    min_outcome_confidence: float = 0.9
    max_tokens: int = 96


@dataclass
class AlgorithmSettings:
    """How the policy learns from episodes: ``grpo`` (no critic) or ``ppo`` (value head and GAE)."""

    name: Literal["grpo", "ppo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalise_std: bool = True
    kl_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    value_coef: float = 0.5
    value_clip: float = 0.2


@dataclass
class TrainSettings:
    """Policy updates. ``world=real`` plays the same updates in the real games: the control that costs real steps."""

    updates: int = 24
    groups: int = 6
    group_size: int = 12
    epochs: int = 1
    minibatches: int = 2
    lr: float = 5e-4
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_tokens: int = 8192
    expert_share: float = 0.1
    expert_coef: float = 0.1
    world: Literal["dream", "real"] = "dream"
    checkpoint_every: int = 4


@dataclass
class EvaluateSettings:
    """The verdict in the real games: episodes per task, played at ``temperature``."""

    episodes: int = 40
    heldout_episodes: int = 20
    max_turns: int = 12
    temperature: float = 1.0


@dataclass
class Config:
    """A whole run. ``run`` names the folder under ``output``; the same name again goes on where it stopped."""

    run: str = "default"
    output: str = "outputs"
    seed: int = 0
    vocab_size: int = 2048
    max_action_tokens: int = 16
    games: GamesSettings = field(default_factory=GamesSettings)
    collect: CollectSettings = field(default_factory=CollectSettings)
    worldmodel: ModelSettings = field(default_factory=ModelSettings)
    fit: FitSettings = field(default_factory=FitSettings)
    policy: ModelSettings = field(default_factory=ModelSettings)
    clone: CloneSettings = field(default_factory=CloneSettings)
    dream: DreamSettings = field(default_factory=DreamSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
