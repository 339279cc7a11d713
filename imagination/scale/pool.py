"""Players that run elsewhere, as one object of this process: work goes in, episodes come out, whoever dies on the way.

The pool has a thread with an event loop of its own, so that players are busy while this process learns. What a player
is hides behind ``PlayerHandle``: an actor of Ray (``ray_players.py``), or an object of a test.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from imagination.rollout.play import Episode
from imagination.scale.dispatch import Dispatcher
from real_envs.errors import UserError
from real_envs.trajectory import Source, StopReason, Trajectory

T = TypeVar("T")
ENV_LOST = "the process of the environment was lost"  # begins the failure of an episode that its player plays again


@dataclass(frozen=True, slots=True)
class Group:
    """Episodes that one player plays together."""

    episodes: tuple[Episode, ...]
    max_turns: int
    source: Source


class PlayerLost(Exception):
    """A player is gone, or of no use any more; another takes its place.

    Attributes:
        kind: died, hung, memory, garbage or error.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class PlayerHandle(Protocol):
    """One player. Its methods raise ``PlayerLost`` where it is gone, ``UserError`` where no other would do better."""

    async def load(self, version: int, weights: Any) -> None:
        """Plays by these weights from now on, in episodes that are under way as well: it waits for what is being
        sampled.
        """
        ...

    async def play(self, group: Group) -> Sequence[Trajectory]:
        """Plays the episodes of a group, in their order."""
        ...

    def kill(self) -> None:
        """Ends it, whatever it does. Does not raise."""
        ...


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """When a player is given up.

    Attributes:
        at_once: groups that a player plays at the same time.
        start_seconds: until a new player has loaded its first weights.
        hang_seconds: for a group, and for later weights.
        attempts: players that a group may lose, and players of one place that may be lost one after the other without
            a group in between.
    """

    at_once: int = 8
    start_seconds: float = 600.0
    hang_seconds: float = 600.0
    attempts: int = 3


@dataclass(slots=True)
class PoolCounts:
    """Since the pool began.

    Attributes:
        lost: players by kind of loss.
        busy_seconds: of all players together, with at least one group each.
    """

    lost: Counter[str] = field(default_factory=Counter)
    busy_seconds: float = 0.0


class PlayerPool:
    """Plays groups on ``count`` players, and replaces those that are lost.

    Args:
        start: makes the player of a place, a number below ``count``; it may return before the player is ready.

    Raises:
        UserError: out of the results, where no player can be had.
    """

    def __init__(self, start: Callable[[int], PlayerHandle], count: int, limits: PoolLimits) -> None:
        self.count, self.limits, self.counts = count, limits, PoolCounts()
        self._start, self._dispatcher = start, Dispatcher(limits.attempts)
        self._groups: dict[int, Group] = {}  # that have no result yet, by number
        self._results: dict[int, Future[list[Trajectory]]] = {}
        self._added = 0
        self._version, self._weights = -1, None
        self._loaded: dict[int, int] = {}  # version by place
        self._played: Counter[int] = Counter()  # groups by place
        self._failures: dict[int, str] = {}  # of places that could not be filled, the last reason
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, name="players", daemon=True)
        self._places: list[asyncio.Task[None]] = []
        self._mistake: BaseException | None = None  # what no player may raise
        self._begun = 0.0  # when the first player was ready

    def publish(self, version: int, weights: Any, wait: bool = True) -> None:
        """Players go over to these weights; groups that are added later begin with them.

        Args:
            wait: until all have them; those that were lost meanwhile are not waited for.

        Raises:
            UserError: no player can be had.
        """
        if not self._thread.is_alive():
            self._thread.start()
        self._call(self._publish(version, weights, wait))

    def add(self, groups: Sequence[Group]) -> list[Future[list[Trajectory]]]:
        """Hands in groups, which are played in this order by whoever is free; their episodes come in their order.

        A group that loses too many players has episodes that ended as ``engine_failed``.
        """
        return self._call(self._add(groups))

    async def play(self, groups: Sequence[Group]) -> list[Trajectory]:
        """All episodes of these groups. Raises ``UserError``: no player can be had."""
        played = await asyncio.gather(*map(asyncio.wrap_future, self.add(groups)))
        return [episode for group in played for episode in group]

    def close(self) -> None:
        """Ends all players."""
        if not self._thread.is_alive():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def speed(self) -> dict[str, float]:
        """The share of the time that players were busy, and how many were lost; since the pool began."""
        share = self.counts.busy_seconds / max(1e-9, self.count * (time.monotonic() - self._begun))
        return {"players_busy": min(1.0, share), **{f"players_{kind}": n for kind, n in self.counts.lost.items()}}

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # what follows runs in the loop of the pool's thread

    async def _publish(self, version: int, weights: Any, wait: bool) -> None:
        self._version, self._weights = version, weights
        if not self._places:
            self._places = [asyncio.create_task(self._fill(place)) for place in range(self.count)]
            for task in self._places:
                task.add_done_callback(self._over)
        async with self._changed:
            self._changed.notify_all()
            if wait:
                await self._changed.wait_for(lambda: self._mistake is not None or self._all_loaded())
        self._raise_if_none()

    def _all_loaded(self) -> bool:
        missing = set(range(self.count)) - self._failures.keys()
        return all(self._loaded.get(place) == self._version for place in missing)

    def _raise_if_none(self) -> None:
        if self._mistake is not None:
            raise self._mistake
        if len(self._failures) == self.count:
            raise UserError(f"no player can be had: {next(iter(self._failures.values()))}")

    async def _add(self, groups: Sequence[Group]) -> list[Future[list[Trajectory]]]:
        self._raise_if_none()
        numbers = range(self._added, self._added + len(groups))
        self._added = numbers.stop
        results: list[Future[list[Trajectory]]] = [Future() for _ in groups]
        self._groups.update(zip(numbers, groups, strict=True))
        self._results.update(zip(numbers, results, strict=True))
        self._dispatcher.add(numbers)
        await self._notify()
        return results

    async def _fill(self, place: int) -> None:
        """Keeps a player in a place, one after the other; gives the place up where ``attempts`` are lost in a row."""
        in_a_row = 0
        while in_a_row < self.limits.attempts:
            played, player = self._played[place], self._start(place)
            try:
                await self._feed(place, player)
            except PlayerLost as lost:
                self.counts.lost[lost.kind] += 1
                reason = f"player {place} {lost.kind}: {lost}"
                print(f"{reason}; another takes its place", file=sys.stderr)
            except UserError as error:
                reason, in_a_row = f"player {place}: {error}", self.limits.attempts
            finally:
                player.kill()
                self._loaded.pop(place, None)
            in_a_row = in_a_row + 1 if self._played[place] == played else 1
            for number in self._dispatcher.lost(place):
                group = self._groups[number]
                self._finish(number, [_failed(episode, group, reason) for episode in group.episodes])
            if in_a_row >= self.limits.attempts:
                self._failures[place] = reason
            await self._notify()
        if len(self._failures) == self.count:
            self._end_results(UserError(f"no player can be had: {reason}"))

    def _over(self, place: asyncio.Task[None]) -> None:
        """Nobody would wait for the task of a place: a mistake in it must not be a run that hangs."""
        if not place.cancelled() and (error := place.exception()) is not None:
            self._mistake = error
            self._end_results(error)
            self._notifying = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _end_results(self, error: BaseException) -> None:
        for result in self._results.values():
            result.set_exception(error)
        self._results.clear()

    async def _feed(self, place: int, player: PlayerHandle) -> None:
        """Gives a player weights and groups until it is lost."""
        playing: dict[asyncio.Task[Sequence[Trajectory]], int] = {}
        waiting: asyncio.Task[None] | None = None
        try:
            while True:
                if self._loaded.get(place) != (version := self._version):
                    limit = self.limits.hang_seconds if place in self._loaded else self.limits.start_seconds
                    await _within(limit, "weights", player.load(version, self._weights))
                    self._loaded[place] = version
                    self._begun = self._begun or time.monotonic()
                    await self._notify()
                    continue
                while len(playing) < self.limits.at_once and (number := self._dispatcher.next_for(place)) is not None:
                    work = _within(self.limits.hang_seconds, "a group", player.play(self._groups[number]))
                    playing[asyncio.create_task(work)] = number
                waiting = waiting or asyncio.create_task(self._woken(place, playing))
                begun = time.monotonic()
                await asyncio.wait([*playing, waiting], return_when=asyncio.FIRST_COMPLETED)
                self.counts.busy_seconds += (time.monotonic() - begun) * bool(playing)
                if waiting.done():
                    waiting = None
                for task in [task for task in playing if task.done()]:
                    number = playing.pop(task)
                    episodes = _checked(task.result(), self._groups[number])
                    if self._dispatcher.finished(place, number):
                        self._played[place] += 1
                        self._finish(number, episodes)
        finally:
            if waiting is not None:
                waiting.cancel()
            for unfinished in playing:
                unfinished.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _woken(self, place: int, playing: Sized) -> None:
        """Returns when there are other weights, or groups for a player with room."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._loaded.get(place) != self._version
                    or (len(playing) < self.limits.at_once and self._dispatcher.waits)
                )
            )

    def _finish(self, number: int, episodes: list[Trajectory]) -> None:
        del self._groups[number]
        self._results.pop(number).set_result(episodes)

    async def _close(self) -> None:
        for task in self._places:
            task.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)


async def _within(seconds: float, what: str, work: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout(seconds):  # wait_for of 3.11 forgets a cancellation that comes with the result
            return await work
    except TimeoutError:
        raise PlayerLost("hung", f"{what} took more than {seconds:g} s") from None


def _checked(episodes: object, group: Group) -> list[Trajectory]:
    """Raises ``PlayerLost``: these are not the episodes of the group."""
    played = list(episodes) if isinstance(episodes, Sequence) else []
    ids = [episode.id for episode in played if isinstance(episode, Trajectory)]
    if ids == [episode.id for episode in group.episodes] and len(ids) == len(played):
        return played
    raise PlayerLost("garbage", f"answered {str(episodes)[:80]!r} instead of {len(group.episodes)} episodes")


def _failed(episode: Episode, group: Group, reason: str) -> Trajectory:
    return Trajectory(
        id=episode.id,
        task_id=episode.task.id,
        group_id=episode.group_id,
        source=group.source,
        agent="policy",
        seed=episode.seed,
        start="",
        turns=(),
        stop=StopReason.ENGINE_FAILED,
        failure=reason,
    )
