"""What players did in the real world, counted in an actor. Its process imports this module, which loads no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from real_envs.worker_pool import PoolStats


class Ledger:
    """Counts what is done in the real world, in a process that does not play, and in a file that outlives it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", buffering=1)

    def clear(self) -> None:
        self._file.truncate(0)

    def add(self, stats: PoolStats) -> None:
        self._file.write(f"{json.dumps(asdict(stats))}\n")

    def total(self) -> PoolStats:
        self._file.seek(0)
        return sum((PoolStats(**json.loads(line)) for line in self._file), PoolStats())
