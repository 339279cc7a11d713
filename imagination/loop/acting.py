"""Real episodes of a round: played in waves that cannot exceed the budget, and written down step by step."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from imagination.loop.budget import Budget, wave
from imagination.loop.journal import Journal, JournalEnv
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.runs.progress_bar import Bar
from real_envs.env import Agent, TaskSet
from real_envs.trajectory import Trajectory

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between two tries in a world that answers nothing
_TRIES = 3  # of an episode that breaks before its first answer while others are answered


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
    patience: float = 0.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Plays what the journal has not yet, as far as the budget goes.

    An episode that breaks before the world's first answer is tried again. Where a whole wave breaks so, the world is
    taken to be away for a while: it is asked again after a second, two, four, at most each minute.

    Args:
        before: steps charged and seconds spent by earlier rounds.
        longest: turns of an episode.
        workers: episodes at a time. With a limit of seconds, also those of a wave: time is looked at between waves.
        patience: seconds to wait in all.
    """
    by_seed = {episode.seed: episode for episode in episodes}
    most = workers if budget.seconds else None
    tries = Counter[str]()
    waited, wait = 0.0, _FIRST_WAIT

    def make_env() -> JournalEnv:
        return JournalEnv(tasks.make_env(), journal, by_seed, lambda e: (agent_of(e).name, stamp_of(e)))

    with Bar(what, len(episodes), "turns") as bar:

        def keep(trajectory: Trajectory) -> None:
            journal.end(trajectory)
            bar.advance(len(journal.played))

        while True:
            left = budget.left(before[0] + journal.charged, before[1] + journal.spent.seconds)
            waiting = [e.id for e in episodes if e.id not in journal.played and tries[e.id] < _TRIES]
            limits = wave(waiting, left, longest, most)
            if not limits:
                return

            def limit_of(episode: Episode, limits: dict[str, int] = limits) -> int:
                return limits[episode.id]

            now, charged = [e for e in episodes if e.id in limits], journal.charged
            await play_all(
                now, make_env, agent_of, stamp_of, limit_of, concurrency=workers, on_done=keep, on_turn=bar.count
            )
            if journal.charged > charged:
                tries.update(limits)
                wait = _FIRST_WAIT
                continue
            if journal.played >= set(limits):  # none came to a step, and the world is not to blame
                continue
            if waited >= patience:
                return
            wait = min(wait, patience - waited)
            print(f"note: the real world does not answer; waiting {wait:g} s ({journal.failed[-1]})", file=sys.stderr)
            await sleep(wait)
            waited, wait = waited + wait, min(2 * wait, _LONGEST_WAIT)
