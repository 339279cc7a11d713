"""World models that nobody trained: what a test needs of a dream is planted, not hoped for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from imagination.commands import train as train_stage
from imagination.session import Session
from real_envs.trajectory import Turn
from tests.support.tiny import TASKS, start
from worldmodel.world_model import Prediction


class Planted:
    """Answers by a rule instead of the model that was loaded, whose engines and version it shows."""

    def __init__(self, model: Any) -> None:
        self.engines, self.version, self.release = model.engines, model.version, model.release


class Corridors(Planted):
    """The corridors of ``tests.support.tiny`` as they are."""

    async def predict(
        self, begin: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        (way, thing) = next(names for task, names in TASKS.items() if start(task) == begin)
        inside = any(turn.action == f"go {way}" for turn in history)
        if action == f"go {way}" and not inside:
            return Prediction(f"You walk {way}. Here is a {thing}.", 0.0, False, 1.0, 1.0)
        if action == f"take {thing}" and inside:
            return Prediction(f"You take the {thing}.", 1.0, True, 1.0, 1.0)
        return Prediction("Nothing new.", 0.0, False, 1.0, 1.0)


class Lottery(Planted):
    """Whatever is done, the second turn wins in a quarter of the episodes: some of each group stand out."""

    async def predict(
        self, begin: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        wins = len(history) == 1 and seed % 4 == 0
        return Prediction("You win." if wins else "Nothing new.", float(wins), wins, 0.9, 0.8)


class Doubtful(Planted):
    """Never ends, and pays for every action from the third turn on, of which it is not sure."""

    async def predict(
        self, begin: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        return Prediction("Nothing new.", 0.5 * (len(history) >= 2), False, confidence=1.0, outcome_confidence=0.5)


def plant(monkeypatch: pytest.MonkeyPatch, world: Callable[[Any], Planted], stage: ModuleType = train_stage) -> None:
    """Every world model that the module of a stage loads is ``world`` of it."""

    class Planting(Session):
        def world_model(self, *given: Any, **more: Any) -> Any:
            return world(super().world_model(*given, **more))

    monkeypatch.setattr(stage, "Session", Planting)
