"""Which player plays which group next, and which groups an update may learn from.

Nothing here has a clock or starts anything: a run (``pool.py``) and a simulation of thousands of players say what
happened and ask what to do. Groups are numbered from 0 in the order in which they are to be played.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Hashable, Iterable


def groups_at_once(most: int, groups: int, max_staleness: int, players: int) -> int:
    """Groups that a player plays at a time: no more than its even share of those that may have begun.

    Args:
        most: for which a player has room.
        groups: of an update.

    Example::

        groups_at_once(8, groups=6, max_staleness=0, players=2)  # 3
    """
    return max(1, min(most, math.ceil(groups * (max_staleness + 1) / players)))


class Dispatcher:
    """Hands groups to players. What a lost player had goes to others, before all else.

    Args:
        attempts: players that a group may lose; then it is given up, since it may be the group that kills them.
    """

    def __init__(self, attempts: int = 3) -> None:
        self._attempts = attempts
        self._waiting: deque[int] = deque()
        self._playing: dict[Hashable, set[int]] = {}
        self._losses: Counter[int] = Counter()

    @property
    def waits(self) -> bool:
        """Whether a group has no player yet."""
        return bool(self._waiting)

    def add(self, groups: Iterable[int]) -> None:
        self._waiting.extend(groups)

    def next_for(self, player: Hashable) -> int | None:
        """A group for a player that has room for one; ``None`` where no group waits."""
        if not self._waiting:
            return None
        group = self._waiting.popleft()
        self._playing.setdefault(player, set()).add(group)
        return group

    def finished(self, player: Hashable, group: int) -> bool:
        """Whether this result counts: not one that comes from a player after it was given up."""
        if group not in self._playing.get(player, ()):
            return False
        self._playing[player].remove(group)
        self._losses.pop(group, None)
        return True

    def lost(self, player: Hashable) -> list[int]:
        """Takes back all that the player had; returns the groups that have no further attempt."""
        groups = sorted(self._playing.pop(player, ()))
        self._losses.update(groups)
        given_up = [group for group in groups if self._losses[group] >= self._attempts]
        self._waiting.extendleft(reversed([group for group in groups if group not in given_up]))
        return given_up


class Lookahead:
    """Groups that are played ahead of the updates that learn from them, within a bound of staleness.

    The staleness of a group is how many updates its oldest token is behind the policy that learns from it. Groups
    begin only as long as all that have begun could be learned from in time (as in AReaL, arXiv 2505.24298: at most
    ``groups * (version + max_staleness + 1)`` have begun, without those that were dropped). An update learns from those
    that finished first by number; a group that is late counts for a later update, or is dropped where it would be
    too old.

    Args:
        groups: that an update learns from.
        max_staleness: 0 plays the groups of an update after the update before it.
        version: updates that are done.
        updates: after which nothing is learned any more; no groups begin for later ones.
    """

    def __init__(self, groups: int, max_staleness: int, version: int = 0, updates: int = sys.maxsize) -> None:
        self.groups, self.max_staleness, self.version, self.updates = groups, max_staleness, version, updates
        self.begun = groups * version
        self.dropped = 0
        self._finished: dict[int, int] = {}  # the version of the oldest token by group

    def begin(self) -> range:
        """Numbers of the groups that may begin now."""
        most = self.groups * min(self.version + self.max_staleness + 1, self.updates) + self.dropped
        new = range(self.begun, max(most, self.begun))
        self.begun = new.stop
        return new

    def finished(self, group: int, oldest: int) -> None:
        """``oldest``: the version of the group's oldest token."""
        self._finished[group] = oldest

    def drop_stale(self) -> list[int]:
        """Removes what is too old for the next update; others begin in place of it (``begin``)."""
        stale = sorted(n for n, oldest in self._finished.items() if self.version - oldest > self.max_staleness)
        for group in stale:
            del self._finished[group]
        self.dropped += len(stale)
        return stale

    def take(self) -> dict[int, int] | None:
        """The groups of the next update with their staleness; counts the update as done. ``None``: too few have
        finished.
        """
        if len(self._finished) < self.groups:
            return None
        taken = {n: self.version - self._finished.pop(n) for n in sorted(self._finished)[: self.groups]}
        self.version += 1
        return taken
