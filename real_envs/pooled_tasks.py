"""Tasks by split with environments in worker processes: the ``TaskSet`` that most worlds need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from real_envs.env import Env, Task
from real_envs.isolation import SyncEnv, WorkerPool


class PooledTasks:
    """A ``TaskSet``; ``pool.stats`` says how many real steps its environments took.

    Args:
        splits: tasks by the name of their split.
        factory: makes an environment in a worker process; it must be picklable.
        workers: how many episodes are played at a time.
        step_timeout, reset_timeout: see ``WorkerPool``.
    """

    def __init__(
        self,
        splits: Mapping[str, Sequence[Task]],
        factory: Callable[[], SyncEnv],
        workers: int,
        step_timeout: float = 5.0,
        reset_timeout: float = 30.0,
    ) -> None:
        self._splits = {split: tuple(tasks) for split, tasks in splits.items()}
        self.pool = WorkerPool(factory, workers=workers, step_timeout=step_timeout, reset_timeout=reset_timeout)

    def tasks(self, split: str) -> Sequence[Task]:
        """Raises ``KeyError`` for a split that is not there."""
        return self._splits[split]

    def make_env(self) -> Env:
        return self.pool.make_env()

    async def close(self) -> None:
        """Ends the worker processes."""
        await self.pool.close()
