"""All settings of a run: one dataclass per component, with the defaults of the demo. YAML only selects among them."""

from imagination.settings.algorithm import AlgorithmName, AlgorithmSettings, ProgressSettings
from imagination.settings.config import Config, LoggerName
from imagination.settings.data import CollectSettings, EnvSettings, GamesSettings, RulesSettings
from imagination.settings.dreams import DreamSettings, TripwireSettings
from imagination.settings.evaluation import (
    AblationSettings,
    AuditSettings,
    CompareSettings,
    EvaluateSettings,
    FewShotSettings,
)
from imagination.settings.models import CloneSettings, FitSettings, RefineSettings, WorldModelSettings
from imagination.settings.training import (
    ChoiceWeights,
    CriticSettings,
    LoopSettings,
    SelfImitationSettings,
    TrainSettings,
)
from real_envs.errors import UserError

__all__ = [
    "AblationSettings",
    "AlgorithmName",
    "AlgorithmSettings",
    "AuditSettings",
    "ChoiceWeights",
    "CloneSettings",
    "CollectSettings",
    "CompareSettings",
    "Config",
    "CriticSettings",
    "DreamSettings",
    "EnvSettings",
    "EvaluateSettings",
    "FewShotSettings",
    "FitSettings",
    "GamesSettings",
    "LoggerName",
    "LoopSettings",
    "ProgressSettings",
    "RefineSettings",
    "RulesSettings",
    "SelfImitationSettings",
    "TrainSettings",
    "TripwireSettings",
    "UserError",
    "WorldModelSettings",
]
