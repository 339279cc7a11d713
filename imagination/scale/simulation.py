"""A training with players on a simulated clock, which the rules of a run (``dispatch.py``) drive.

There is an event for each group, none for a turn or a token: thousands of players take seconds. What a player does is
as in ``pool.py``, and when groups begin and are learned from as in ``learning/ahead.py``.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from imagination.scale.dispatch import Dispatcher, Lookahead
from imagination.settings import UserError
from real_envs.seeding import derive_seed


@dataclass(frozen=True, slots=True)
class Workload:
    """What is played and learned from, and what it takes.

    Attributes:
        turns: lengths of episodes, from which those of each group are drawn.
        groups: of an update.
        round_seconds: of a player that plays so many episodes, for a turn of each.
        learn_seconds: of an update.
        publish_seconds: from the weights of an update to their copy in the store, in which nothing is learned.
        send_seconds: from the store to all players; they play on meanwhile, but begin nothing.
        store_seconds: that the learner's machine takes for the episodes of a group; one group after the other.
        spread: of the pace of a group and of the sending to a player: deviation of the logarithm, with mean 1.
    """

    turns: Sequence[int]
    groups: int
    group_size: int
    round_seconds: Callable[[float], float]
    learn_seconds: float
    publish_seconds: float = 0.0
    send_seconds: float = 0.0
    store_seconds: float = 0.0
    spread: float = 0.0


@dataclass(slots=True)
class Outcome:
    """Of the updates after the first ones.

    Attributes:
        seconds: an update.
        learner_idle: share of the time in which nothing is learned.
        players_idle: share of the players' time in which they play nothing.
        staleness: groups by their staleness.
        turns: that were learned from, an update.
        dropped: groups, an update.
    """

    seconds: float
    learner_idle: float
    players_idle: float
    staleness: Counter[int]
    turns: float
    dropped: float


def simulate(
    work: Workload, players: int, at_once: int, max_staleness: int, updates: int = 12, seed: int = 0
) -> Outcome:
    """Plays and learns ``updates`` updates; the first ``max_staleness + 1`` of them, and one more, are not measured.

    Args:
        at_once: groups that a player plays at the same time.

    Raises:
        UserError: simpy is not installed.
    """
    try:
        import simpy
    except ModuleNotFoundError as error:
        raise UserError("scale-sim needs the package simpy: pip install 'imagination[scale]'") from error
    run = _Run(simpy, work, players, at_once, max_staleness, random.Random(derive_seed("scale-sim", seed)))
    learner = run.env.process(run.learn(updates + max_staleness + 2, max_staleness + 2))
    run.env.run(until=learner)
    elapsed = run.env.now - run.begun
    return Outcome(
        seconds=elapsed / updates,
        learner_idle=max(0.0, 1 - updates * work.learn_seconds / elapsed),
        players_idle=max(0.0, 1 - sum(p.busy for p in run.players) / (players * elapsed)),
        staleness=run.staleness,
        turns=run.turns / updates,
        dropped=run.dropped / updates,
    )


@dataclass(slots=True)
class _Group:
    """One that is being played: ``rows`` is how many of its episodes are not over, on average until it ends."""

    rounds: float  # still to play
    rows: float
    pace: float
    oldest: int


@dataclass(slots=True)
class _Player:
    version: int = -1
    loading: int = -1  # the version that is on its way, if it is another
    loaded_at: float = 0.0
    playing: dict[int, _Group] = field(default_factory=dict)
    since: float = 0.0  # the rounds that are left are those of this moment
    busy: float = 0.0
    process: Any = None


class _Run:
    def __init__(
        self, simpy: Any, work: Workload, players: int, at_once: int, max_staleness: int, rng: random.Random
    ) -> None:
        self.env, self._interrupt = simpy.Environment(), simpy.Interrupt
        self._work, self._at_once, self._rng = work, at_once, rng
        self._dispatcher, self._ahead = Dispatcher(), Lookahead(work.groups, max_staleness)
        self._lengths: dict[int, list[int]] = {}
        self._version, self._published, self._store_free = -1, 0.0, 0.0
        self._arrived: dict[int, int] = {}  # the version of the oldest token, by group
        self._changed = self.env.event()
        self._waiting: dict[int, None] = {}  # players with room, in the order in which they began to wait
        self.players = [_Player() for _ in range(players)]
        for place, player in enumerate(self.players):
            player.process = self.env.process(self._play(place, player))
        self.begun, self.turns, self.dropped, self.staleness = 0.0, 0, 0, Counter[int]()

    def learn(self, updates: int, unmeasured: int) -> Any:
        for version in range(updates):
            if version == unmeasured:
                self._measure_from_here()
            yield self.env.timeout(self._work.publish_seconds)
            self._version, self._published = version, self.env.now
            for player in self.players:
                self._load(player)
            if not self._ahead.max_staleness:
                yield self.env.timeout(max(player.loaded_at for player in self.players) - self.env.now)
            while (taken := self._take()) is None:
                yield self._change()
            self.staleness.update(taken.values())
            self.turns += sum(sum(self._lengths.pop(number)) for number in taken)
            yield self.env.timeout(self._work.learn_seconds)
        for player in self.players:
            self._advance(player)

    def _measure_from_here(self) -> None:
        self.begun, self.turns, self.dropped = self.env.now, 0, 0
        self.staleness.clear()
        for player in self.players:
            self._advance(player)
            player.busy = 0.0

    def _take(self) -> dict[int, int] | None:
        """As ``GroupsAhead.take`` without its waiting."""
        while True:
            new = self._ahead.begin()
            self._dispatcher.add(new)
            for place in list(islice(self._waiting, len(new))):
                self.players[place].process.interrupt()
            for number, oldest in self._arrived.items():
                self._ahead.finished(number, oldest)
            self._arrived.clear()
            if not (stale := self._ahead.drop_stale()):
                return self._ahead.take()
            self.dropped += len(stale)
            for number in stale:
                del self._lengths[number]

    def _change(self) -> Any:
        self._changed = self.env.event()
        return self._changed

    def _notify(self, _: Any = None) -> None:
        if not self._changed.triggered:
            self._changed.succeed()

    def _play(self, place: int, player: _Player) -> Any:
        while True:
            self._advance(player)
            for number in [number for number, group in player.playing.items() if group.rounds <= 1e-6]:
                self._finish(place, number, player.playing.pop(number))
            self._load(player)
            if (is_loaded := player.version == player.loading) and player.version >= 0:
                self._begin(place, player)
            self._waiting.pop(place, None)
            if len(player.playing) < self._at_once:
                self._waiting[place] = None
            seconds = math.inf if is_loaded else player.loaded_at - self.env.now
            if player.playing:
                pace = self._round(player)
                seconds = min(seconds, min(g.rounds * g.pace for g in player.playing.values()) * pace)
            with suppress(self._interrupt):
                least = 1e-9 * max(1.0, self.env.now)  # that the clock goes on, whatever is rounded
                yield self.env.event() if seconds == math.inf else self.env.timeout(max(seconds, least))

    def _load(self, player: _Player) -> None:
        """Brings up to date which weights a player has and which are on their way to it; whoever idles is not woken."""
        while player.version != self._version:
            if player.loading == player.version:  # none are on their way
                player.loading = self._version
                sent = self._work.send_seconds * self._chance()
                player.loaded_at = max(player.loaded_at, self._published) + sent
            if player.loaded_at > self.env.now + 1e-9:
                return
            player.version = player.loading

    def _begin(self, place: int, player: _Player) -> None:
        while len(player.playing) < self._at_once and (number := self._dispatcher.next_for(place)) is not None:
            lengths = self._lengths[number] = self._rng.choices(self._work.turns, k=self._work.group_size)
            longest = max(lengths)
            player.playing[number] = _Group(longest, sum(lengths) / longest, self._chance(), player.version)

    def _finish(self, place: int, number: int, group: _Group) -> None:
        assert self._dispatcher.finished(place, number)
        self._store_free = max(self._store_free, self.env.now) + self._work.store_seconds

        def arrived(_: Any) -> None:
            self._arrived[number] = group.oldest
            self._notify()

        self.env.timeout(self._store_free - self.env.now).callbacks.append(arrived)

    def _advance(self, player: _Player) -> None:
        elapsed, player.since = self.env.now - player.since, self.env.now
        if player.playing and elapsed:
            player.busy += elapsed
            pace = self._round(player)
            for group in player.playing.values():
                group.rounds -= elapsed / (pace * group.pace)

    def _round(self, player: _Player) -> float:
        return self._work.round_seconds(sum(group.rows for group in player.playing.values()))

    def _chance(self) -> float:
        spread = self._work.spread
        return self._rng.lognormvariate(-spread * spread / 2, spread) if spread else 1.0
