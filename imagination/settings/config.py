"""The root of all settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from imagination.settings.algorithm import AlgorithmSettings
from imagination.settings.critic import CriticSettings
from imagination.settings.data import CollectSettings, EnvSettings, GamesSettings
from imagination.settings.dreams import DreamSettings, TripwireSettings
from imagination.settings.importing import ImportSettings, RulesSettings
from imagination.settings.looping import LoopSettings
from imagination.settings.measuring import (
    AblationSettings,
    AuditSettings,
    CompareSettings,
    EvaluateSettings,
    FewShotSettings,
    ListingSettings,
)
from imagination.settings.models import CloneSettings, FitSettings, RefineSettings, WorldModelSettings
from imagination.settings.pretraining import PretrainSettings
from imagination.settings.serving import ServeSettings
from imagination.settings.supplements import HindsightSettings, ReflectSettings
from imagination.settings.training import TrainSettings
from policy.lm.settings import EngineSettings, ModelSettings

LoggerName = Literal["tensorboard", "wandb", "csv", "none"]


@dataclass
class Config:
    """A whole run.

    Attributes:
        run: names the folder under ``output``; the same name again goes on where it stopped.
        output: folder of all runs.
        jobs: how many processes demo-seeds, audit-table and ablate share their runs among; 0 takes as many as there are
            cores, and one where there is a GPU.
        logger: of the losses and rewards of a stage while it runs; metrics.jsonl has them, too.
        machine_price: of an hour of this machine, in the money of env.price; 0 is none. It changes what the report says
            and nothing else.
        seed: of games, log, weights, order of data and dreams.
        vocab_size: of the tokenizer of models from scratch.
        max_action_tokens: at which an action is ended by force.
    """

    run: str = "default"
    output: str = "outputs"
    jobs: int = 0
    logger: LoggerName = "tensorboard"
    machine_price: float = 0.0
    seed: int = 0
    vocab_size: int = 2048
    max_action_tokens: int = 16
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
    reflect: ReflectSettings = field(default_factory=ReflectSettings)
    hindsight: HindsightSettings = field(default_factory=HindsightSettings)
    clone: CloneSettings = field(default_factory=CloneSettings)
    dream: DreamSettings = field(default_factory=DreamSettings)
    tripwires: TripwireSettings = field(default_factory=TripwireSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
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
