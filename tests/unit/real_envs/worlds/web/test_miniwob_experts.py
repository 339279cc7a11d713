"""The rules of MiniWoB++'s experts on pages written by hand. If these fail, logs teach nonsense."""

from __future__ import annotations

import pytest

from real_envs.worlds.web.miniwob import FAMILIES, RULES, plan
from real_envs.worlds.web.page import Element


def text(*names: str) -> list[Element]:
    return [Element(None, "text", name) for name in names]


def some(role: str, *names: str, start: int = 1, chosen: str = "", state: str = "checked") -> list[Element]:
    return [
        Element(start + k, role, name, None, (state,) if name and name == chosen else ())
        for k, name in enumerate(names)
    ]


SUBMIT = some("button", "Submit", start=9)
BOXES = "Select b, c and click Submit."
PHONES = [*text("Al", "Phone:"), *some("link", "1-2"), *text("Email:"), *some("link", "a@b", ">", start=2)]


@pytest.mark.parametrize(
    ("family", "goal", "page", "calls"),
    [
        ("click-button", 'Click on the "no" button.', some("button", "yes", "no"), ["click('2')"]),
        ("click-dialog-2", 'the dialog box labeled "x".', some("button", "Close", "OK"), ["click('1')"]),
        ("click-tab", "Click on Tab #2.", some("tab", "Tab #1", "Tab #2"), ["click('2')"]),
        ("click-tab-2", 'the link "et".', some("tab", "A", "B", chosen="A", state="selected"), ["click('2')"]),
        ("click-tab-2", 'the link "et".', some("tab", "A", "B", chosen="B", state="selected"), ["click('1')"]),
        ("click-tab-2", 'the link "et".', some("clickable", "a", "et"), ["click('2')"]),
        ("click-collapsible-2-nodelay", 'link "et".', some("tab", "A", "B"), ["click('1')"]),
        ("click-collapsible-nodelay", "Expand", some("tab", "A", "Submit"), ["click('1')"]),
        ("click-collapsible-nodelay", "", some("tab", "A", "Submit", chosen="A", state="expanded"), ["click('2')"]),
        ("click-checkboxes", BOXES, [*some("checkbox", "a", "b", "c"), *SUBMIT],
         ["click('2')", "click('3')", "click('9')"]),
        ("click-checkboxes", BOXES, [*some("checkbox", "a", "b", chosen="a"), *SUBMIT],
         ["click('1')", "click('2')", "click('9')"]),
        ("click-checkboxes", "Select nothing and click Submit.", [*some("checkbox", "a"), *SUBMIT], ["click('9')"]),
        ("click-option", "Select b and click Submit.", [*some("radio", "a", "b"), *SUBMIT],
         ["click('2')", "click('9')"]),
        ("click-option", "Select b and click Submit.", [*some("radio", "a", "b", chosen="b"), *SUBMIT], ["click('9')"]),
        ("choose-list", "Select Ann from the list and click Submit.", [*some("combobox", ""), *SUBMIT],
         ["select_option('1', 'Ann')", "click('9')"]),
        ("click-scroll-list", "Select a, b from the scroll list and click Submit.",
         [*some("listbox", ""), *some("option", "a", "b", start=2, chosen="a", state="selected"), *SUBMIT],
         ["select_option('1', ['a', 'b'])", "click('9')"]),
        ("enter-text", 'Enter "it\'s" into', [*some("textbox", ""), *SUBMIT], ['fill(\'1\', "it\'s")', "click('9')"]),
        ("enter-password", 'the password "Q1" into',
         [Element(1, "textbox", "", "••"), *some("textbox", "", start=2), *SUBMIT],
         ["fill('2', 'Q1')", "click('9')"]),
        ("login-user", 'username "al" and the password "x" into',
         [*some("textbox", "", ""), *some("button", "Login", start=3)],
         ["fill('1', 'al')", "fill('2', 'x')", "click('3')"]),
        ("enter-date", "Enter 02/04/2012 as", [*some("Date", ""), *SUBMIT], ["fill('1', '2012-02-04')", "click('9')"]),
        ("enter-time", "Enter 8:05 PM as", [*some("InputTime", ""), *SUBMIT], ["fill('1', '20:05')", "click('9')"]),
        ("enter-time", "Enter 12:05 AM as", [*some("InputTime", ""), *SUBMIT], ["fill('1', '00:05')", "click('9')"]),
        ("read-table", "the value of Sex into the", [*text("Age", "7", "Sex", "f"), *some("textbox", ""), *SUBMIT],
         ["fill('1', 'f')", "click('9')"]),
        ("find-word", "the 2nd word in", [*text("In morbi, x."), *some("textbox", ""), *SUBMIT],
         ["fill('1', 'morbi')", "click('9')"]),
        ("simple-arithmetic", "Solve", [*text("9 - 12 ="), *some("textbox", ""), *SUBMIT],
         ["fill('1', '-3')", "click('9')"]),
        ("text-transform", "Type", [*text("L", "o"), *some("textbox", ""), *SUBMIT], ["fill('1', 'Lo')", "click('9')"]),
        ("form-sequence-3", 'Choose 6 ft from the dropdown, then click the button labeled "No".',
         [*some("combobox", ""), *some("button", "Yes", "No", start=2)], ["select_option('1', '6 ft')", "click('3')"]),
        ("multi-layouts", "Search for saga movies directed by Terry from year 2001.",
         [*text("Movies", "Released Date"), *some("textbox", ""), *text("Movie Genre"), *some("textbox", "", start=2),
          *some("button", "Go!", start=3)], ["fill('1', '2001')", "fill('2', 'saga')", "click('3')"]),
        ("phone-book", "Find Al in the contact book and click on their email.", PHONES, ["click('2')"]),
        ("phone-book", "Find Bo in the contact book and click on their email.", PHONES, ["click('3')"]),
        ("focus-text-2", "Focus into the 2nd input textbox.", some("textbox", "", ""), ["click('2')"]),
    ],
)  # fmt: skip
def test_a_rule_gives_what_is_left_to_do(family: str, goal: str, page: list[Element], calls: list[str]) -> None:
    assert plan(family, goal, page) == calls


@pytest.mark.parametrize("family", sorted(RULES))
def test_a_rule_that_does_not_know_the_page_gives_nothing_or_a_call(family: str) -> None:
    """A mistake may have led anywhere."""
    for page in ([], text("Lorem", "ipsum"), some("button", "Submit"), some("textbox", ""), some("tab", "A")):
        for goal in ("", "Do something.", 'Click on "x".', "Select a and click Submit."):
            assert all(call.endswith(")") for call in plan(family, goal, page))


def test_each_family_of_the_world_has_an_expert() -> None:
    assert len(FAMILIES.split()) >= 16
    assert set(FAMILIES.split()) <= set(RULES)
    assert plan("count-shape", "How many?", some("button", "1")) == []
