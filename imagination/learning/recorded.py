"""Real episodes that were played before an update and are learned from in it, in place of ones played beside dreams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from real_envs.trajectory import Trajectory

_TIMES = 2  # that a group is learned from


@dataclass(frozen=True, slots=True)
class Recorded:
    """Groups of the policy's own real episodes, with the tokens that it sampled.

    They are of an earlier policy: staleness in updates is what the caller bounds. The update judges them by their
    ratios, as it does whatever an engine sampled that is not the trainer itself (decoupled PPO: Hilton et al. 2021,
    arXiv 2110.00641, eq. 4).
    """

    groups: tuple[tuple[Trajectory, ...], ...]

    @classmethod
    def of(cls, episodes: Sequence[Trajectory]) -> Recorded:
        """Groups in order of first appearance. Those without sampled tokens, and outages, teach nothing."""
        groups: dict[str, list[Trajectory]] = {}
        for episode in episodes:
            if episode.trace is not None and not episode.stop.is_failure:
                groups.setdefault(episode.group_id, []).append(episode)
        return cls(tuple(map(tuple, groups.values())))

    def deal(self, before: int, count: int) -> list[Trajectory]:
        """``count`` groups, or all if there are not so many, after ``before`` of them were dealt; then from the front.

        Each is dealt twice at most: a few episodes that are learned from again and again are learned by heart.

        Example::

            of three groups a, b, c: deal(0, 2) is a, b; deal(2, 2) is c, a; deal(4, 5) is b, c; deal(6, 2) is none
        """
        n = len(self.groups)
        dealt = [self.groups[k % n] for k in range(before, min(before + min(count, n), _TIMES * n))]
        return [replace(episode, group_id=f"recorded/{episode.group_id}") for group in dealt for episode in group]
