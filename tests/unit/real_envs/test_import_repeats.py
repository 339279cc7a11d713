"""Turns that repeat each other, against plain counting. If these fail, a report says a world is what it is not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from real_envs.importers.repeats import Repeated, Turns

said = st.sampled_from(["a", "b", "\ud800"])  # half a pair, too, which UTF-8 cannot write
turns_of_tasks = st.lists(st.tuples(st.integers(0, 3), said, said, said), max_size=30)


def counted(rows: list[tuple[int, str, str, str]]) -> Turns:
    turns = Turns()
    for owner, state, action, answer in rows:
        turns.add(owner, state, action, answer)
    return turns


@settings(max_examples=60, deadline=None)
@given(turns_of_tasks, st.sets(st.integers(0, 3)))
def test_counts_are_those_of_a_plain_loop(rows: list[tuple[int, str, str, str]], held: set[int]) -> None:
    turns = counted(rows)
    assert turns.actions == len({action for _, _, action, _ in rows})
    assert turns.answers == len({answer for *_, answer in rows})
    answers: dict[tuple[str, str], Counter[str]] = {}
    for _, state, action, answer in rows:
        answers.setdefault((state, action), Counter())[answer] += 1
    more = [found for found in answers.values() if found.total() > 1]
    usual = sum(max(found.values()) for found in more)
    assert turns.repeated() == Repeated(len(more), sum(found.total() for found in more), usual)
    among = turns.of(held)
    ours, others = ([row[1:] for row in rows if (row[0] in held) is side] for side in (True, False))
    assert turns.doubles(among) == len(ours) - len(set(ours))
    assert turns.doubles(~among) == len(others) - len(set(others))
    assert turns.shared(among, ~among) == sum(row in others for row in ours)


def test_texts_are_not_run_together() -> None:
    turns = counted([(0, "a", "bc", "d"), (0, "ab", "c", "d")])
    assert turns.repeated().pairs == 0
    assert turns.doubles(turns.of([0])) == 0
