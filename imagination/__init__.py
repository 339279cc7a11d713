"""Train LLM agents in imagination: from Python as from the command line.

Example::

    from imagination import Run

    run = Run("outputs/mine", preset="tiny")
    run.collect()
    run.fit_world_model()
    run.clone()
    run.train()
    print(run.evaluate().after.train_tasks.rate)

Names are imported when they are first used, so ``import imagination`` itself is quick.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# OpenMP's threads spin while they wait for work, and so take the cores from whoever has some: beside a busy process a
# stage took ten times as long. Threads that soon go to sleep cost nothing (docs/log/). It is read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# Libraries that import JAX wherever it is installed would take three quarters of a GPU's memory for it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

if TYPE_CHECKING:
    from imagination.api import AuditResult as AuditResult
    from imagination.api import EvaluateResult as EvaluateResult
    from imagination.api import LoopResult as LoopResult
    from imagination.api import PolicyResult as PolicyResult
    from imagination.api import Run as Run
    from imagination.api import TrainResult as TrainResult
    from imagination.api import WorldModelResult as WorldModelResult
    from imagination.api import load_log as load_log
    from imagination.settings import Config as Config
    from imagination.settings import UserError as UserError
    from imagination.settings.schema import ConfigError as ConfigError
    from real_envs.store import TrajectoryStore as TrajectoryStore
    from real_envs.trajectory import Trajectory as Trajectory

_API = "AuditResult EvaluateResult LoopResult PolicyResult Run TrainResult WorldModelResult load_log"
_FROM = {
    **dict.fromkeys(_API.split(), "imagination.api"),
    "Config": "imagination.settings",
    "UserError": "imagination.settings",
    "ConfigError": "imagination.settings.schema",
    "Trajectory": "real_envs.trajectory",
    "TrajectoryStore": "real_envs.store",
}
__all__ = list(_FROM)


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'imagination' has no attribute '{name}'")
    return getattr(import_module(_FROM[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
