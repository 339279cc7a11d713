"""Real episodes of a round: played in waves that cannot exceed the budget, and written down step by step."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from imagination.loop.journal import Journal, JournalEnv
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.runs.progress_bar import Bar
from real_envs.env import Agent, TaskSet
from real_envs.trajectory import Trajectory

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between two tries in a world that answers nothing
_TRIES = 3  # of an episode that breaks before its first answer while others are answered


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a loop; 0 is no limit, except of steps.

    Attributes:
        steps: real steps in all.
        seconds: inside real requests.
        price: money.
        step_price: of one real step.
    """

    steps: int
    seconds: float = 0.0
    price: float = 0.0
    step_price: float = 0.0

    def left(self, charged: int, seconds: float = 0.0) -> int:
        """Real steps that may still be taken after ``charged`` of them.

        Example::

            Budget(steps=100, price=5.0, step_price=0.25).left(8)  # 12: money is for 20 steps
        """
        if self.seconds and seconds >= self.seconds:
            return 0
        most = self.steps
        if self.price and self.step_price:
            most = min(most, int(self.price / self.step_price + 1e-9))  # 0.3 / 0.1 is below 3
        return max(0, most - charged)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the real episodes of a round.

    Attributes:
        charged, seconds: real steps and seconds that earlier rounds have spent of the budget.
        max_turns: of an episode.
        workers: episodes at a time.
        patience: seconds to wait in all for a world that does not answer.
    """

    budget: Budget
    charged: int
    seconds: float
    max_turns: int
    workers: int
    patience: float = 0.0


async def act(
    what: str,
    journal: Journal,
    episodes: Sequence[Episode],
    tasks: TaskSet,
    player_of: Callable[[Episode], tuple[Agent, Provenance]],
    limits: Limits,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Plays what the journal has not yet, as far as the budget goes.

    An episode that breaks before the world's first answer is tried again. Where a whole wave breaks so, the world is
    taken to be away for a while: it is asked again after a second, two, four, at most each minute.

    Args:
        player_of: who plays an episode, and what is stamped on it.
        sleep: waits so many seconds.
    """
    by_seed = {episode.seed: episode for episode in episodes}
    at_once = limits.workers if limits.budget.seconds else None  # time is looked at between waves
    tries = Counter[str]()
    waited, wait = 0.0, _FIRST_WAIT

    def make_env() -> JournalEnv:
        return JournalEnv(tasks.make_env(), journal, by_seed, player_of)

    with Bar(what, len(episodes), "turns") as bar:

        def keep(trajectory: Trajectory) -> None:
            journal.end(trajectory)
            bar.advance(len(journal.played))

        while True:
            left = limits.budget.left(limits.charged + journal.charged, limits.seconds + journal.spent.seconds)
            waiting = [e.id for e in episodes if e.id not in journal.played and tries[e.id] < _TRIES]
            turns = wave(waiting, left, limits.max_turns, at_once)
            if not turns:
                return

            def max_turns(episode: Episode, turns: dict[str, int] = turns) -> int:
                return turns[episode.id]

            now, charged = [e for e in episodes if e.id in turns], journal.charged
            await play_all(
                now,
                make_env,
                lambda episode: player_of(episode)[0],
                lambda episode: player_of(episode)[1],
                max_turns,
                limits.workers,
                on_done=keep,
                on_turn=bar.count,
            )
            if journal.charged > charged:
                tries.update(turns)
                wait = _FIRST_WAIT
                continue
            if journal.played >= set(turns):  # none came to a step, and the world is not to blame
                continue
            if waited >= limits.patience:
                return
            wait = min(wait, limits.patience - waited)
            print(f"note: the real world does not answer; waiting {wait:g} s ({journal.failed[-1]})", file=sys.stderr)
            await sleep(wait)
            waited, wait = waited + wait, min(2 * wait, _LONGEST_WAIT)


def wave(waiting: Sequence[str], left: int, longest: int, most: int | None = None) -> dict[str, int]:
    """The next episodes with their turn limits, which are no more than what is left if all are used up.

    So whatever they come to, and in whatever order they end, the budget is not exceeded. What they leave is for the
    next wave.

    Args:
        waiting: ids of the episodes, in order.
        left: real steps.
        longest: turns of an episode.
        most: episodes at a time; by default all.

    Example::

        wave(["a", "b", "c"], left=20, longest=12)  # {"a": 12, "b": 8}
    """
    limits: dict[str, int] = {}
    for name in waiting[:most]:
        if left <= 0:
            break
        limits[name] = min(longest, left)
        left -= limits[name]
    return limits
