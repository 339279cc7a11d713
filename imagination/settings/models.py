"""How both models are trained on the log: world model, its refinement, the clone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from policy.lm.settings import AUTO, ModelSettings
from worldmodel.diffusion.settings import DiffusionSettings
from worldmodel.goal import Goal
from worldmodel.screen.settings import ScreenSettings


@dataclass
class WorldModelSettings(ModelSettings):
    """The world model: which LM, in which form it writes what the world answers, how many of them, and who decides
    reward and end.

    Attributes:
        model: as in policy.model, or auto: the base model where its tokenizer writes the log in at most 1.5 times the
            tokens of one of the log's own; one from scratch elsewhere, and where sizes or members are set.
        kind: text writes whole observations, delta edits of earlier ones, retrieval reads similar transitions first;
            diffusion fills in whole observations from all sides (worldmodel.diffusion);
            screen draws the next screenshot and is a model of its own, beside the one of text.
        members: of an ensemble that differ in their random start; 1 is a single model.
        lead: which member predicts a turn of a sampled dream: one drawn for it, or always the first.
        neighbours: transitions of the log before each action (retrieval).
        facts: how many facts of a task, which other logged episodes of it have shown, it reads at most; 0 is off.
        facts_share: share of the logged episodes that it is trained on with facts, so that it can do without.
        edited_in_full: what an edit has made follows it in the prompt (delta); false keeps prompts of long pages short.
        rarity: turns weigh count ** -rarity in training, by how often the log has them; 0 weighs all alike.
        unchanged_share: share of the training weight for turns that change nothing; null leaves it to rarity.
        refusals: regular expression for observations that say that nothing changed, besides the last one again.
        reasoning_tokens: most tokens that it may think before each prediction, thrown away after it; 0 is off. Logged
            turns with info["reasoning"] teach it to, and refine-world-model by how right the predictions get.
        rules: what rules mined from the log answer in place of the model: repair, all that they know, and answers that
            break an invariant of the log are sampled again; refuse, what cannot be done; off, nothing.
        resamples: how often at most such an answer is sampled again (repair).
        goal: decides reward and end in place of the model where it is declared.
        diffusion: canvas and sampler, for kind=diffusion.
        screen: the model of pictures, for kind=screen.
    """

    model: str = AUTO
    kind: Literal["text", "delta", "retrieval", "diffusion", "screen"] = "text"
    members: int = 1
    lead: Literal["drawn", "first"] = "drawn"
    neighbours: int = 3
    facts: int = 0
    facts_share: float = 0.75
    edited_in_full: bool = True
    rarity: float = 0.5
    unchanged_share: float | None = None
    refusals: str = ""
    reasoning_tokens: int = 0
    rules: Literal["off", "refuse", "repair"] = "repair"
    resamples: int = 8
    goal: Goal = field(default_factory=Goal)
    diffusion: DiffusionSettings = field(default_factory=DiffusionSettings)
    screen: ScreenSettings = field(default_factory=ScreenSettings)

    def __post_init__(self) -> None:
        if self.members < 1 or self.neighbours < 1:
            raise ValueError("members and neighbours must be at least 1")
        if self.facts < 0 or not 0 <= self.facts_share <= 1:
            raise ValueError("facts must be 0 (off) or more, and facts_share lie in [0, 1]")
        if self.reasoning_tokens < 0:
            raise ValueError(f"reasoning_tokens must be 0 (off) or more, got {self.reasoning_tokens}")
        if self.kind == "diffusion" and (self.members > 1 or self.reasoning_tokens):
            raise ValueError(
                "worldmodel.kind=diffusion has no log-probs of given tokens, which ensembles and reasoning need: set "
                "worldmodel.members=1 and worldmodel.reasoning_tokens=0"
            )
        if self.rarity < 0:
            raise ValueError(f"rarity must be 0 or more, got {self.rarity}")
        if self.unchanged_share is not None and not 0 <= self.unchanged_share < 1:
            raise ValueError(f"unchanged_share must lie in [0, 1), or be null, got {self.unchanged_share}")
        if self.members > 1 and self.model not in ("", AUTO) and not self.lora.rank:
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
        micro_tokens: that a forward pass computes; changes memory and how often the bar moves, not the gradient.
        optimizer: muon trains the matrices inside the layers by Muon and the rest by AdamW, adamw all; auto is muon for
            weights that start at random and adamw for trained ones and adapters.
        lr: highest learning rate; that of models from scratch, too high for pretrained ones.
        weight_decay: decoupled.
        warmup: steps until the highest learning rate.
        average: decay of the average of the weights over all steps that is kept in place of the last; 0 keeps the last.
        copying_steps: before these, on random tokens that repeat, from which a model that starts at random learns to
            copy what it has just read; 0 is off.
        copying_share: of the tokens after that, so that it does not forget.
        renamed: copies of the log in which things have made-up names, from which a model learns to copy names that it
            has never read; 0 is off.
        precision: bf16 trains under autocast, and weights stay fp32; auto does so on GPUs. On CPUs auto is fp32 for
            small models, and for large ones whichever a few passes show to be faster.
    """

    steps: int = 2000
    batch_tokens: int = 3072
    micro_tokens: int = 8192
    optimizer: Literal["auto", "muon", "adamw"] = "auto"
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 50
    average: float = 0.99
    copying_steps: int = 200
    copying_share: float = 0.15
    renamed: int = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"

    def __post_init__(self) -> None:
        if self.copying_steps < 0 or self.copying_share < 0:
            raise ValueError("copying_steps and copying_share must be 0 (off) or more")
        if self.renamed < 0:
            raise ValueError(f"renamed must be 0 (off) or more, got {self.renamed}")
        if not 0 <= self.average < 1:
            raise ValueError(f"average must lie in [0, 1); 0 keeps the last weights, got {self.average}")


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
        supplements: episodes beside the log to imitate too: reflections (imagine reflect), hindsight (imagine relabel).
        world_steps: before these, on what the world answered in all logged episodes, whoever acted; 0 is off.
        observation_weight: of a token that the world answered in the imitated episodes, one of an action has 1; 0 is
            off. Supplements teach no observations.
        keep_every: keep the policy every so many steps, in models/kept/, for the audit to rank; 0 keeps none.
    """

    steps: int = 250
    lr: float = 1e-3
    average: float = 0.0
    agents: list[str] = field(default_factory=lambda: ["noisy"])
    from_world_model: bool = True
    supplements: list[Literal["reflections", "hindsight"]] = field(default_factory=list)
    world_steps: int = 0
    observation_weight: float = 0.0
    keep_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_steps < 0 or self.observation_weight < 0:
            raise ValueError("world_steps and observation_weight must be 0 (off) or more")
