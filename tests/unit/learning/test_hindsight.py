"""If these fail, a policy imitates episodes for goals that they did not reach, or failures count as solved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagination.learning.hindsight import failed, relabelled
from imagination.settings.models import HindsightSettings
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

GOALS = [[r"You open the (\w+)", r"Open the \1."], [r"You take the (\w+) from the (\w+)", r"Take the \1 from the \2."]]
SETTINGS = HindsightSettings(goals=GOALS)


def episode(*turns: tuple[str, str], start: str = "Eat the bear.\n-= Hall =-", **facts: object) -> Trajectory:
    told = tuple(Turn(action, observation, 0.0, False, {"n": k}) for k, (action, observation) in enumerate(turns))
    made = Trajectory(
        "e", "t", "g", Source.REAL, "noisy", 3, start, told, StopReason.TURN_LIMIT, world_facts=("secret",)
    )
    return replace(made, **facts)  # type: ignore[arg-type]


OPENED = ("open chest", "You open the chest.")
REFUSED = ("eat hall", "You can't.")
WANDERED = episode(
    REFUSED, OPENED, REFUSED, ("take key", "You take the key from the chest."), OPENED, ("look", "-= Hall =-")
)


def test_an_episode_is_told_up_to_the_last_goal_that_it_reached_first() -> None:
    """Opening the chest again is no new goal; what follows the key is left out, and so is what the world refused."""
    told = relabelled(WANDERED, SETTINGS, refusals="^You can't")
    assert told is not None
    assert told.start == "Take the key from the chest.\n-= Hall =-"
    assert [(t.action, t.reward, t.terminated) for t in told.turns] == [
        ("open chest", 0.0, False),
        ("take key", 1.0, True),
    ]
    assert (told.id, told.task_id, told.agent) == ("hindsight/e", "t", "hindsight/noisy")
    assert told.solved
    assert told.stop is StopReason.TERMINATED
    assert (told.world_facts, told.trace) == ((), None)
    assert WANDERED.turns[3].reward == 0.0  # the log is what it was


def test_without_declared_refusals_only_an_observation_that_repeats_itself_is_left_out() -> None:
    told = relabelled(episode(REFUSED, REFUSED, OPENED), SETTINGS)
    assert told is not None
    assert [t.action for t in told.turns] == ["eat hall", "open chest"]


def test_a_goal_that_took_too_long_gives_way_to_an_earlier_one() -> None:
    """Turns are counted without those that are left out: the chest is the first, the key the second."""
    for most, action in ((1, "open chest"), (2, "take key")):
        told = relabelled(WANDERED, replace(SETTINGS, max_turns=most), refusals="^You can't")
        assert told is not None
        assert told.turns[-1].action == action


@pytest.mark.parametrize(
    ("trajectory", "settings"),
    [
        (episode(REFUSED), SETTINGS),
        (episode(OPENED, start="-= Hall =-\nYou open the chest."), SETTINGS),  # it was so from the start
        (episode(OPENED), replace(SETTINGS, place=r"Your task: .*")),
    ],
    ids=["nothing reached", "reached before", "no place for a goal"],
)
def test_what_cannot_be_retold_is_not(trajectory: Trajectory, settings: HindsightSettings) -> None:
    assert relabelled(trajectory, settings) is None


def test_only_what_is_known_to_have_failed_is_retold() -> None:
    """An episode whose success nobody measured may have solved its task; an outage says nothing."""
    unmeasured = tuple(replace(turn, reward=None) for turn in WANDERED.turns)
    paid = (*WANDERED.turns[:-1], replace(WANDERED.turns[-1], reward=1.0))
    assert failed(WANDERED)
    assert failed(replace(WANDERED, turns=unmeasured, success=False))
    assert not failed(replace(WANDERED, turns=unmeasured))
    assert not failed(replace(WANDERED, turns=paid))
    assert not failed(replace(WANDERED, success=True))
    assert not failed(replace(WANDERED, stop=StopReason.ENV_CRASHED))


@pytest.mark.parametrize(
    "settings",
    [{"goals": [["a"]]}, {"goals": [["(", "b"]]}, {"goals": [["a", r"\1"]]}, {"place": "("}, {"max_turns": -1}],
)
def test_declarations_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"goals|max_turns"):
        HindsightSettings(**settings)  # type: ignore[arg-type]
