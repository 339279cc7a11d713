"""If these fail, a world model spends its training on what never changes anything, or is balanced wrongly."""

from __future__ import annotations

import pytest

from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.objective import balanced, transition_weights, unchanging, unchanging_share


def episode(*turns: Turn, start: str = "ROOM", name: str = "e") -> Trajectory:
    return Trajectory(name, "t", "g", Source.REAL, "a", 0, start, turns, StopReason.TURN_LIMIT)


def test_what_counts_as_unchanging() -> None:
    """The last observation again, or a declared refusal; what pays or ends is a change whatever it says."""
    played = episode(
        Turn("look", "ROOM", 0.0, False),  # what stood there at the start
        Turn("go east", "HALL", 0.0, False),
        Turn("look", "HALL", 0.0, False),
        Turn("open wall", "You can't do that.", 0.0, False),
        Turn("go west", "ROOM", 0.0, False),  # seen before, but another place than the last
        Turn("wait", "ROOM", 1.0, False),
        Turn("wait", "ROOM", 0.0, True),
        Turn("wait", "ROOM", None, False),
    )
    assert unchanging(played) == [True, False, True, False, False, False, False, True]
    assert unchanging(played, "^You can't")[3] is True
    assert unchanging(played, "^can't")[3] is False


def test_the_balance_by_hand() -> None:
    """Weights 1 and 3 of unchanging turns, 2 and 2 of changing ones: half of the total of 8. With a share of 0.2 the
    former get 1.6 of it, in the ratio 1 : 3, and the latter 6.4."""
    weights, same = [[1.0, 2.0], [3.0, 2.0]], [[True, False], [True, False]]
    assert unchanging_share(weights, same) == 0.5
    found = balanced(weights, same, 0.2)
    assert found == [[pytest.approx(0.4), pytest.approx(3.2)], [pytest.approx(1.2), pytest.approx(3.2)]]
    assert unchanging_share(found, same) == pytest.approx(0.2)
    assert balanced(weights, same, 0.0) == [[0.0, 4.0], [0.0, 4.0]]
    assert balanced(weights, same, None) == weights
    assert unchanging_share([[0.0]], [[True]]) is None


@pytest.mark.parametrize(
    ("same", "share", "message"),
    [
        ([[False, False]], 0.2, "no unchanging turn"),
        ([[True, True]], 0.2, "no changing turn"),
        ([[True, False]], 1.0, r"in \[0, 1\)"),
        ([[True, False]], -0.1, r"in \[0, 1\)"),
    ],
)
def test_a_share_that_cannot_be_given_is_refused(same: list[list[bool]], share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balanced([[1.0, 1.0]], same, share)
    assert balanced([[1.0, 1.0]], [[False, False]], 0.0) == [[1.0, 1.0]]


def test_turns_without_a_measured_reward_get_no_share() -> None:
    log = [
        episode(Turn("look", "ROOM", None, False), Turn("look", "ROOM", 0.0, False), Turn("go", "HALL", 0.0, False)),
        episode(Turn("go", "HALL", 0.0, False), name="f"),
    ]
    weights = transition_weights(log, power=1.0)
    found = balanced(weights, [unchanging(t) for t in log], 0.25)
    # "go" from the room is there twice and "look" once: 1/2 + 1/2 against 1, to a mean of 1 over three turns
    assert weights == [[0.0, pytest.approx(1.5), pytest.approx(0.75)], [pytest.approx(0.75)]]
    assert found == [[0.0, pytest.approx(0.75), pytest.approx(1.125)], [pytest.approx(1.125)]]
