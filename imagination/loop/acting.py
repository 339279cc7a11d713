"""Real episodes of a round: played in waves that cannot exceed the budget, and written down step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from imagination.dreaming.rollout import Episode, Provenance, play_all
from imagination.loop.budget import Budget, wave
from imagination.loop.journal import Journal, JournalEnv
from imagination.runs.progress_bar import Bar
from policy.agent import Agent
from real_envs.env import TaskSet
from real_envs.trajectory import Trajectory


async def act(
    what: str,
    journal: Journal,
    episodes: Sequence[Episode],
    tasks: TaskSet,
    agent_of: Callable[[Episode], Agent],
    stamp_of: Callable[[Episode], Provenance],
    budget: Budget,
    before: tuple[int, float],
    longest: int,
    workers: int,
) -> None:
    """Plays what the journal has not yet, as far as the budget goes.

    Args:
        before: steps charged and seconds spent by earlier rounds.
        longest: turns of an episode.
        workers: episodes at a time. With a limit of seconds, also those of a wave: time is looked at between waves.
    """
    by_seed = {episode.seed: episode for episode in episodes}
    most = workers if budget.seconds else None

    def make_env() -> JournalEnv:
        return JournalEnv(tasks.make_env(), journal, by_seed, lambda e: (agent_of(e).name, stamp_of(e)))

    with Bar(what, len(episodes), "turns") as bar:

        def keep(trajectory: Trajectory) -> None:
            journal.end(trajectory)
            bar.advance(len(journal.played))

        while True:
            left = budget.left(before[0] + journal.charged, before[1] + journal.spent.seconds)
            limits = wave([e.id for e in episodes if e.id not in journal.played], left, longest, most)
            if not limits:
                return

            def limit_of(episode: Episode, limits: dict[str, int] = limits) -> int:
                return limits[episode.id]

            now = [e for e in episodes if e.id in limits]
            await play_all(
                now, make_env, agent_of, stamp_of, limit_of, concurrency=workers, on_done=keep, on_turn=bar.count
            )
