"""How a policy learns from what it played."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AlgorithmName = Literal[
    "grpo",
    "ppo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gigpo",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "st_ppo",
    "epo",
    "turn_ppo",
    "bilevel_ppo",
    "filtered_bc",
]


@dataclass
class ProgressSettings:
    """Stepwise progress attribution (SPA-RL): an estimator spreads an episode's return over its turns.

    Attributes:
        enabled: turns are judged by what the estimator says they contributed.
        carried_out: reward of an action that the world carried out, by worldmodel.refusals; the paper adds 0.5.
        lr: of its AdamW.
        steps: its optimiser steps per update.
        hidden: its width.
    """

    enabled: bool = False
    # Not the paper's 0.5: where a solved task is worth 1, a dozen executable actions would be worth six.
    carried_out: float = 0.0
    lr: float = 3e-3
    steps: int = 100
    hidden: int = 64


@dataclass
class AlgorithmSettings:
    """How the policy learns from episodes.

    Without a critic, against the other episodes of a group:
      grpo        deviations from the group, PPO's clip; the default
      dr_grpo     the same without the deviation in the denominator and without a bias for length
      rloo        against the mean of the others of the group
      dapo        grpo with more room upwards and without groups whose episodes are all alike
      gspo        one ratio a sequence; gspo_token gives each token a gradient of its own
      cispo       clips the weight of a token, never its gradient
      epo         grpo with an entropy bonus and a band around the entropy so far
      gigpo       also compares turns that answered the same observation
      reinforce_pp_baseline    the group's mean, then whitened over the update
    Without groups: reinforce (one step an update), reinforce_pp (whitened returns to go).
    With a critic: ppo (tokens), turn_ppo (turns), bilevel_ppo (both), st_ppo (clips turns).
    By imitation: filtered_bc learns the best episodes of each group by heart.

    null is the algorithm's own default; a key that it does not have is refused, with the names of those that have it.

    Attributes:
        name: of the algorithm; algorithm=ppo is short for it.
        clip_low: ratios below 1 - clip_low have no gradient; 0.2, gspo 0.0003.
        clip_high: ratios above 1 + clip_high have no gradient; 0.2, dapo 0.28, gspo 0.0004.
        dual_clip: where the advantage is negative, the loss is at most so many times it; 3, dapo none; 0 is none.
        ratio_min: least weight of a token (cispo); 0.
        ratio_max: largest weight of a token (cispo); 5.
        token_form: the gradient of each token's own ratio (gspo).
        correct_bias: weigh turns down that are far outside the clip (st_ppo true, turn_ppo false).
        normalise_std: divide by the spread of the group (grpo and its kin, gigpo).
        std_eps: added to that spread, in units of reward; 0.0001.
        aggregation: token_mean counts all tokens alike, sequence_mean all episodes, constant divides by max_tokens.
        gamma: discount per agent token, 1; per turn for turn_ppo, 1, and gigpo, 0.95.
        lam: of GAE (ppo, st_ppo, turn_ppo); 0.95.
        turn_gamma: discount per turn (bilevel_ppo); 0.95.
        turn_lam: of GAE over turns (bilevel_ppo); 0.95.
        token_gamma: discount per token of a turn (bilevel_ppo); 1.
        token_lam: of GAE over the tokens of a turn (bilevel_ppo); 1.
        whiten: advantages of the update to mean 0 and deviation 1 (with a critic; reinforce false, reinforce_pp true).
        step_weight: of what turns with the same observation say (gigpo); 1.
        keep_fraction: of each group that is imitated (filtered_bc); 0.25.
        keep_min_return: least return of an imitated episode (filtered_bc); 0.99.
        value_coef: weight of the value loss (with a critic); 0.5.
        value_clip: how far a value may move in an update (with a critic); 0.2; 0 is without bound.
        kl_coef: weight of the KL to the cloned policy; 0, which keeps no copy of it.
        kl_estimator: k3, reinforce_pp_baseline k2; k1 (reinforce_pp) only as a reward.
        kl_in: loss, or reward (reinforce_pp), which takes the KL from the reward of each token.
        entropy_coef: weight of an entropy bonus; 0, epo 0.001.
        entropy_smoothing: weight of the penalty for leaving the band, within the bonus's; 0, epo 1.
        entropy_low: lower end of the band, as a share of the mean entropy of earlier updates; 0.8.
        entropy_high: upper end of the band; 1.2.
        drop_equal_groups: leave out groups whose episodes earned the same; true for grpo and dapo.
        max_tokens: most agent tokens of an episode; dream.max_turns times max_action_tokens.
        overlong_buffer: the last so many tokens before max_tokens in which length is punished; 0 punishes none.
        overlong_penalty: at max_tokens, in units of reward; 1.
        progress: spreads the outcome over turns, for algorithms that credit turns or tokens.
        tis_cap: largest weight of a token that the trainer finds likelier than the engine that sampled it; 0 is off.
        loss_mask: for ablation only: false also trains on what the world said.
        advantage_mask: for ablation only: false also estimates advantages on what the world said.
    """

    name: AlgorithmName = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    token_form: bool | None = None
    correct_bias: bool | None = None
    normalise_std: bool | None = None
    std_eps: float | None = None
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    gamma: float | None = None
    lam: float | None = None
    turn_gamma: float | None = None
    turn_lam: float | None = None
    token_gamma: float | None = None
    token_lam: float | None = None
    whiten: bool | None = None
    step_weight: float | None = None
    keep_fraction: float | None = None
    keep_min_return: float | None = None
    value_coef: float | None = None
    value_clip: float | None = None
    kl_coef: float | None = None
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    kl_in: Literal["loss", "reward"] | None = None
    entropy_coef: float | None = None
    entropy_smoothing: float | None = None
    entropy_low: float | None = None
    entropy_high: float | None = None
    drop_equal_groups: bool | None = None
    max_tokens: int | None = None
    overlong_buffer: int | None = None
    overlong_penalty: float | None = None
    progress: ProgressSettings = field(default_factory=ProgressSettings)
    tis_cap: float = 2.0
    loss_mask: bool = True
    advantage_mask: bool = True
