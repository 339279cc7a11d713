"""All settings of a run: one dataclass per component, with the defaults of the demo. YAML only selects among them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from policy.lm.settings import EngineSettings, ModelSettings
from worldmodel.outcome import Goal


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
class WorldModelSettings(ModelSettings):
    """The world model: which LM, in which form it writes what the world answers, how many of them, and who decides
    reward and end.

    Attributes:
        kind: text writes whole observations, delta edits of earlier ones, retrieval reads similar transitions first.
        members: of an ensemble that differ in their random start; 1 is a single model.
        lead: which member predicts a turn of a sampled dream: one drawn for it, or always the first.
        neighbours: transitions of the log before each action (retrieval).
        rarity: turns weigh count ** -rarity in training, by how often the log has them; 0 weighs all alike.
        unchanged_share: share of the training weight for turns that change nothing; null leaves it to rarity.
        refusals: regular expression for observations that say that nothing changed, besides the last one again.
        reasoning_tokens: most tokens that it may think before each prediction, thrown away after it; 0 is off. Logged
            turns with info["reasoning"] teach it to, and refine-world-model by how right the predictions get.
        goal: decides reward and end in place of the model where it is declared.
    """

    kind: Literal["text", "delta", "retrieval"] = "text"
    members: int = 1
    lead: Literal["drawn", "first"] = "drawn"
    neighbours: int = 3
    rarity: float = 0.5
    unchanged_share: float | None = None
    refusals: str = ""
    reasoning_tokens: int = 0
    goal: Goal = field(default_factory=Goal)

    def __post_init__(self) -> None:
        if self.members < 1 or self.neighbours < 1:
            raise ValueError("members and neighbours must be at least 1")
        if self.reasoning_tokens < 0:
            raise ValueError(f"reasoning_tokens must be 0 (off) or more, got {self.reasoning_tokens}")
        if self.rarity < 0:
            raise ValueError(f"rarity must be 0 or more, got {self.rarity}")
        if self.unchanged_share is not None and not 0 <= self.unchanged_share < 1:
            raise ValueError(f"unchanged_share must lie in [0, 1), or be null, got {self.unchanged_share}")
        if self.members > 1 and self.model and not self.lora.rank:
            raise ValueError(
                "members that start from the same checkpoint and train all its weights would be the same model: set "
                "worldmodel.lora.rank, whose random start tells them apart, or worldmodel.members=1"
            )
        try:
            re.compile(self.refusals)
        except re.error as error:
            raise ValueError(f"refusals={self.refusals!r} is no regular expression: {error}") from error


@dataclass
class FitSettings:
    """Supervised training of either model: warm-up, cosine decay to a tenth.

    Attributes:
        steps: optimiser steps.
        batch_tokens: of a step, padding included.
        optimizer: muon trains the matrices inside the layers by Muon and the rest by AdamW, adamw all; auto is muon for
            weights that start at random and adamw for trained ones and adapters.
        lr: highest learning rate; that of models from scratch, too high for pretrained ones.
        weight_decay: decoupled.
        warmup: steps until the highest learning rate.
        precision: bf16 trains under autocast; weights stay fp32.
    """

    steps: int = 1200
    batch_tokens: int = 3072
    optimizer: Literal["auto", "muon", "adamw"] = "auto"
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 50
    precision: Literal["bf16", "fp32"] = "bf16"


@dataclass
class RefineSettings:
    """RL of the world model on logged turns whose answer is known, by GRPO; algorithm.* counts where it says grpo.

    Attributes:
        updates: how often it is updated.
        turns: logged turns that each update asks about, rare ones more often (worldmodel.rarity).
        group_size: answers to each.
        metric: what an answer earns; exact is 1 for the right text, reward and end; diff_f1 is the share of changed
            lines that are right, for long pages.
        lr: of AdamW.
        minibatches: optimiser steps per update.
        supervised_share: share of logged episodes among the rows of an update, learned by cross-entropy as before.
        supervised_coef: weight of that cross-entropy.
    """

    updates: int = 40
    turns: int = 64
    group_size: int = 8
    metric: Literal["exact", "diff_f1"] = "exact"
    lr: float = 1e-4
    minibatches: int = 1
    supervised_share: float = 0.1
    supervised_coef: float = 0.1


@dataclass
class CloneSettings(FitSettings):
    """Behaviour cloning of the starting policy from a part of the log.

    A policy without a checkpoint of its own starts from the weights of the world model, which has read the same log: it
    knows the world before it learns to act in it.

    Attributes:
        agents: whose episodes to imitate, by the beginning of their names.
        from_world_model: start from the world model's weights, not from random ones.
        keep_every: keep the policy every so many steps, in models/kept/, for the audit to rank; 0 keeps none.
    """

    steps: int = 250
    lr: float = 1e-3
    agents: list[str] = field(default_factory=lambda: ["noisy"])
    from_world_model: bool = True
    keep_every: int = 0


@dataclass
class DreamSettings:
    """How the world model is dreamed in, and the guard that ends a dream, unpaid, where the model is unsure.

    What a turn below the guard's thresholds does is ``on_doubt``. ``truncate`` ends the dream there. ``downweight``
    goes on; a token then counts by the calibrated probability that all dreamed turns before it were right (a product,
    at least ``min_weight``), and nothing else changes: what a doubted turn pays is paid. ``branch`` truncates, and
    plays further groups from the middle of logged episodes, until the turns that were cut off are dreamed elsewhere.
    The dreams of ``evaluate`` always truncate.

    Attributes:
        max_turns: of a dreamed episode, those of the log before it not counted.
        branch: share of groups that start in the middle of a logged episode (short branched rollouts; MBPO, Janner et
            al. 2019).
        temperature: 1 samples from the world model, 0 dreams the most likely world.
        min_confidence: least probability of a whole predicted answer; longer answers need a lower one.
        min_outcome_confidence: the same for reward and end alone, where a prediction pays or ends the episode.
        max_tokens: of a predicted answer.
        on_doubt: what a turn below the thresholds does.
        min_weight: least weight of a token (downweight).
        extra_groups: most further groups for each of an update's own (branch).
        horizon: turns by update, such as [[0,4],[8,12]]; of train.world=real too; empty is max_turns throughout.
        horizon_shape: steps waits for the next point, linear goes straight to it, multiply and add grow from one (TTI).
        horizon_every: updates of a stage (multiply, add).
        horizon_growth: from stage to stage, a factor (multiply) or turns (add).
    """

    max_turns: int = 12
    branch: float = 0.5
    temperature: float = 1.0
    min_confidence: float = 0.8
    min_outcome_confidence: float = 0.9
    max_tokens: int = 96
    on_doubt: Literal["truncate", "downweight", "branch"] = "truncate"
    min_weight: float = 0.05
    extra_groups: float = 1.0
    horizon: list[list[int]] = field(default_factory=list)
    horizon_shape: Literal["steps", "linear", "multiply", "add"] = "steps"
    horizon_every: int = 1
    horizon_growth: float = 2.0


@dataclass
class TripwireSettings:
    """Wires that stop training in dreams when the policy seems to learn the world model's mistakes.

    Shares are of groups (start states) in the last updates; a wire trips where the lower end of the 95 % Wilson
    interval is above the bound. The policy then goes back to what it was when all wires were last quiet.

    Attributes:
        enabled: false trains on whatever happens, and the report says so.
        window: updates that are looked at together.
        memory: the same for evidence that is rare and sure: contradicted, favourite.
        min_groups: least number of groups that must show it.
        every: updates between two probes in the real games.
        real_episodes: of a probe, a real budget that you declare; 0 takes no real step.
        gap: how far dreamed success may exceed that of the probe.
        contradicted: share of paid groups that the log contradicts, among those where the log knows the answer.
        favourite: share of paid groups that are paid for one action, or a word in it, that never paid in the log.
        unseen: share of paid groups that are paid for any action that never paid in the log.
        short: a solution below so many times the turns of the log's shortest one is suspicious.
        loops: share of groups in which episodes repeat themselves.
        rejected: by how much the share of malformed or doubted predictions may rise.
        drift: how many times farther from the log's words than the farthest agent of the log.
    """

    enabled: bool = True
    window: int = 3
    memory: int = 8
    min_groups: int = 3
    every: int = 4
    real_episodes: int = 0
    gap: float = 0.2
    contradicted: float = 0.05
    favourite: float = 0.08
    unseen: float = 0.2
    short: float = 0.6
    loops: float = 0.5
    rejected: float = 0.2
    drift: float = 1.25


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
        weight_decay: of AdamW.
        grad_clip: largest norm of the gradient.
        micro_tokens: that a forward pass computes; changes memory and speed, not the gradient.
        expert_share: share of expert episodes among those of an update; 0 where the log has no solved ones.
        expert_coef: weight of their loss.
        expert_form: cross_entropy, or luffy, which learns fastest what the policy finds unlikely; never a ratio.
        self_imitation: replays the policy's own good episodes.
        reward_tiers: outcome to reward, such as [[0.5,0.3],[1,1]]; each turn earns what it climbs; [] is as paid (SSL).
        process: number of the turn's record that judges it, such as disagreement, probability; empty is none.
        process_coef: reward per unit of it; below 0 the policy avoids it.
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
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_tokens: int = 4096
    expert_share: float = 0.1
    expert_coef: float = 0.1
    expert_form: Literal["cross_entropy", "luffy"] = "cross_entropy"
    self_imitation: SelfImitationSettings = field(default_factory=SelfImitationSettings)
    reward_tiers: list[list[float]] = field(default_factory=list)
    process: str = ""
    process_coef: float = 0.0
    world: Literal["dream", "real"] = "dream"
    checkpoint_every: int = 4
    keep_every: int = 0


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
class AuditSettings:
    """Is the world model good enough to dream in? What is measured, and from where on it is good enough.

    The horizon, the temperature of policies and that of dreams are those of evaluate and dream.

    Attributes:
        world_model: folder under models/ of the one to audit.
        policies: folders of policies whose ranks in dream and reality are compared; none takes those of the run.
        min_policies: fewer than this are filled up with other temperatures, which differ less in quality.
        temperatures: those other temperatures, in the order in which they are taken.
        episodes: per policy and training game, in the dream and for real.
        judged: most real episodes of all policies together that are judged turn by turn.
        pairs: most pairs of actions of each kind.
        least_n: fewer turns or episodes than this decide nothing in the verdict.
        min_text: least share of next observations that are right, on held-out episodes.
        min_reward: least precision and recall of rewards on the policy's own actions.
        max_gap: largest mean absolute difference of dreamed and real success over the policies.
        min_spearman: least rank correlation of dreamed and real success.
        min_pairwise: least share of really solved episodes that the dreamed actions solve too.
        max_ece: largest expected calibration error on the policy's own actions.
        min_open_loop: least open-loop exact match up to the turn that is called safe.
        min_sensitivity: least sensitivity, specificity and share of refusals that it refuses too.
        runs: for audit-table, folders of runs; none takes seeds 0, 1 and 2, which are made where they are missing.
        world_models: for audit-table, folders under models/ of each run.
    """

    world_model: str = "worldmodel"
    policies: list[str] = field(default_factory=list)
    min_policies: int = 10
    temperatures: list[float] = field(default_factory=lambda: [0.5, 1.5, 0.0, 2.0, 0.75])
    episodes: int = 20
    judged: int = 400
    pairs: int = 400
    least_n: int = 20
    min_text: float = 0.9
    min_reward: float = 0.95
    max_gap: float = 0.05
    min_spearman: float = 0.9
    min_pairwise: float = 0.9
    max_ece: float = 0.05
    min_open_loop: float = 0.8
    min_sensitivity: float = 0.9
    runs: list[str] = field(default_factory=list)
    world_models: list[str] = field(default_factory=lambda: ["worldmodel"])


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
class AblationSettings:
    """What if? Each arm trains the same clone in dreams of the same world model, with some settings changed.

    Attributes:
        arms: a name and its settings in one text, such as "dream.min_confidence=0 tripwires.enabled=false"; an empty
            text is the run as it is. ablation=gating and ablation=masks are ready.
        runs: folders of runs to start from; empty: seeds 0, 1 and 2 of the demo, made as far as needed.
    """

    arms: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)


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
    worldmodel: WorldModelSettings = field(default_factory=WorldModelSettings)
    fit: FitSettings = field(default_factory=FitSettings)
    refine: RefineSettings = field(default_factory=RefineSettings)
    policy: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    clone: CloneSettings = field(default_factory=CloneSettings)
    dream: DreamSettings = field(default_factory=DreamSettings)
    tripwires: TripwireSettings = field(default_factory=TripwireSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)
    compare: CompareSettings = field(default_factory=CompareSettings)
    ablation: AblationSettings = field(default_factory=AblationSettings)
