"""Corridors that count their own steps. Workers import this module, so it imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from real_envs.env import StepResult
from real_envs.worker_pool import SyncEnv
from tests.support.faults import Corridor


@dataclass(frozen=True)
class Counted:
    """A factory of corridors that write a line for each step which they take: what the world itself says."""

    ledger: Path

    def __call__(self) -> SyncEnv:
        return _Counted(self.ledger)


class _Counted(Corridor):
    def __init__(self, ledger: Path) -> None:
        super().__init__()
        self._ledger = ledger

    def step(self, action: str) -> StepResult:
        with open(self._ledger, "a") as file:
            file.write("step\n")
        return super().step(action)
