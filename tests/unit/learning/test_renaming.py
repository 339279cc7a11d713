"""Renamed copies of episodes: things change their names throughout, and nothing else changes."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.renaming import with_renamed
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

WORD = re.compile(r"[A-Za-z]+")
SAID = ["oak", "Brick", "steel", "a1", "of", "the", "lamp25", "25lamp", "box"]


def episode(number: int, start: str, *turns: tuple[str, str]) -> Trajectory:
    told = tuple(Turn(action, seen, float(k == len(turns) - 1), False) for k, (action, seen) in enumerate(turns))
    name = f"task-{number}"
    return Trajectory(f"{name}/0", name, name, Source.EXPERT, "expert", 0, start, told, StopReason.TURN_LIMIT)


LOG = [
    episode(
        0,
        "You see 25kg of oak, a box and nothing else.",
        ("take 25kg of oak", "You take the 25kg of oak."),
        ("inventory", "Your inventory: oak."),
        ("put oak in box", "Oak is in the box."),
    ),
    episode(1, "You see a brick, a box and nothing else.", ("put brick in box", "The brick is in the box.")),
    episode(2, "You see a box and nothing else.", ("look", "You see a box and nothing else.")),
]


def new_names(before: str, after: str) -> dict[str, str]:
    """Word by word; the two texts have equally many."""
    return {a.lower(): b.lower() for a, b in zip(WORD.findall(before), WORD.findall(after), strict=True) if a != b}


def whole(t: Trajectory) -> str:
    return "\n".join([t.start, *(f"{u.action}\n{u.observation}" for u in t.turns)])


def test_things_have_other_names_and_the_rest_stays() -> None:
    told = with_renamed(LOG, 1, seed=3)
    assert told[: len(LOG)] == LOG
    first, second, third = told[len(LOG) :]
    new = new_names(whole(LOG[0]), whole(first))
    # the box is in every task, "inventory" is first said by an action, the unit is a part of a number
    assert new.keys() == {"oak"}
    name = new["oak"]
    assert first.start == f"You see 25kg of {name}, a box and nothing else."
    assert [u.action for u in first.turns] == [f"take 25kg of {name}", "inventory", f"put {name} in box"]
    assert first.turns[-1].observation == f"{name.capitalize()} is in the box."
    assert new_names(whole(LOG[1]), whole(second)).keys() == {"brick"}
    assert third == LOG[2]
    assert [u.reward for u in first.turns] == [u.reward for u in LOG[0].turns]
    assert with_renamed(LOG, 1, seed=3) == told
    assert with_renamed(LOG, 0, seed=3) == LOG
    assert len(with_renamed(LOG, 3, seed=3)) == 4 * len(LOG)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(SAID), min_size=1),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**32),
)
def test_a_copy_is_the_episode_under_one_renaming(texts: list[tuple[list[str], bool]], seed: int) -> None:
    log = [
        episode(k, " ".join(words), (f"take {words[0]}", " ".join(reversed(words))) if acts else ("look", "nothing"))
        for k, (words, acts) in enumerate(texts)
    ]
    for before, after in zip(log, with_renamed(log, 1, seed)[len(log) :], strict=True):
        old, told = whole(before), whole(after)
        assert re.sub(r"[A-Za-z]+", "", old) == re.sub(r"[A-Za-z]+", "", told)  # numbers and layout
        pairs = {(a.lower(), b.lower()) for a, b in zip(WORD.findall(old), WORD.findall(told), strict=True)}
        assert len({a for a, _ in pairs}) == len(pairs) == len({b for _, b in pairs})  # one to one
        assert all(a == b or a in ("oak", "brick", "steel", "the", "box") for a, b in pairs)
