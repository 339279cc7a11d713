"""If this fails, what is said of thousands of players is not what the rules of a run do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from imagination.scale.dispatch import Dispatcher, Lookahead
from imagination.scale.simulation import Workload, simulate

pytest.importorskip("simpy")

# four groups of eight episodes of five turns, 0.1 s a turn of one episode: one player plays an update in 16 s
CONSTANT = Workload([5], 4, 8, lambda rows: 0.1 * rows, learn_seconds=10.0, publish_seconds=1.0, send_seconds=2.0)
PLAY = 16.0


def test_synchronous_with_one_player_is_the_sum_of_playing_sending_and_learning() -> None:
    outcome = simulate(CONSTANT, 1, 4, max_staleness=0)
    assert outcome.seconds == pytest.approx(PLAY + 1 + 2 + 10)
    assert outcome.learner_idle == pytest.approx(1 - 10 / 29)
    assert outcome.players_idle == pytest.approx(1 - PLAY / 29)
    assert (outcome.staleness, outcome.turns, outcome.dropped) == (Counter({0: 4 * 12}), 4 * 8 * 5, 0)


@pytest.mark.parametrize("learn", [1.0, 10.0, 14.5, 30.0, 100.0])
def test_asynchronous_with_one_player_is_the_longer_of_playing_and_learning(learn: float) -> None:
    work = replace(CONSTANT, learn_seconds=learn, send_seconds=0.0)
    outcome = simulate(work, 1, 4, max_staleness=1)
    assert outcome.seconds == pytest.approx(max(PLAY, learn + 1))
    assert set(outcome.staleness) <= {0, 1}


def test_many_players_share_the_groups_and_wait_for_the_longest_episode() -> None:
    assert simulate(CONSTANT, 2, 2, 0).seconds == pytest.approx(PLAY / 2 + 13)
    assert simulate(CONSTANT, 4, 1, 0).seconds == pytest.approx(PLAY / 4 + 13)
    assert simulate(CONSTANT, 64, 1, 0).seconds == pytest.approx(PLAY / 4 + 13)
    # a round takes as long with one episode as with eight: a group is its longest episode
    uneven = replace(CONSTANT, turns=[1, 1, 1, 40], round_seconds=lambda rows: 0.1)
    assert simulate(uneven, 64, 1, 0, updates=40).seconds == pytest.approx(4.0 + 13, rel=0.02)


def test_episodes_of_groups_come_in_one_after_the_other() -> None:
    work = replace(CONSTANT, store_seconds=7.0)
    assert simulate(work, 4, 1, 0).seconds == pytest.approx(PLAY / 4 + 4 * 7 + 13)


@pytest.mark.parametrize("most", [1, 4, 8])
def test_staleness_stays_within_its_bound_and_stale_groups_are_dropped(most: int) -> None:
    work = replace(CONSTANT, turns=[1] * 40 + [60], learn_seconds=0.5, send_seconds=0.1, spread=0.5)
    outcome = simulate(work, 8, 2, most, updates=60)
    assert max(outcome.staleness) <= most
    assert sum(outcome.staleness.values()) == 4 * 60
    if most == 1:
        assert outcome.dropped > 0


def test_the_rules_are_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that all begin as if nothing might be stale, or that one player gets, change what is simulated."""
    before = simulate(CONSTANT, 1, 4, 0)

    def begin(ahead: Lookahead) -> range:
        new = range(ahead.begun, ahead.groups * (ahead.version + 2) + ahead.dropped)
        ahead.begun = new.stop
        return new

    with monkeypatch.context() as patch:
        patch.setattr(Lookahead, "begin", begin)
        planted = simulate(CONSTANT, 1, 4, 0)
        assert planted.dropped > before.dropped == 0
        assert planted.seconds > before.seconds
    handed = Dispatcher.next_for
    monkeypatch.setattr(Dispatcher, "next_for", lambda self, player: handed(self, player) if player == 0 else None)
    assert simulate(CONSTANT, 4, 1, 0).seconds == pytest.approx(PLAY + 13)  # and not a quarter of it
