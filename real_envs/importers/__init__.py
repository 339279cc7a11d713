"""Other people's logs as trajectories: one file a format, and one report on what a log covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from real_envs.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a log has and lacks. A world model learns rewards and ends only from turns that state them.

    Attributes:
        episodes, turns: how many there are.
        rewarded_turns: turns with a measured reward, 0.0 included.
        terminated_episodes: those that the world ended; the others break off.
        failed_episodes: those in which the environment broke.
    """

    episodes: int
    turns: int
    rewarded_turns: int
    terminated_episodes: int
    failed_episodes: int

    def __str__(self) -> str:
        return (
            f"{self.episodes} episodes, {self.turns} turns, {self.rewarded_turns} of them with a reward; "
            f"{self.terminated_episodes} episodes end terminated, {self.failed_episodes} failed"
        )


def coverage(trajectories: Iterable[Trajectory]) -> Coverage:
    """Counts what ``Coverage`` lists."""
    episodes = list(trajectories)
    return Coverage(
        episodes=len(episodes),
        turns=sum(len(episode.turns) for episode in episodes),
        rewarded_turns=sum(turn.reward is not None for episode in episodes for turn in episode.turns),
        terminated_episodes=sum(bool(episode.turns) and episode.turns[-1].terminated for episode in episodes),
        failed_episodes=sum(episode.stop.is_failure for episode in episodes),
    )
