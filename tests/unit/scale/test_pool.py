"""If this fails, a player that dies, hangs or answers nonsense stops a training, or its episodes are lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from imagination.rollout.play import Episode
from imagination.scale.pool import Group, PlayerLost, PlayerPool, PoolLimits
from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.trajectory import Source, StopReason, Trajectory

LIMITS = PoolLimits(at_once=2, start_seconds=0.5, hang_seconds=0.5, attempts=3)
Behaviour = Callable[["FakePlayer", Group], object]


def group(n: int) -> Group:
    return Group(tuple(Episode(f"{n}/{k}", Task("t"), str(n), k) for k in range(2)), 5, Source.DREAM)


def episodes(group: Group, version: int = 0) -> list[Trajectory]:
    return [
        Trajectory(e.id, e.task.id, e.group_id, Source.DREAM, "policy", e.seed, "", (), StopReason.TERMINATED,
                   policy_version=str(version))
        for e in group.episodes
    ]  # fmt: skip


@dataclass
class FakePlayer:
    """Answers as its behaviour says; ``None`` hangs, an exception is raised."""

    behaviour: Behaviour
    number: int  # of players that were started before it
    version: int = -1
    killed: bool = False
    playing: int = 0
    most: int = 0
    loading: object = None

    async def load(self, version: int, weights: Any) -> None:
        if isinstance(self.loading, Exception):
            raise self.loading
        if self.loading == "hang":
            await asyncio.sleep(60)
        if isinstance(self.loading, asyncio.Event):
            await self.loading.wait()
        self.version = version

    async def play(self, group: Group) -> Sequence[Trajectory]:
        self.playing += 1
        self.most = max(self.most, self.playing)
        await asyncio.sleep(0.01)
        self.playing -= 1
        answer = self.behaviour(self, group)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.sleep(60)
        return answer  # type: ignore[return-value]

    def kill(self) -> None:
        self.killed = True


@dataclass
class Players:
    behaviour: Behaviour = lambda player, group: episodes(group, player.version)
    loading: Callable[[int], object] = lambda number: None
    started: list[FakePlayer] = field(default_factory=list)

    def start(self, place: int) -> FakePlayer:
        player = FakePlayer(self.behaviour, len(self.started))
        player.loading = self.loading(player.number)
        self.started.append(player)
        return player


@pytest.fixture
def make() -> Iterator[Callable[..., PlayerPool]]:
    pools: list[PlayerPool] = []

    def make(players: Players, count: int = 2, **limits: Any) -> PlayerPool:
        pools.append(PlayerPool(players.start, count, replace(LIMITS, **limits)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "players"]


def played(pool: PlayerPool, numbers: Sequence[int]) -> list[Trajectory]:
    return asyncio.run(asyncio.wait_for(pool.play([group(n) for n in numbers]), 20))


def ids(numbers: Sequence[int]) -> list[str]:
    return [f"{n}/{k}" for n in numbers for k in range(2)]


def test_episodes_come_in_the_order_of_their_groups_by_the_latest_weights(make: Callable[..., PlayerPool]) -> None:
    players = Players()
    pool = make(players)
    for version in range(3):
        pool.publish(version, None)
        done = played(pool, range(9))
        assert [t.id for t in done] == ids(range(9))
        assert {t.policy_version for t in done} == {str(version)}
    assert len(players.started) == 2
    assert [player.most for player in players.started] == [2, 2]
    assert not pool.counts.lost
    pool.close()
    assert all(player.killed for player in players.started)


def test_a_pool_closes_while_weights_arrive(make: Callable[..., PlayerPool]) -> None:
    """``asyncio.wait_for`` of Python 3.11 returns the result and forgets the cancellation where both come at once."""
    arrived = asyncio.Event()
    pool = make(Players(loading=lambda number: arrived), count=1, start_seconds=30)
    pool.publish(0, None, wait=False)
    loop = pool._loop

    def both() -> None:
        arrived.set()
        closed.append(loop.create_task(pool._close()))

    closed: list[asyncio.Task[None]] = []
    loop.call_soon_threadsafe(loop.call_later, 0.05, both)  # when the player loads
    for _ in range(500):
        if closed and closed[0].done():
            break
        time.sleep(0.01)
    ended = bool(closed) and closed[0].done()
    if not ended:  # a second cancellation is heard
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in pool._places])
    assert ended


@pytest.mark.parametrize(("players", "at_once"), [(2, 3), (1, 6), (3, 2)])
def test_players_that_were_full_play_what_is_added_later(
    make: Callable[..., PlayerPool], players: int, at_once: int
) -> None:
    pool = make(Players(), count=players, at_once=at_once)
    pool.publish(0, None)
    for numbers in (range(6), range(6, 8), range(8, 20)):
        assert [t.id for t in played(pool, numbers)] == ids(numbers)


def test_a_mistake_in_a_player_ends_who_waits_for_weights(make: Callable[..., PlayerPool]) -> None:
    pool = make(Players(loading=lambda number: ZeroDivisionError("a mistake")))
    with pytest.raises(ZeroDivisionError):
        pool.publish(0, None)
    with pytest.raises(ZeroDivisionError):
        pool.add([group(0)])


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (PlayerLost("died", "killed"), "died"),
        (PlayerLost("memory", "out of memory"), "memory"),
        (None, "hung"),
        ("nonsense", "garbage"),
        ([], "garbage"),
        ([1, 2], "garbage"),
        (episodes(group(99)), "garbage"),
    ],
)
def test_what_a_lost_player_had_is_played_by_others(make: Callable[..., PlayerPool], answer: object, kind: str) -> None:
    """The first player fails at its third group; the others do not notice."""
    count = iter(range(10**6))

    def behaviour(player: FakePlayer, group: Group) -> object:
        return answer if player.number == 0 and next(count) >= 2 else episodes(group)

    players = Players(behaviour)
    pool = make(players)
    pool.publish(0, None)
    done = played(pool, range(12))
    assert [t.id for t in done] == ids(range(12))
    assert not any(t.stop.is_failure for t in done)
    assert dict(pool.counts.lost) == {kind: 1}
    assert players.started[0].killed
    assert len(players.started) == 3


def test_a_group_that_kills_its_players_is_a_typed_failure_and_all_others_are_played(
    make: Callable[..., PlayerPool],
) -> None:
    def behaviour(player: FakePlayer, group: Group) -> object:
        return PlayerLost("died", "the group did it") if group.episodes[0].group_id == "1" else episodes(group)

    pool = make(Players(behaviour), at_once=1)
    pool.publish(0, None)
    done = played(pool, range(6))
    assert [t.id for t in done] == ids(range(6))
    assert [t.id for t in done if t.stop is StopReason.ENGINE_FAILED] == ids([1])
    assert "the group did it" in str(done[2].failure)
    assert pool.counts.lost["died"] == 3


def test_weights_reach_players_that_are_playing(make: Callable[..., PlayerPool]) -> None:
    """A long group does not keep a player from newer weights, nor newer weights from a player that waits."""
    release = threading.Event()

    class Slow(FakePlayer):
        async def play(self, group: Group) -> Sequence[Trajectory]:
            await asyncio.to_thread(release.wait)
            return episodes(group, self.version)

    pool = make(Players(), count=1)
    pool._start = lambda place: Slow(lambda p, g: None, 0)
    pool.publish(0, None)
    result = pool.add([group(0)])[0]
    pool.publish(1, None, wait=True)
    assert not result.done()
    release.set()
    assert result.result(5)[0].policy_version == "1"


def test_a_place_that_cannot_be_filled_is_given_up_and_the_others_go_on(make: Callable[..., PlayerPool]) -> None:
    """Players after the first two do not start, and one of the two is lost."""

    def behaviour(player: FakePlayer, group: Group) -> object:
        return PlayerLost("died", "x") if player.number == 0 else episodes(group)

    pool = make(Players(behaviour, lambda n: PlayerLost("died", "no room") if n > 1 else None))
    pool.publish(0, None)
    assert [t.id for t in played(pool, range(8))] == ids(range(8))
    pool.publish(1, None)  # waits for who is there
    assert [t.id for t in played(pool, range(8))] == ids(range(8))


@pytest.mark.parametrize("reason", [PlayerLost("died", "no room"), UserError("no model"), "hang"])
def test_where_no_player_can_be_had_the_training_ends_with_the_reason(
    make: Callable[..., PlayerPool], reason: object
) -> None:
    pool = make(Players(loading=lambda n: reason), start_seconds=0.05)
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"no room|no model|more than 0.05 s"):
        pool.publish(0, None)
    with pytest.raises(UserError):
        played(pool, [0])
    assert time.monotonic() - begun < 10


def test_results_end_with_the_reason_where_the_last_player_goes(make: Callable[..., PlayerPool]) -> None:
    pool = make(Players(lambda p, g: PlayerLost("died", "all of us"), lambda n: None if n < 2 else UserError("gone")))
    pool.publish(0, None)
    with pytest.raises(UserError, match=r"gone|all of us"):
        played(pool, range(4))


def test_a_mistake_in_a_player_handle_is_no_run_that_hangs(make: Callable[..., PlayerPool]) -> None:
    pool = make(Players(lambda p, g: ZeroDivisionError("a bug")))
    pool.publish(0, None)
    with pytest.raises(ZeroDivisionError):
        played(pool, range(4))
