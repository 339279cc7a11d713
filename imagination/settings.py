"""All settings of a run: one dataclass per component, with the defaults of the demo. YAML only selects among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from policy.lm.settings import EngineSettings, ModelSettings


class UserError(ValueError):
    """Something the user can mend. The message says what is wrong and what to do; no traceback is shown."""


@dataclass
class GamesSettings:
    """Which TextWorld games to generate. Every seed of a run has its own games.

    Attributes:
        train: games to log, dream and be judged in.
        heldout: games that nothing is trained on.
        rooms: of a game.
        objects: of a game, those of no use included.
        quest_length: commands that solve a game at best; the goal names only the last.
    """

    train: int = 6
    heldout: int = 6
    rooms: int = 3
    objects: int = 5
    quest_length: int = 5


@dataclass
class CollectSettings:
    """The log: scripted agents of many skills in the real games.

    Attributes:
        episodes: per training game.
        heldout_episodes: per held-out game, only to measure the world model there.
        max_turns: at which a logged episode is cut.
        validation: share of the episodes of training games that no model trains on.
        workers: processes that play real games, for every stage.
    """

    episodes: int = 500
    heldout_episodes: int = 10
    max_turns: int = 12
    validation: float = 0.05
    workers: int = 4


@dataclass
class FitSettings:
    """Supervised training of either model: AdamW, warm-up, cosine decay to a tenth.

    Attributes:
        steps: optimiser steps.
        batch_tokens: of a step, padding included.
        lr: highest learning rate; that of models from scratch, too high for pretrained ones.
        weight_decay: of AdamW.
        warmup: steps until the highest learning rate.
        precision: bf16 trains under autocast; weights stay fp32.
    """

    steps: int = 1200
    batch_tokens: int = 3072
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 50
    precision: Literal["bf16", "fp32"] = "bf16"


@dataclass
class CloneSettings(FitSettings):
    """Behaviour cloning of the starting policy from a part of the log.

    A policy without a checkpoint of its own starts from the weights of the world model, which has read the same log: it
    knows the world before it learns to act in it.

    Attributes:
        agents: whose episodes to imitate, by the beginning of their names.
        from_world_model: start from the world model's weights, not from random ones.
    """

    steps: int = 250
    lr: float = 1e-3
    agents: list[str] = field(default_factory=lambda: ["noisy"])
    from_world_model: bool = True


@dataclass
class DreamSettings:
    """How the world model is dreamed in, and the guard that ends a dream, unpaid, where the model is unsure.

    Attributes:
        max_turns: of a dreamed episode, those of the log before it not counted.
        branch: share of groups that start in the middle of a logged episode (short branched rollouts; MBPO, Janner et
            al. 2019).
        temperature: 1 samples from the world model, 0 dreams the most likely world.
        min_confidence: least probability of a whole predicted answer; longer answers need a lower one.
        min_outcome_confidence: the same for reward and end alone, where a prediction pays or ends the episode.
        max_tokens: of a predicted answer.
    """

    max_turns: int = 12
    branch: float = 0.5
    temperature: float = 1.0
    min_confidence: float = 0.8
    min_outcome_confidence: float = 0.9
    max_tokens: int = 96


@dataclass
class AlgorithmSettings:
    """How the policy learns from episodes.

    Attributes:
        name: grpo compares the episodes of a group; ppo has a value head and GAE.
        clip_low: ratios below 1 - clip_low have no gradient.
        clip_high: ratios above 1 + clip_high have no gradient.
        normalise_std: grpo divides by the spread of the group.
        kl_coef: weight of the KL (k3) to the cloned policy; 0 keeps no copy of it.
        gamma: discount per token (ppo).
        lam: of GAE (ppo).
        value_coef: weight of the value loss (ppo).
        value_clip: how far a value may move in an update (ppo).
        tis_cap: largest weight with which a token counts that the trainer finds likelier than the engine did that
            sampled it (truncated importance sampling); costs time only where they differ by more than 1 %. 0 takes the
            engine's log-probs as they are.
    """

    name: Literal["grpo", "ppo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalise_std: bool = True
    kl_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    value_coef: float = 0.5
    value_clip: float = 0.2
    tis_cap: float = 2.0


@dataclass
class TrainSettings:
    """Policy updates.

    Attributes:
        updates: how often the policy is updated.
        groups: start states per update.
        group_size: episodes per start state.
        epochs: passes over the episodes of an update.
        minibatches: optimiser steps per pass.
        lr: of AdamW.
        weight_decay: of AdamW.
        grad_clip: largest norm of the gradient.
        micro_tokens: that a forward pass computes; changes memory and speed, not the gradient.
        expert_share: share of expert episodes among those of an update.
        expert_coef: weight of their cross-entropy.
        world: real plays the same updates in the real games, the control that costs real steps.
        checkpoint_every: updates between two saved training states.
    """

    updates: int = 24
    groups: int = 6
    group_size: int = 12
    epochs: int = 1
    minibatches: int = 2
    lr: float = 5e-4
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_tokens: int = 4096
    expert_share: float = 0.1
    expert_coef: float = 0.1
    world: Literal["dream", "real"] = "dream"
    checkpoint_every: int = 4


@dataclass
class EvaluateSettings:
    """The verdict in the real games.

    Attributes:
        episodes: per training game, real and dreamed.
        heldout_episodes: per held-out game.
        max_turns: at which an episode counts as lost.
        temperature: at which the policy plays; 0 is greedy.
    """

    episodes: int = 40
    heldout_episodes: int = 20
    max_turns: int = 12
    temperature: float = 1.0


@dataclass
class CompareSettings:
    """Dreams beside reality: the same actions in both worlds, and the same policy free in both.

    The policy's dreams are replayed for real, where this program can play the run's world; logged episodes are dreamed
    again with their own actions, which needs no world at all.

    Attributes:
        policy: folder in models/ of the run, such as policy-clone, or any path; empty compares logged episodes only.
        episodes: per task, dreamed and, where the world can be played, real.
        logged: per task, of those that no model was trained on.
        splits: of tasks; [] takes all that there are.
        temperature: at which the policy plays; 0 is greedy.
        guard: end dreams where the world model is unsure, as in training; false shows what it would go on to say.
        pairs: that the terminal shows, those that part earliest.
        show: id of one pair of the last comparison, to print it; nothing is played then.
    """

    policy: str = "policy"
    episodes: int = 20
    logged: int = 10
    splits: list[str] = field(default_factory=list)
    temperature: float = 1.0
    guard: bool = True
    pairs: int = 3
    show: str = ""


@dataclass
class Config:
    """A whole run.

    Attributes:
        run: names the folder under ``output``; the same name again goes on where it stopped.
        output: folder of all runs.
        seed: of games, log, weights, order of data and dreams.
        vocab_size: of the tokenizer of models from scratch.
        max_action_tokens: at which an action is ended by force.
    """

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
    engine: EngineSettings = field(default_factory=EngineSettings)
    clone: CloneSettings = field(default_factory=CloneSettings)
    dream: DreamSettings = field(default_factory=DreamSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    compare: CompareSettings = field(default_factory=CompareSettings)
