"""Actors of a training that misbehave when a file in the run's folder says so. Workers of Ray import this module."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imagination.scale.player import PlayerData
from imagination.scale.pool import Group
from imagination.scale.ray_players import _PlayerActor
from imagination.session import Session
from real_envs.trajectory import Trajectory

FAULTS = "faults"  # folder of a run: each file is taken by one player, and is its fault

HOG = 64  # times 64 MiB: others live on this machine, too


class FaultyPlayer(_PlayerActor):
    def __init__(self, session: Session, data: PlayerData, worlds: Sequence[Any], name: str) -> None:
        super().__init__(session, data, worlds, name)
        self._folder = session.run.path / FAULTS
        self._seconds = 0.0
        self._hog: list[bytearray] = []

    async def play(self, group: Group) -> list[Trajectory]:
        if self._takes("garbage"):
            return ["nonsense"]  # type: ignore[list-item]
        if self._takes("error"):
            raise ZeroDivisionError("a mistake")
        if self._takes("memory"):
            for _ in range(HOG):
                self._hog.append(bytearray(os.urandom(1 << 20) * 64))
                await asyncio.sleep(0.1)
            await asyncio.sleep(20)
            raise RuntimeError("nobody ended it")
        if self._takes("slow"):
            self._seconds = 2.0
        played = await super().play(group)
        await asyncio.sleep(self._seconds)
        return played

    def _takes(self, fault: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / fault).unlink()
            return True
        return False


def plant(run: Path, *faults: str) -> None:
    (run / FAULTS).mkdir(exist_ok=True)
    for fault in faults:
        (run / FAULTS / fault).touch()
