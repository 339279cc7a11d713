"""All settings of a run: one dataclass per component, with the defaults of the demo. YAML only selects among them."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Literal

from imagination.settings.algorithm import AlgorithmName as AlgorithmName
from imagination.settings.algorithm import AlgorithmSettings
from imagination.settings.algorithm import ProgressSettings as ProgressSettings
from imagination.settings.data import (
    CollectSettings,
    EnvSettings,
    GamesSettings,
    ImportSettings,
    LearnExperienceSettings,
    RulesSettings,
)
from imagination.settings.dreams import DreamSettings, ServeSettings, TripwireSettings
from imagination.settings.evaluation import (
    AblationSettings,
    AuditSettings,
    CompareSettings,
    EvaluateSettings,
    FewShotSettings,
    ListingSettings,
)
from imagination.settings.models import (
    CloneSettings,
    FitSettings,
    HindsightSettings,
    PretrainSettings,
    RefineSettings,
    ReflectSettings,
    WorldModelSettings,
)
from imagination.settings.scale import ScaleSettings, ScaleSimSettings
from imagination.settings.schema import ConfigError, flatten, require
from imagination.settings.training import ChoiceWeights as ChoiceWeights
from imagination.settings.training import CriticSettings, DigiQSettings, LoopSettings, TrainSettings
from imagination.settings.training import SelfImitationSettings as SelfImitationSettings
from policy.lm.settings import EngineSettings, ModelSettings
from real_envs.errors import UserError as UserError

# Numbers that may be less than 0; no other may, whatever else its section requires.
_SIGNED = re.compile(r"options\.|[._]reward$|process_coef$|carried_out$|solved_at$|keep_min_return$|min_spearman$")

LoggerName = Literal["tensorboard", "wandb", "csv", "none"]
Strategy = Literal["ddp", "fsdp2"]


@dataclass
class Config:
    """The settings of a run."""

    run: str = "default"  #: name of the run's folder under output; the same name again continues it
    output: str = "outputs"  #: folder of all runs
    jobs: int = 0  #: parallel runs of demo-seeds, audit-table and ablate; 0 is the CPU count, or 1 with a GPU
    logger: LoggerName = "tensorboard"  #: of losses and rewards during training; metrics.jsonl has them, too
    #: of an hour of this machine, in the currency of env.price; 0 is none. Changes only what the report says
    machine_price: float = 0.0
    #: processes on this machine that train together, each on a GPU where there are any; 0 is this one alone
    devices: int = 0
    num_nodes: int = 1  #: machines that train together, of as many devices each
    #: ddp keeps the whole training state in each process; fsdp2 shares out weights, gradients and optimiser state
    strategy: Strategy = "ddp"
    activation_checkpointing: bool = False  #: with fsdp2: less memory, and a second forward pass in the backward pass
    wait_minutes: float = 30.0  #: minutes that a process waits for the others before all are ended
    seed: int = 0  #: of tasks, log, weights, data order and dreams
    vocab_size: int = 2048  #: of the tokenizer of models from scratch
    max_action_tokens: int = 16  #: longest action, in tokens
    #: longest summary, in tokens, that the policy writes before its context is full, to go on with the task and the
    #: summary alone (SUPO); 0 ends the episode there
    summary_tokens: int = 0
    #: file under models/ whose experiences the policy reads in its prompt, such as experience.json, which
    #: learn-experience writes; empty is none
    experience: str = ""
    env: EnvSettings = field(default_factory=EnvSettings)
    games: GamesSettings = field(default_factory=GamesSettings)
    collect: CollectSettings = field(default_factory=CollectSettings)
    imports: ImportSettings = field(default_factory=ImportSettings)
    worldmodel: WorldModelSettings = field(default_factory=WorldModelSettings)
    fit: FitSettings = field(default_factory=FitSettings)
    rules: RulesSettings = field(default_factory=RulesSettings)
    refine: RefineSettings = field(default_factory=RefineSettings)
    policy: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    scale: ScaleSettings = field(default_factory=ScaleSettings)
    scale_sim: ScaleSimSettings = field(default_factory=ScaleSimSettings)
    reflect: ReflectSettings = field(default_factory=ReflectSettings)
    learn_experience: LearnExperienceSettings = field(default_factory=LearnExperienceSettings)
    hindsight: HindsightSettings = field(default_factory=HindsightSettings)
    clone: CloneSettings = field(default_factory=CloneSettings)
    dream: DreamSettings = field(default_factory=DreamSettings)
    tripwires: TripwireSettings = field(default_factory=TripwireSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    digi_q: DigiQSettings = field(default_factory=DigiQSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    few_shot: FewShotSettings = field(default_factory=FewShotSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)
    compare: CompareSettings = field(default_factory=CompareSettings)
    ablation: AblationSettings = field(default_factory=AblationSettings)
    listing: ListingSettings = field(default_factory=ListingSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    pretrain: PretrainSettings = field(default_factory=PretrainSettings)

    def __post_init__(self) -> None:
        for key, value in flatten(asdict(self)).items():
            least = -math.inf if _SIGNED.search(key) else 0
            if isinstance(value, int | float) and not value >= least:  # nan is not
                raise ConfigError(f"{key} must be {'a number' if least else '0 or more'}, got {value}")
        require(self, "1 or more", "max_action_tokens", "num_nodes")
        if max(self.seed, self.train.seed or 0) >= 2**32:
            raise ConfigError("seed and train.seed must be less than 2**32")
        require(self, "above 0", "wait_minutes")
        if self.activation_checkpointing and self.strategy != "fsdp2":
            raise ValueError("activation_checkpointing=true needs strategy=fsdp2")
