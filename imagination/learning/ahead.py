"""Groups that players play while the policy learns, a bounded number of updates ahead."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from imagination.scale.dispatch import Lookahead
from imagination.scale.pool import Group, PlayerPool
from real_envs.trajectory import Trajectory


class GroupsAhead:
    """The groups of updates to come.

    Args:
        groups_of: all groups of an update, by its index; the same number for each.
        done: updates that a resumed training had done.
        updates: of the whole training.
    """

    def __init__(
        self,
        pool: PlayerPool,
        groups_of: Callable[[int], Sequence[Group]],
        max_staleness: int,
        done: int,
        updates: int,
    ) -> None:
        self._pool, self._groups_of, self._each = pool, groups_of, len(groups_of(done))
        self._ahead = Lookahead(self._each, max_staleness, done, updates)
        self._playing: dict[int, Future[list[Trajectory]]] = {}
        self._played: dict[int, list[Trajectory]] = {}
        self._returned = time.monotonic()

    def take(self) -> tuple[list[Trajectory], dict[str, float]]:
        """The episodes of the next update, and what is to be logged of them; waits until there are enough.

        To be called when players have the policy that learns from them.

        Raises:
            UserError: no player can be had.
        """
        begun, before = time.monotonic(), self._ahead.dropped
        while True:
            self._begin()
            for number in [number for number, result in self._playing.items() if result.done()]:
                self._played[number] = episodes = self._playing.pop(number).result()
                versions = [v for episode in episodes if episode.trace for v in episode.trace.versions]
                self._ahead.finished(number, min(versions, default=self._ahead.version))
            if stale := self._ahead.drop_stale():
                for number in stale:
                    del self._played[number]
            elif (taken := self._ahead.take()) is not None:
                break
            else:
                wait(self._playing.values(), return_when=FIRST_COMPLETED)
        now, last = time.monotonic(), self._returned
        self._returned = now
        staleness = Counter(taken.values())
        metrics = {f"staleness_{n}": float(count) for n, count in sorted(staleness.items())}
        metrics |= {"dropped_groups": float(self._ahead.dropped - before)}
        metrics |= {"learner_waits": (now - begun) / max(1e-9, now - last)}
        return [episode for number in taken for episode in self._played.pop(number)], metrics

    def _begin(self) -> None:
        numbers = self._ahead.begin()
        groups = [self._groups_of(number // self._each)[number % self._each] for number in numbers]
        if groups:
            self._playing.update(zip(numbers, self._pool.add(groups), strict=True))
