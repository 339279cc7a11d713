"""What is marked must be what differs, and the marks must not change the text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from imagination.evaluation.compare.alignment import LONG, line_diff, word_diff


def marked(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[start:end] for start, end in spans]


def test_only_the_changed_words_of_the_changed_line_are_marked() -> None:
    dream = "-= Hall =-\nYou see a red lamp here.\nExits lead east."
    real = "-= Hall =-\nYou see a blue lamp here.\nExits lead east."
    left, right = line_diff(dream, real)
    assert (marked(dream, left), marked(real, right)) == (["red"], ["blue"])


def test_a_line_that_one_side_has_is_marked_whole_and_white_space_is_not() -> None:
    left, right = line_diff("Hall\n\n A  cat.\n", "Hall\nA cat.\nA dog.")
    assert (left, marked("Hall\nA cat.\nA dog.", right)) == ([], ["A dog."])
    assert line_diff("same\n", " same") == ([], [])


def test_lines_that_changed_together_are_compared_one_by_one() -> None:
    a, b = "A red lamp.\nA big box.\nX", "A blue lamp.\nA small box.\nX"
    left, right = line_diff(a, b)
    assert (marked(a, left), marked(b, right)) == (["red", "big"], ["blue", "small"])


def test_very_long_texts_are_marked_between_their_common_ends() -> None:
    filler = "word " * LONG
    left, right = word_diff(f"start {filler}a b end", f"start {filler}c end")
    assert [text for text, differs in left if differs] == ["a b"]
    assert [text for text, differs in right if differs] == ["c"]
    assert "".join(text for text, _ in left) == f"start {filler}a b end"
    assert word_diff("x " * LONG, "x " * (LONG + 1))[0] == [("x " * LONG, False)]


@given(st.text("ab \n.", max_size=30), st.text("ab \n.", max_size=30))
def test_the_unmarked_rest_of_equal_lines_is_equal(a: str, b: str) -> None:
    left, right = line_diff(a, b)
    for text, spans in ((a, left), (b, right)):
        assert all(text[start:end].strip() == text[start:end] != "" for start, end in spans)
        assert all(one[1] <= two[0] for one, two in pairwise(spans))
    if a.split() == b.split() and a.count("\n") == b.count("\n") == 0:
        assert (left, right) == ([], [])
    rest = ["".join(c for i, c in enumerate(t) if not any(s <= i < e for s, e in spans)) for t, spans in
            ((a, left), (b, right))]  # fmt: skip
    assert "".join(rest[0].split()) == "".join(rest[1].split())
