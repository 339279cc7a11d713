"""Shards that wait for their store: episodes can be written before it is known in which splits their tasks are."""

from __future__ import annotations

import shutil
from pathlib import Path

from real_envs.manifest import Shard
from real_envs.shard import write_shard
from real_envs.trajectory import Trajectory

_CHARACTERS = 1 << 24  # of a shard, so that long observations do not fill the memory


class Incoming:
    """Episodes on their way into a store, in a folder of their own until ``TrajectoryStore.adopt`` takes them.

    What an earlier process left in the folder, which is ours alone, is removed.

    Args:
        shard_turns: turns of a shard, or fewer where these are long.

    Attributes:
        shards: those that are written.
        tasks: of all episodes.
        ids: of all episodes.
    """

    def __init__(self, folder: Path, shard_turns: int = 4096) -> None:
        self.folder, self.shards = folder, list[Shard]()
        self.tasks, self.ids = set[str](), set[str]()
        self._shard_turns = shard_turns
        self._pending: list[Trajectory] = []
        self._turns = self._characters = 0
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, trajectory: Trajectory) -> None:
        """Takes an episode. It must be one that ``rows.decode`` made: it is not checked once more."""
        self._pending.append(trajectory)
        self.tasks.add(trajectory.task_id)
        self.ids.add(trajectory.id)
        self._turns += max(1, len(trajectory.turns))
        self._characters += len(trajectory.start) + sum(len(t.action) + len(t.observation) for t in trajectory.turns)
        if self._turns >= self._shard_turns or self._characters >= _CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Writes what was added so far.

        Raises:
            StoreError: it cannot be written.
        """
        if self._pending:
            self.shards.append(write_shard(self.folder, f"shard-{len(self.shards):05d}.parquet", self._pending))
        self._pending, self._turns, self._characters = [], 0, 0

    def discard(self) -> None:
        """Removes the folder, with what nobody took."""
        shutil.rmtree(self.folder, ignore_errors=True)
