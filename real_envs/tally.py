"""Counts over episodes: how many, how long, how many solved, what failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from real_envs.trajectory import StopReason, Trajectory


@dataclass(slots=True)
class Tally:
    """Counts over episodes. ``judged`` ones did not fail and have a success or a reward; only they can be solved."""

    episodes: int = 0
    turns: int = 0
    judged: int = 0
    solved: int = 0
    failures: dict[StopReason, int] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.turns += len(trajectory.turns)
        if trajectory.stop.is_failure:
            self.failures[trajectory.stop] = self.failures.get(trajectory.stop, 0) + 1
        elif trajectory.success is not None or any(turn.reward is not None for turn in trajectory.turns):
            self.judged += 1
            self.solved += trajectory.solved


@dataclass(slots=True)
class Summary:
    """What is in a store: all in all, by split (those without episodes, too), and by agent.

    Example: ``summary.by_split["test"].solved``, ``summary.total.failures[StopReason.ENV_CRASHED]``.
    """

    total: Tally
    by_split: dict[str, Tally]
    by_agent: dict[str, Tally]
