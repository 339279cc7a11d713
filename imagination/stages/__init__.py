"""The stages of a run as plain functions ``(config, folder)``; each reads and writes the run folder."""

from imagination.stages.collect import collect
from imagination.stages.evaluate import evaluate
from imagination.stages.fit import clone, fit_world_model
from imagination.stages.train import train

__all__ = ["clone", "collect", "evaluate", "fit_world_model", "train"]
