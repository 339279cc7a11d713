"""Policy optimisation: updates in dreams, the critic before them, and the loop with real episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from imagination.settings.schema import require
from worldmodel.extras.synther.settings import SyntherSettings


@dataclass
class SelfImitationSettings:
    """Replay of the policy's own recent episodes above the running median return (SPEAR)."""

    share: float = 0.0  #: of replayed episodes among those of an update; 0 replays none
    coef: float = 0.1  #: weight of their loss, clipped around the policy that played them as in PPO
    clip_high: float = 0.2  #: ratios above 1 + clip_high have no gradient
    # The paper has 2048, where an update plays far more: of 72 episodes an update, that many reach back to the start.
    capacity: int = 512  #: of the buffer in episodes; the median is of as many returns
    max_age: int = 5  #: episodes older than so many updates are dropped

    def __post_init__(self) -> None:
        require(self, "above 0", "coef", "clip_high")
        require(self, "1 or more", "capacity", "max_age")


@dataclass
class TrainSettings:
    """Policy updates."""

    updates: int = 24  #: number of policy updates
    #: time limit from the first update, with the learning rate decaying towards it; 0 ends after the updates
    minutes: float = 0.0
    groups: int = 6  #: start states per update
    group_size: int = 12  #: episodes per start state
    #: episodes played per episode that is learned from. Above 1, unsolved ones are left out at random, solved ones
    #: rather where actions were refused (worldmodel.refusals) or malformed (GRPO-RoC)
    oversample: float = 1.0
    #: at most so many further groups per group, to replace groups whose episodes all earned the same
    extra_groups: float = 0.0
    epochs: int = 1  #: passes over the episodes of an update
    minibatches: int = 2  #: optimiser steps per pass
    lr: float = 5e-4  #: learning rate of AdamW
    lr_end: float = 1.0  #: learning rate of the last update, relative to lr; it decays linearly. 1 is constant
    weight_decay: float = 0.0  #: of AdamW
    grad_clip: float = 1.0  #: largest norm of the gradient
    #: largest KL divergence of an update, in nats per token; a longer step is halved until it fits. 0 is off
    max_kl: float = 0.0
    micro_tokens: int = 4096  #: per forward pass; changes memory and speed, not the gradient
    #: share of an update's groups that are played in the real environment; 0 takes no real step. Also points [update,
    #: share] with linear interpolation, [[0,0.5],[12,0]]
    real_share: float | list[list[float]] = 0.0
    #: share of an update's other groups that begin in tasks that no episode of their last group solved, as far as there
    #: are any; a number or points as above (DeepTravel)
    failure_share: float | list[list[float]] = 0.0
    #: share of expert episodes in an update, a number or points as above; 0 where the log has no solved ones
    expert_share: float | list[list[float]] = 0.1
    expert_coef: float = 0.1  #: weight of the loss on expert episodes
    #: cross_entropy; luffy, weighted by the expert's advantage in the group of its task, fastest where the policy finds
    #: a token unlikely; luffy_constant, the same with an advantage of 1. Never a ratio
    expert_form: Literal["cross_entropy", "luffy", "luffy_constant"] = "cross_entropy"
    #: weight of the cross-entropy of what the real world said after each action, in the policy's own real episodes
    #: (ECHO); 0 is off
    observation_coef: float = 0.0
    #: share of these observations that are learned from: after the actions that the policy was least sure of (PaW)
    observation_share: float = 1.0
    #: replay of the policy's own good episodes
    self_imitation: SelfImitationSettings = field(default_factory=SelfImitationSettings)
    #: outcome to reward, such as [[0.5,0.3],[1,1]]; each turn earns the increase; [] keeps the rewards as they are
    #: (SSL)
    reward_tiers: list[list[float]] = field(default_factory=list)
    #: value in a turn's record that serves as process reward, such as disagreement, probability; empty is none
    process: str = ""
    process_coef: float = 0.0  #: weight of the process reward; a penalty where it is negative
    #: train plays the training tasks; heldout the held-out ones, whose logged episodes then give start states and task
    #: memory
    tasks: Literal["train", "heldout"] = "train"
    task_episodes: int = 0  #: logged episodes of each held-out task that are used, at most; 0 is all
    #: number of tasks held out from training dreams; the policy with the best dreams of them is kept. 0 keeps the last
    #: policy
    validation_tasks: int = 0
    validate_every: int = 4  #: updates between two validations
    #: of start states, rollouts and minibatches; null is that of the run. Results depend on it: try several
    seed: int | None = None
    seeds: int = 3  #: training seeds per clone in demo-seeds
    #: real trains in the real environment instead of dreams, as a control that costs real steps
    world: Literal["dream", "real"] = "dream"
    #: updates that the oldest token of an episode may be behind the policy that learns from it; above 0, players go on
    #: while the policy learns (scale=ray)
    max_staleness: int = 0
    checkpoint_every: int = 4  #: updates between two saved training states
    #: updates between two policies that are kept in models/kept/, for the audit to rank; 0 keeps none
    keep_every: int = 0

    def __post_init__(self) -> None:
        require(self, "in [0, 1]", "observation_share", "lr_end")
        require(self, "above 0", "grad_clip")
        require(self, "1 or more", "oversample", "epochs", "minibatches", "groups", "group_size")
        require(self, "1 or more", "micro_tokens", "validate_every", "checkpoint_every")

    @property
    def played_per_group(self) -> int:
        """Episodes per start state before ``group_size`` of them are kept."""
        return round(self.oversample * self.group_size)


@dataclass
class CriticSettings:
    """Pre-training of the value head on logged returns, for algorithms with a critic."""

    #: agents of the log whose episodes are used, by prefix of their names; empty takes all
    agents: list[str] = field(default_factory=list)
    steps: int = 1000  #: optimiser steps
    batch: int = 256  #: states per step
    lr: float = 1e-2  #: learning rate of AdamW, with cosine decay to 0
    weight_decay: float = 5.0  #: of the weights, for states and returns of deviation 1
    #: synthetic transitions beside the logged ones; synther.ratio=0 makes none
    synther: SyntherSettings = field(default_factory=SyntherSettings)

    def __post_init__(self) -> None:
        require(self, "1 or more", "steps", "batch")
        require(self, "above 0", "lr")


@dataclass
class DigiQSettings:
    """Offline Q-learning on the log, and imitation of the best of several sampled actions (Digi-Q)."""

    #: agents of the log whose episodes are used, by prefix of their names; empty takes all
    agents: list[str] = field(default_factory=list)
    gamma: float = 0.95  #: discount per turn
    hidden: int = 256  #: width of the Q and V heads
    td_steps: int = 3000  #: optimiser steps of the heads
    batch: int = 256  #: logged turns per step
    lr: float = 1e-3  #: learning rate of AdamW, of the heads
    weight_decay: float = 0.01  #: of AdamW, of the heads
    polyak: float = 0.01  #: by how much of the difference the target networks follow the heads at each step
    candidates: int = 16  #: actions that the clone samples per logged state
    states: int = 2000  #: logged states in which it samples, at most, drawn at random; 0 is all
    steps: int = 250  #: optimiser steps of the imitation, otherwise as in clone

    def __post_init__(self) -> None:
        require(self, "1 or more", "hidden", "td_steps", "batch", "candidates", "steps")
        require(self, "above 0", "lr", "polyak")
        require(self, "in [0, 1]", "gamma", "polyak")


@dataclass
class ChoiceWeights:
    """Weights of the parts of a task's score, each in [0, 1]; parts that are unknown for a task are left out."""

    doubt: float = 1.0  #: disagreement of the ensemble in dreams of the task; with one member, its mean surprise
    gap: float = 1.0  #: difference of dreamed and real success on the task so far
    variance: float = 1.0  #: of success in its group of episodes: always solved, or never, teaches nothing
    thinness: float = 1.0  #: sparsity of the log on the task (count-based novelty)


@dataclass
class LoopSettings:
    """The Dyna loop: rounds of collecting a few real episodes, refitting the world model, and training in its dreams.

    Episodes are as long as collect.max_turns allows.
    """

    #: real steps of the whole loop, those of its first episodes included; raise it to continue a finished loop
    budget: int = 2000
    seconds: float = 0.0  #: of real requests after which no episode begins; 0 is no limit
    price: float = 0.0  #: largest cost at env.price a real step; 0 is no limit
    patience: float = 120.0  #: seconds without an answer of the real environment after which a round gives up
    #: source run whose world model and policy are used; this run has other tasks, and the source's log stays part of
    #: the data. Empty starts from the log of this run, or without one
    origin: str = ""
    policy: str = "policy-clone"  #: folder in models/ of the first policy
    first_episodes: int = 60  #: by scripted agents, where there is no log at all
    tasks: int = 8  #: played in the real environment per round
    group_size: int = 4  #: real episodes per task
    #: scored takes the tasks with the highest score (loop.weights); uniform draws them, the baseline
    choice: Literal["scored", "uniform"] = "scored"
    weights: ChoiceWeights = field(default_factory=ChoiceWeights)  #: of the parts of a task's score
    epsilon: float = 0.1  #: share of tasks that are drawn at random
    candidates: int = 64  #: tasks that are scored per round, at most, drawn at random; 0 is all
    looks: int = 4  #: dreamed rollouts per candidate task, for its score
    #: optimiser steps of a refit, from the last version's weights, otherwise as in fit; 0 never refits
    fit_steps: int = 300
    fit_lr: float = 5e-4  #: highest learning rate of a refit
    own_share: float = 0.25  #: share of a refit's episodes that the policy has played in the loop
    #: by how much a new version's log-likelihood of a held-back turn may be lower than the last one's, in nats
    tolerance: float = 0.1
    #: fixed dreams dream.max_turns; audited dreams as many turns as at least half of the held-back episodes stay right
    #: in this version, at least 2
    horizon: Literal["fixed", "audited"] = "fixed"
    updates: int = 4  #: of the policy per round
    first_updates: int = 0  #: of round 0, before any real episode; 0 is as many as in other rounds
    #: share of an update's groups that are the round's real episodes, a number or points [update, share]; 0 uses them
    #: for refits only
    real_share: float | list[list[float]] = 0.4
    #: play real episodes while the policy trains in dreams. Training data is then a round older, and slow environments
    #: cost no time
    overlap: bool = False
    keep: bool = False  #: keep the policy of each round, in models/kept/loop-<round>

    def __post_init__(self) -> None:
        require(self, "1 or more", "first_episodes", "tasks", "group_size", "looks", "updates")
        require(self, "in [0, 1]", "epsilon")
        require(self, "above 0", "own_share", "fit_lr")
        require(self, "in [0, 1)", "own_share")
        parts = (self.weights.doubt, self.weights.gap, self.weights.variance, self.weights.thinness)
        if min(parts) < 0 or not any(parts):
            raise ValueError("the parts of weights must be 0 or more, one of them above 0")
