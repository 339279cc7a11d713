"""Models and their training on the log: world model, refinement, data augmentation, clone, and the base model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from imagination.settings.data import ChatServerSettings
from imagination.settings.schema import require
from policy.lm.settings import AUTO, ModelSettings
from worldmodel.diffusion.settings import DiffusionSettings
from worldmodel.extras.screen.settings import ScreenSettings
from worldmodel.rewards import Goal

Option = str | int | float | bool | list[str] | list[int]


@dataclass
class CodeSettings(ChatServerSettings):
    """The world model as a Python function that a language model on a server writes, for worldmodel.kind=code.

    It is tested on logged turns and repaired by its failures. It runs in a process that can neither open files nor
    reach the network (Linux only).
    """

    timeout: float = 600.0
    rounds: int = 8  #: requests for a repair, at most
    episodes: int = 3  #: logged episodes in the prompt
    #: logged turns that each version is tested on, and held-back turns that choose the version, at most
    turns: int = 300
    failures: int = 6  #: wrong turns that a request for a repair shows
    tokens: int = 8000  #: longest answer of the server, in tokens
    seconds: float = 2.0  #: time limit of a call of the function
    megabytes: int = 512  #: memory limit of its process
    #: run code that fit-world-model has not written on this machine, such as that of somebody else's run; not
    #: remembered for later commands
    trust: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "1 or more", "episodes", "turns", "failures", "tokens")
        require(self, "above 0", "seconds")
        if self.megabytes < 64:  # the interpreter alone has some 30
            raise ValueError(f"megabytes must be 64 or more, got {self.megabytes}")


@dataclass
class WorldModelSettings(ModelSettings):
    """The world model: LM, format of predictions, ensemble, and what decides reward and termination."""

    #: as in policy.model, or auto: the base model where its tokenizer needs at most 1.5 times the tokens of one trained
    #: on the log; a model from scratch otherwise, and where sizes or members are set
    model: str = AUTO
    #: text predicts whole observations, delta edits of earlier ones, retrieval reads similar transitions first;
    #: diffusion fills in whole observations from all sides (worldmodel.diffusion); code is a Python function that a
    #: language model writes (worldmodel.code); screen predicts the next screenshot and is a separate model, beside the
    #: one of text
    kind: Literal["text", "delta", "retrieval", "diffusion", "code", "screen"] = "text"
    members: int = 1  #: of an ensemble that differ in their random initialisation; 1 is a single model
    #: member that predicts a turn of a sampled dream: sampled per turn, or always the first
    lead: Literal["drawn", "first"] = "drawn"
    neighbours: int = 3  #: transitions of the log before each action (top-k of retrieval)
    facts: int = 0  #: facts of a task from other logged episodes of it in the prompt, at most (task memory); 0 is off
    #: share of the logged episodes that it is trained on with facts, so that it also works without
    facts_share: float = 0.75
    #: the edited observation follows the edit in the prompt (delta); false shortens prompts of long pages
    edited_in_full: bool = True
    #: exponent of the inverse frequency weight of a turn in training, count ** -rarity; 0 is uniform
    rarity: float = 0.5
    #: share of the training weight for turns that change nothing; null leaves it to rarity
    unchanged_share: float | None = None
    #: regular expression of observations that mean that nothing changed; a repeated observation always does
    refusals: str = ""
    #: share of the logged actions before which it also learns that the same action with a misspelt name is refused,
    #: where unknown names always were; 0 is off
    misspelt: float = 0.0
    #: most reasoning tokens before each prediction, dropped after it; 0 is off. Logged turns with info["reasoning"] are
    #: training data for them, and refine-world-model rewards right predictions
    reasoning_tokens: int = 0
    #: which predictions rules mined from the log replace: repair, all that a rule covers, and predictions that break an
    #: invariant of the log are sampled again; refuse, refused actions; off, none
    rules: Literal["off", "refuse", "repair"] = "repair"
    #: schema: calls that the schemas of a world's tools do not allow are answered in the world's own words; user: so is
    #: the end of a user's turn, with what it pays, by the task's true calls and requests, and a model that refuses such
    #: a call in its place is asked again (env=bfcl)
    exact: Literal["off", "schema", "user"] = "off"
    resamples: int = 8  #: of a prediction that breaks an invariant (repair) or refuses a true call (user), at most
    goal: Goal = field(default_factory=Goal)  #: decides reward and termination in place of the model where it is set
    diffusion: DiffusionSettings = field(default_factory=DiffusionSettings)  #: canvas and sampler, for kind=diffusion
    code: CodeSettings = field(default_factory=CodeSettings)  #: who writes the function and its limits, for kind=code
    screen: ScreenSettings = field(default_factory=ScreenSettings)  #: the model of screenshots, for kind=screen

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "1 or more", "members", "neighbours")
        require(self, "in [0, 1]", "facts_share", "misspelt")
        if self.unchanged_share is not None:
            require(self, "in [0, 1)", "unchanged_share")
        if self.kind == "diffusion" and (self.members > 1 or self.reasoning_tokens):
            raise ValueError(
                "worldmodel.kind=diffusion has no log-probs of given tokens, which ensembles and reasoning need: set "
                "worldmodel.members=1 and worldmodel.reasoning_tokens=0"
            )
        if self.kind == "code" and (self.members > 1 or self.reasoning_tokens or self.facts or self.misspelt):
            raise ValueError(
                "worldmodel.kind=code is a function that reads the episode and nothing else: set worldmodel.members=1, "
                "worldmodel.reasoning_tokens=0, worldmodel.facts=0 and worldmodel.misspelt=0"
            )
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
    """Supervised training of either model, with warm-up and cosine decay to a tenth of the learning rate."""

    steps: int = 2000  #: optimiser steps
    #: time limit from the first step, with the learning rate decaying towards it; 0 ends after the steps
    minutes: float = 0.0
    batch_tokens: int = 3072  #: per step, padding included
    micro_tokens: int = 8192  #: per forward pass; changes memory and how often the progress bar moves, not the gradient
    #: muon trains the matrices inside the layers by Muon and the rest by AdamW, adamw all; auto is muon for random
    #: weights and adamw for trained ones and adapters
    optimizer: Literal["auto", "muon", "adamw"] = "auto"
    lr: float = 3e-3  #: highest learning rate; the default is for models from scratch, too high for pretrained ones
    weight_decay: float = 0.01  #: decoupled
    warmup: int = 50  #: steps until the highest learning rate
    #: decay of the exponential moving average of the weights that is kept; 0 keeps the last weights
    average: float = 0.99
    #: pre-training steps on repeated random tokens, from which a model from scratch learns to copy from its context; 0
    #: is off
    copying_steps: int = 200
    copying_share: float = 0.15  #: share of such tokens after that, so that it does not forget
    #: copies of the log in which objects have made-up names, from which a model learns to copy unseen names; 0 is off
    renamed: int = 0
    #: bf16 is autocast with fp32 weights; auto is bf16 on GPUs, and on CPUs fp32 for small models and the faster of
    #: both in a few passes for large ones
    precision: Literal["auto", "bf16", "fp32"] = "auto"

    def __post_init__(self) -> None:
        require(self, "1 or more", "steps", "batch_tokens", "micro_tokens")
        require(self, "in [0, 1)", "average")

    def decided(self, from_scratch: bool) -> Self:
        """These settings for a model whose weights are random or not: what ``optimizer=auto`` is, and only a random one
        learns to copy first."""
        optimizer: Literal["muon", "adamw"] = "muon" if from_scratch else "adamw"
        return replace(
            self,
            optimizer=optimizer if self.optimizer == "auto" else self.optimizer,
            copying_steps=self.copying_steps if from_scratch else 0,
        )


@dataclass
class RefineSettings:
    """RL of the world model on logged turns, by GRPO; algorithm.* applies where it says grpo."""

    updates: int = 40  #: number of updates
    turns: int = 64  #: logged turns per update, rare ones more often (worldmodel.rarity)
    group_size: int = 8  #: predictions per turn
    #: reward of a prediction; exact is 1 for the right text, reward and termination; diff_f1 is the F1 score of changed
    #: lines, for long pages; behr is near 1 where a frozen policy's next logged action stays as likely (BehR);
    #: embedding is 1 where the text means nearly the same to the world model before (RWML)
    metric: Literal["exact", "diff_f1", "behr", "embedding"] = "exact"
    policy: str = "policy-clone"  #: folder in models/ of the frozen policy of behr
    distance: float = 0.2  #: largest cosine distance of embeddings that pays
    lr: float = 1e-4  #: learning rate of AdamW
    minibatches: int = 1  #: optimiser steps per update
    #: share of logged episodes among the rows of an update, trained by cross-entropy as before
    supervised_share: float = 0.1
    supervised_coef: float = 0.1  #: weight of that cross-entropy

    def __post_init__(self) -> None:
        require(self, "1 or more", "turns", "updates")
        require(self, "in [0, 1)", "supervised_share")


@dataclass
class ReflectSettings:
    """Reflections before an expert's action: predicted outcomes of other actions, and of its own."""

    #: experts of the log, by prefix of their names; empty takes all experts
    agents: list[str] = field(default_factory=list)
    #: policy of the run, such as policy-clone, that proposes other actions; empty takes actions of other logged
    #: episodes of the task
    proposer: str = ""
    alternatives: int = 2  #: other actions per turn that are tried in the world model
    min_confidence: float = 0.5  #: least probability of a predicted outcome
    words: int = 8  #: of an outcome in a reflection, at most

    def __post_init__(self) -> None:
        require(self, "1 or more", "alternatives", "words")
        require(self, "in [0, 1]", "min_confidence")


@dataclass
class HindsightSettings:
    """Hindsight relabelling: failed episodes with a goal that they did reach."""

    #: pairs of a regular expression of observations and the goal that a match means, which may refer to its groups,
    #: such as [["You open the (.+?)[.,]", "Open the \1."]]
    goals: list[list[str]] = field(default_factory=list)
    place: str = r"\A[^\n]*"  #: regular expression of the goal in the first observation, which the new goal replaces
    max_turns: int = 0  #: most turns until the new goal; 0 is no limit
    #: so many new questions of what the log's searches found (env=search), in place of goals
    questions: int = 0

    def __post_init__(self) -> None:
        if any(len(pair) != 2 for pair in self.goals):
            raise ValueError(f"goals are pairs of a pattern and a goal, got {self.goals}")
        try:
            for pattern, goal in self.goals:
                re.compile(rf"(?:{pattern})|").match("").expand(goal)  # type: ignore[union-attr]  # matches always
            re.compile(self.place)
        except (re.error, IndexError) as error:
            raise ValueError(f"goals or place: {error}") from error


@dataclass
class CloneSettings(FitSettings):
    """Behaviour cloning of the initial policy from a part of the log.

    A policy without a checkpoint of its own starts from the weights of the world model, which was trained on the same
    log.
    """

    steps: int = 250
    lr: float = 1e-3
    average: float = 0.0
    #: agents of the log to imitate, by prefix of their names
    agents: list[str] = field(default_factory=lambda: ["noisy"])
    solved_only: bool = False  #: imitate only their episodes that solved the task (filtered behaviour cloning)
    from_world_model: bool = True  #: start from the world model's weights, not from random ones
    #: augmentation beside the log: reflections (imagine reflect), hindsight (imagine relabel)
    supplements: list[Literal["reflections", "hindsight"]] = field(default_factory=list)
    world_steps: int = 0  #: pre-training steps on the observations of all logged episodes, of any agent; 0 is off
    #: loss weight of observation tokens in the imitated episodes, where action tokens have 1; 0 is off. Observations of
    #: supplements have none
    observation_weight: float = 0.0
    #: steps between two policies that are kept in models/kept/, for the audit to rank; 0 keeps none
    keep_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()


@dataclass
class CorpusWorld:
    """An environment of the corpus. Its options are sampled anew for every few tasks."""

    env: str  #: the environment, as in env=
    share: float = 1.0  #: of the corpus, relative to the other environments
    #: as env.options; of a list one value is sampled, of 2..11 a number, alone or within a text
    options: dict[str, Option] = field(default_factory=dict)
    tasks: int = 8  #: training tasks with the same options
    episodes: int = 4  #: per task
    max_turns: int = 24  #: turn limit of an episode
    facts: int = 0  #: facts of the task in the world model's prompt in half of the episodes, at most; 0 is none

    def __post_init__(self) -> None:
        if not 0 <= self.share < float("inf"):
            raise ValueError(f"share must be 0 or more, got {self.share}")
        require(self, "1 or more", "tasks", "episodes", "max_turns")


@dataclass
class PretrainSettings(FitSettings):
    """Pre-training of a base model on episodes of many environments, as world model and as policy."""

    worlds: dict[str, CorpusWorld] = field(default_factory=dict)  #: environments by a name; preset=base has them
    shards: int = 120  #: files of the corpus per environment
    shard_characters: int = 800_000  #: characters of one shard of every environment together
    corpus: str = ""  #: folder of another run, whose corpus and tokenizer are read; empty generates them
    #: folders of runs from whose held-out tasks nothing is read: episodes that begin as one of theirs are left out of
    #: the corpus
    leave_out: list[str] = field(default_factory=list)
    makers: int = 0  #: processes that generate shards; 0 is one per core
    #: agents whose episodes the policy imitates, by prefix of their names
    agents: list[str] = field(default_factory=lambda: ["expert", "noisy-0.2"])
    renamed_share: float = 0.5  #: share of the episodes with made-up names
    save_every: int = 200  #: steps between two saved training states
    model: ModelSettings = field(default_factory=ModelSettings)  #: sizes of the base model

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "1 or more", "shards", "shard_characters", "save_every")
        require(self, "in [0, 1]", "renamed_share")
