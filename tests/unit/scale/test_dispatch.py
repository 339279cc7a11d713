"""If this fails, episodes are lost or learned from twice when a player dies, or an update learns from stale ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagination.scale.dispatch import Dispatcher, Lookahead, groups_at_once


@pytest.mark.parametrize("players", [1, 2, 3, 6])
@pytest.mark.parametrize("most", [0, 1])
def test_no_player_takes_so_many_groups_that_another_has_none(players: int, most: int) -> None:
    dispatcher, ahead = Dispatcher(), Lookahead(groups=6, max_staleness=most)
    dispatcher.add(ahead.begin())
    each = groups_at_once(100, 6, most, players)
    taken = [sum(dispatcher.next_for(place) is not None for _ in range(each)) for place in range(players)]
    assert taken == [6 * (most + 1) // players] * players
    assert groups_at_once(2, 6, most, 1) == 2
    assert groups_at_once(8, 6, 0, 40) == groups_at_once(0, 6, 0, 2) == 1


def test_a_lost_player_gives_its_groups_to_others_before_all_else() -> None:
    dispatcher = Dispatcher()
    dispatcher.add(range(4))
    assert [dispatcher.next_for("a"), dispatcher.next_for("b"), dispatcher.next_for("a")] == [0, 1, 2]
    assert dispatcher.lost("a") == []
    assert not dispatcher.finished("a", 0)  # its answer came too late
    assert [dispatcher.next_for("b") for _ in range(4)] == [0, 2, 3, None]
    assert all(dispatcher.finished("b", n) for n in range(4))
    assert not dispatcher.finished("b", 3)  # once


def test_a_group_that_loses_too_many_players_is_given_up() -> None:
    dispatcher = Dispatcher(attempts=2)
    dispatcher.add([7, 8])
    dispatcher.next_for("a")
    assert dispatcher.lost("a") == []
    dispatcher.next_for("b")
    dispatcher.next_for("b")
    assert dispatcher.lost("b") == [7]
    assert dispatcher.next_for("c") == 8


@given(st.integers(0, 10**6))
def test_each_group_counts_once_whoever_is_lost(seed: int) -> None:
    chance, dispatcher, counted = random.Random(seed), Dispatcher(attempts=10**6), list[int]()
    dispatcher.add(range(20))
    playing: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while len(counted) < 20:
        player = chance.randrange(3)
        match chance.randrange(3):
            case 0 if (group := dispatcher.next_for(player)) is not None:
                playing[player].append(group)
            case 1 if playing[player]:
                group = playing[player].pop()
                if dispatcher.finished(player, group):
                    counted.append(group)
            case 2 if chance.random() < 0.2:
                dispatcher.lost(player)
                if chance.random() < 0.5:
                    playing[player] = []  # otherwise its answers come nevertheless
    assert sorted(counted) == list(range(20))
    assert dispatcher.next_for(0) is None


def test_without_staleness_an_update_waits_for_all_of_its_own_groups() -> None:
    ahead = Lookahead(groups=3, max_staleness=0, version=5)
    assert list(ahead.begin()) == [15, 16, 17]
    assert list(ahead.begin()) == []
    ahead.finished(17, 5)
    ahead.finished(15, 5)
    assert ahead.take() is None
    ahead.finished(16, 5)
    assert ahead.take() == {15: 0, 16: 0, 17: 0}
    assert list(ahead.begin()) == [18, 19, 20]


def test_a_late_group_counts_for_a_later_update_or_is_dropped() -> None:
    ahead = Lookahead(groups=2, max_staleness=1)
    assert list(ahead.begin()) == [0, 1, 2, 3]
    for n in (1, 2):
        ahead.finished(n, 0)
    assert ahead.take() == {1: 0, 2: 0}
    assert list(ahead.begin()) == [4, 5]
    for n in (3, 4):
        ahead.finished(n, n // 4)
    assert ahead.take() == {3: 1, 4: 0}
    ahead.finished(0, 0)  # two updates behind
    ahead.begin()
    assert ahead.drop_stale() == [0]
    assert ahead.dropped == 1
    assert list(ahead.begin()) == [8]  # in place of it


@pytest.mark.parametrize("most", [0, 1, 4])
def test_nothing_begins_that_no_update_would_learn_from(most: int) -> None:
    ahead = Lookahead(groups=2, max_staleness=most, updates=3)
    begun = list[int]()
    for version in range(3):
        for number in (new := ahead.begin()):
            ahead.finished(number, version)
        begun += new
        ahead.drop_stale()
        assert ahead.take() is not None
    assert begun == list(range(6))


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_update_learns_from_what_is_too_old_and_none_waits_for_ever(most: int) -> None:
    """Players that take one to forty rounds a group, at random."""
    for seed in range(20):
        chance, ahead = random.Random(seed), Lookahead(groups=4, max_staleness=most)
        left: dict[int, tuple[int, int]] = {}  # rounds to go, and the version at the beginning
        used, rounds = list[int](), 0
        while ahead.version < 30:
            for n in ahead.begin():
                left[n] = (chance.choice([1, 2, 40]), ahead.version)
            left = {n: (rounds_left - 1, version) for n, (rounds_left, version) in left.items()}
            for n in [n for n, (rounds_left, _) in left.items() if rounds_left <= 0]:
                ahead.finished(n, left.pop(n)[1])
            ahead.drop_stale()
            if (taken := ahead.take()) is not None:
                assert max(taken.values()) <= most
                assert len(taken) == 4
                used += taken
            rounds += 1
            assert rounds < 30 * 45
        assert len(set(used)) == len(used)
        assert most or not ahead.dropped
