"""Alignment decides what is called the world model's mistake. Answers worked out by hand, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagination.evaluation.compare.alignment import TurnClass, align, differences, says_the_same
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.comparisons import episode


def turn(text: str, reward: float | None = 0.0, end: bool = False, action: str = "go east") -> Turn:
    return Turn(action, text, reward, end)


def real(*turns: Turn, stop: StopReason | None = None) -> Trajectory:
    return episode("r", turns, Source.REAL, stop)


@pytest.mark.parametrize(
    ("dreamed", "true", "kinds"),
    [
        (turn("A hall."), turn("A  hall.\n"), []),
        (turn("A hall.", None), turn("A hall.", 1.0), []),
        (turn("A hall.", 0.333333), turn("A hall.", 1 / 3), []),
        (turn("There is a lamp here."), turn("A lamp!"), ["wording"]),
        (turn("You see a key. A lamp."), turn("A LAMP. You see the key."), ["wording"]),
        (turn("You take the lamp."), turn("You grab the lamp."), ["state"]),
        (turn("The door is open."), turn("The door is not open."), ["state"]),
        (turn("A lamp in a box."), turn("A box in a lamp."), ["state"]),
        (turn("It costs 3.5 gold."), turn("It costs 5.3 gold."), ["state"]),
        (turn("It is -5 degrees."), turn("It is 5 degrees."), ["state"]),
        (turn("Key. Key."), turn("Key."), ["state"]),
        (turn("A hall.", 0.5), turn("A hall."), ["reward"]),
        (turn("A hall.", 0.0, True), turn("A hall."), ["end"]),
        (turn("A hall.", 1.0, True), turn("A hall."), ["reward", "end"]),
        (turn("A cat.", 1.0, True), turn("A hall."), ["state", "reward", "end"]),
        (turn("The hall.", 1.0), turn("A hall."), ["reward", "wording"]),
    ],
)
def test_two_answers_differ_in(dreamed: Turn, true: Turn, kinds: list[str]) -> None:
    assert [kind.value for kind in differences(dreamed, true)] == kinds
    assert [kind.value for kind in differences(true, dreamed)] == kinds
    alignment = align(episode("d", [dreamed]), real(true))
    assert alignment.turns[0].kind == (kinds[0] if kinds else "same")


def test_a_dream_that_goes_wrong_and_stays_wrong() -> None:
    dream = episode("d", [turn("Hall."), turn("The key."), turn("A cat."), turn("A dog."), turn("You win.", 1.0, True)])
    alignment = align(dream, real(turn("Hall."), turn("Key."), turn("A rat."), turn("A dog.")))
    assert [t.kind.value for t in alignment.turns] == ["same", "wording", "state", "same", "alone"]
    assert (alignment.first, alignment.first_in_substance, alignment.compared) == (1, 2, 4)
    assert alignment.turns[4].real is None
    assert alignment.same_start


def test_an_answer_that_could_not_be_read_is_the_divergence_and_shows_what_was_real() -> None:
    dream = episode("d", [turn("Hall.")], stop=StopReason.PREDICTION_INVALID)
    logged = real(turn("Hall."), turn("A rat.", action="open chest"), turn("A dog."))
    alignment = align(dream, logged)
    assert [t.kind.value for t in alignment.turns] == ["same", "invalid", "alone"]
    assert alignment.first == alignment.first_in_substance == 1
    assert alignment.turns[1].action == "open chest"
    assert alignment.turns[1].real == logged.turns[1]
    nowhere = align(dream, real(turn("Hall.")), attempted="sing")
    assert (nowhere.turns[1].action, nowhere.turns[1].kind) == ("sing", TurnClass.INVALID)


def test_a_world_that_broke_is_no_divergence() -> None:
    dream = episode("d", [turn("Hall."), turn("Cat.")])
    assert align(dream, real(turn("Hall."), stop=StopReason.ENV_CRASHED)).first is None
    broken = episode("d", [turn("Hall.")], stop=StopReason.ENGINE_FAILED)
    assert align(broken, real(turn("Hall."), turn("Cat."))).first is None


def test_what_the_guard_withheld_is_not_compared() -> None:
    """The guard records a reward of 0 and no end, whatever was predicted: that is not what the model said."""
    dream = episode("d", [turn("Hall."), turn("You win!", 0.0)], stop=StopReason.UNSURE)
    alignment = align(dream, real(turn("Hall."), turn("You win!", 1.0, True)))
    assert [t.kind.value for t in alignment.turns] == ["same", "same"]
    assert [t.unsure for t in alignment.turns] == [False, True]
    wrong = align(dream, real(turn("Hall."), turn("A rat.", 1.0, True)))
    assert wrong.turns[1].differs == (TurnClass.STATE,)
    earlier = align(dream, real(turn("Hall.", 0.5), turn("You win!")))
    assert earlier.first == 0, "only the last turn of an unsure dream is unsure"


def test_other_actions_are_no_pair() -> None:
    with pytest.raises(ValueError, match=r"turn 0 of d is 'go east', .* 'sing'"):
        align(episode("d", [turn("Hall.")]), real(turn("Hall.", action="sing")))


def test_another_start_is_told() -> None:
    other = replace(real(turn("Hall.")), start="-= Cellar =-")
    assert not align(episode("d", [turn("Hall.")]), other).same_start


TEXTS = st.text("abc .!\n'", max_size=12)
TURNS = st.lists(
    st.builds(Turn, st.sampled_from(["go", "take"]), TEXTS, st.sampled_from([None, 0.0, 0.5]), st.booleans()),
    max_size=6,
)
STOPS = st.sampled_from([stop for stop in StopReason if stop is not StopReason.PREDICTION_INVALID])


@given(TURNS, STOPS)
def test_an_episode_beside_itself_never_parts(turns: list[Turn], stop: StopReason) -> None:
    alignment = align(episode("d", turns, stop=stop), episode("d", turns, stop=stop))
    assert alignment.first is alignment.first_in_substance is None
    assert alignment.compared == len(turns)
    assert all(turn.kind is TurnClass.SAME and turn.differs == () for turn in alignment.turns)


@given(TURNS, TURNS, TURNS)
def test_later_turns_do_not_move_the_divergence(common: list[Turn], after: list[Turn], instead: list[Turn]) -> None:
    """Both worlds answer ``common`` alike and part at the next turn, whatever happens then."""
    dreamed, true = Turn("go", "dream", 0.0, False), Turn("go", "real", 0.0, False)
    for tail in ([], after, instead):
        one = align(episode("d", [*common, dreamed, *tail]), episode("r", [*common, true, *tail]))
        assert one.first == one.first_in_substance == len(common)
    short = align(episode("d", [*common, dreamed]), episode("r", [*common, true, *after]))
    assert short.first == len(common)


@given(TURNS, st.integers(0, 5), TEXTS, st.booleans())
def test_what_parts_in_substance_parts_at_all(turns: list[Turn], at: int, text: str, end: bool) -> None:
    changed = [replace(t, observation=text, terminated=end) if k == at else t for k, t in enumerate(turns)]
    alignment = align(episode("d", changed), episode("r", turns))
    if alignment.first_in_substance is not None:
        assert alignment.first is not None
        assert alignment.first <= alignment.first_in_substance
    kinds = {kind for turn in alignment.turns for kind in turn.differs}
    assert (alignment.first is None) == (not kinds)


@given(TEXTS, TEXTS)
def test_saying_the_same_is_symmetric_and_ignores_case_and_white_space(a: str, b: str) -> None:
    assert says_the_same(a, b) == says_the_same(b, a)
    assert says_the_same(a, a.upper().replace(" ", "  "))
