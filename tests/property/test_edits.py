"""If these fail, a dream shows what nobody predicted: an edit made another text than was meant, or half of one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.formats.edits import EditFault, EditInvalid, apply, diff

ODD = [
    "",
    "x",
    "=",
    "=x",
    "-1",
    "-1..2",
    "~1 x",
    "+0 y",
    "|z",
    "\\",
    "\\=",
    "[1]",
    "Text",
    "[reward=0]",
    "[1] a",
    "[1] b",
]
NODES = [
    "\t[2] button 'Save'",
    "\t[2] button 'Save', focused",
    "\t\t[3] link",
    "[4]\tq",
    "  [a5] x",
    "\tStaticText 'x'",
]
LINES = st.lists(st.one_of(st.sampled_from(ODD + NODES), st.text(max_size=5)), max_size=9).map("\n".join)
MARKS = st.text(alphabet="ab \n\t\r=\\-~+|[]0123.*é\u2028\u0663", max_size=40)
TEXTS = st.one_of(LINES, MARKS, st.text())


@settings(max_examples=400)
@given(TEXTS, TEXTS, st.lists(TEXTS, max_size=3))
def test_an_edit_makes_what_it_was_made_for(before: str, after: str, earlier: list[str]) -> None:
    """Empty lines, trailing newlines, any character, and lines that look like edits themselves."""
    edit = diff(before, after, earlier)
    assert apply(before, edit, earlier) == after
    assert len(edit) <= len(after) + 1  # a full replacement, where an edit would be longer


@settings(max_examples=400)
@given(TEXTS, TEXTS, st.lists(TEXTS, max_size=2))
def test_any_text_is_an_edit_or_is_refused(before: str, written: str, earlier: list[str]) -> None:
    """A model may write anything: it is applied or typed as invalid, and what it made has a canonical edit."""
    after, refused = None, None
    try:
        after = apply(before, written, earlier)
    except EditInvalid as error:
        refused = error
    if refused is not None:
        assert refused.line == written.split("\n")[refused.number - 1]
        assert repr(refused.line) in str(refused)
    if after is not None:
        assert apply(before, diff(before, after, earlier), earlier) == after


@settings(max_examples=150)
@given(st.lists(st.text(alphabet="abc", min_size=30, max_size=40), min_size=2, max_size=30, unique=True), st.data())
def test_one_changed_line_of_many_is_a_short_edit(lines: list[str], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(lines) - 1))
    after = [*lines[:k], "NEW", *lines[k + 1 :]]
    assert len(diff("\n".join(lines), "\n".join(after))) <= len("=\n~30 NEW")


HALL = "-= Hall =-\nA lamp is here.\nGo east.\nGo west."
TREE = "RootWebArea 'Mail'\n\t[1] list\n\t\t[2] link 'A'\n\t\t\tStaticText 'new'\n\t\t[3] link 'B'\n\t[4] button 'Send'"


@pytest.mark.parametrize(
    ("before", "after", "edit"),
    [
        (HALL, HALL, "="),
        ("", "", ""),
        (HALL, "-= Hall =-\nGo east.\nGo west.", "=\n-2"),
        (HALL, "-= Hall =-\nGo west.", "=\n-2..3"),
        (HALL, HALL.replace("A lamp is here.", "It is dark."), "=\n~2 It is dark."),
        (HALL, HALL + "\nIt rains.\nIt pours.", "=\n+4 It rains.\n|It pours."),
        (HALL, "It rains.\n" + HALL, "=\n+0 It rains."),
        (HALL, "Taken.", "Taken."),  # nothing is shared: the text itself
        ("x", "=", "\\="),
        ("x", "\\x", "\\\\x"),
        (TREE, TREE.replace("'Send'", "'Send', disabled"), "=\n~[4] button 'Send', disabled"),
        (TREE, TREE.replace("\t\t[3] link 'B'\n", ""), "=\n-[3]"),
        (TREE, TREE.replace("\t\t[2] link 'A'\n\t\t\tStaticText 'new'\n", ""), "=\n-[2]*"),
        (TREE, TREE.replace("\t\t\tStaticText 'new'\n", ""), "=\n-[2]+1"),
        (TREE, TREE.replace("[3] link 'B'\n", "[3] link 'B'\n\t\t[9] link 'C'\n"), "=\n+[3] \t\t[9] link 'C'"),
        (TREE, TREE.replace("'Mail'", "'Mail (1)'"), "=\n~1 RootWebArea 'Mail (1)'"),
    ],
)
def test_the_language_by_example(before: str, after: str, edit: str) -> None:
    assert diff(before, after) == edit
    assert apply(before, edit) == after


def test_walking_back_is_an_edit_of_the_latest_visit() -> None:
    """The goal stands before the room in the first observation, and is no part of what is edited."""
    earlier = ["Find the lamp.\n" + HALL, "Taken.", "-= Hall =-\nGo east.\nGo west."]
    now = "-= Hall =-\nGo east.\nGo west.\nIt rains."
    edit = "=-= Hall =-\n+3 It rains."
    assert diff("You are cold.", now, earlier) == edit
    assert apply("You are cold.", edit, earlier) == now
    assert diff("You are cold.", earlier[2], earlier) == diff("You are cold.", HALL, earlier[:2]) == "=-= Hall =-"


def test_two_nodes_that_change_are_two_short_operations() -> None:
    before = "[1] a, focused\n[2] b\n[3] c"
    assert diff(before, "[1] a\n[2] b, focused\n[3] c") == "=\n~[1] a\n~[2] b, focused"


def test_a_node_that_moves_is_written_with_its_depth() -> None:
    before = "[1] a long name\n\t[2] another long name\n[3] a third long name"
    after = before.replace("\t[2]", "[2]")
    edit = diff(before, after)
    assert edit == "=\n~2 [2] another long name"
    assert apply(before, edit) == after


def test_the_cost_decides_what_is_written() -> None:
    after = HALL + "\nIt rains."
    assert diff(HALL, after).startswith("=")
    assert diff(HALL, after, cost=lambda text: text.startswith("=")) == after


@pytest.mark.parametrize(
    ("edit", "fault", "number"),
    [
        ("=\n-5", EditFault.OUT_OF_RANGE, 2),
        ("=\n-0", EditFault.OUT_OF_RANGE, 2),
        ("=\n+5 x", EditFault.OUT_OF_RANGE, 2),
        ("=\n-99999999999999999999", EditFault.OUT_OF_RANGE, 2),
        ("=\n~3..2 x", EditFault.OUT_OF_RANGE, 2),
        ("=-= Cellar =-", EditFault.WRONG_CONTEXT, 1),
        ("=Hall", EditFault.WRONG_CONTEXT, 1),  # a part of a line is no line
        ("=\n-[7]", EditFault.WRONG_CONTEXT, 2),
        ("=\n~2 fine\nmore", EditFault.UNKNOWN_OP, 3),
        ("=\n*2", EditFault.UNKNOWN_OP, 2),
        ("=\n|x", EditFault.UNKNOWN_OP, 2),
        ("=\n-2\n|x", EditFault.UNKNOWN_OP, 3),
        ("=\n-2 lamp", EditFault.UNKNOWN_OP, 2),
        ("=\n~2", EditFault.UNKNOWN_OP, 2),
        ("=\n+1..2 x", EditFault.UNKNOWN_OP, 2),
        ("=\n", EditFault.UNKNOWN_OP, 2),
        ("=\n-3\n-2", EditFault.OUT_OF_ORDER, 3),
        ("=\n-2..3\n~3 x", EditFault.OUT_OF_ORDER, 3),
        ("=\n+2 x\n+2 y", EditFault.OUT_OF_ORDER, 3),
        ("=\n-2\n+1 x", EditFault.OUT_OF_ORDER, 3),
    ],
)
def test_an_invalid_edit_is_refused_with_its_line(edit: str, fault: EditFault, number: int) -> None:
    """The first operation of several may be fine: it is not applied either."""
    with pytest.raises(EditInvalid) as caught:
        apply(HALL, edit)
    assert (caught.value.fault, caught.value.number) == (fault, number)
    assert caught.value.line == edit.split("\n")[number - 1]


def test_an_id_that_two_nodes_have_names_neither() -> None:
    with pytest.raises(EditInvalid) as caught:
        apply("[1] a\n[1] b", "=\n-[1]")
    assert caught.value.fault is EditFault.WRONG_CONTEXT
