"""Pages written out by hand. If these fail, agents and world models read something else than what is on the screen."""

from __future__ import annotations

from typing import Any

import pytest

from real_envs.worlds.web.page import REFUSALS, ActionError, Element, Numbers, page_text, parse_action, read_page
from tests.support.refusal import refused

CALLS = {"click": (0,), "fill": (0,), "drag_and_drop": (0, 1), "noop": (), "select_option": (0,)}


def node(key: int, role: str, name: str = "", bid: str | None = None, below: tuple[int, ...] = (), **more: Any) -> Any:
    made: dict[str, Any] = {
        "nodeId": str(key), "role": {"value": role}, "name": {"value": name}, "childIds": [str(k) for k in below],
        "properties": [{"name": key, "value": {"value": value}} for key, value in more.items() if key != "value"],
    }  # fmt: skip
    if bid is not None:
        made["browsergym_id"] = bid
    if "value" in more:
        made["value"] = {"value": more["value"]}
    return made


def text_of(*nodes: Any, numbers: Numbers | None = None, **clickable: bool) -> str:
    properties = {bid.removeprefix("b"): {"clickable": True, "visibility": 1.0} for bid in clickable}
    return page_text(read_page({"nodes": list(nodes)}, properties, numbers or Numbers()))


def test_a_page_is_a_line_an_element_in_the_order_of_the_document() -> None:
    text = text_of(
        node(0, "RootWebArea", "Login", "0", (1, 4, 5, 7, 8)),
        node(1, "heading", "Welcome", "12", (2,)),
        node(2, "StaticText", "Welcome"),
        node(4, "textbox", "User\n name", "17", (6,), value="ada", focused=True),
        node(5, "checkbox", "Remember", "20", (), checked="true"),
        node(6, "StaticText", "ada"),
        node(7, "StaticText", "Remember"),
        node(8, "button", "Go", "31", (), disabled=True),
    )
    lines = ["Welcome", "[1] textbox 'User name' value='ada'", "[2] checkbox 'Remember' checked"]
    assert text.split("\n") == [*lines, "[3] button 'Go' disabled"]


def test_numbers_are_the_same_whatever_the_browser_calls_them_and_stay_with_their_elements() -> None:
    def page(first: str, second: str, third: str | None = None) -> list[Any]:
        names = [("A", first), *([("New", third)] if third else []), ("B", second)]
        buttons = [node(k, "button", name, bid) for k, (name, bid) in enumerate(names, 1)]
        return [node(0, "RootWebArea", "", "0", tuple(range(1, len(names) + 1))), *buttons]

    assert text_of(*page("17", "a3")) == text_of(*page("5", "99")) == "[1] button 'A'\n[2] button 'B'"
    numbers = Numbers()
    text_of(*page("17", "a3"), numbers=numbers)
    assert text_of(*page("17", "a3", "44"), numbers=numbers) == "[1] button 'A'\n[3] button 'New'\n[2] button 'B'"
    assert numbers.browser_id("2", {1, 2, 3}) == "a3"


def test_what_can_be_clicked_has_a_number_and_what_contains_more_than_text_has_none() -> None:
    nodes = [
        node(0, "RootWebArea", "", "0", (1, 2)), node(1, "generic", "", "5", (3,)),
        node(2, "generic", "", "6", (4, 5)), node(3, "StaticText", "vel"), node(4, "StaticText", "around"),
        node(5, "link", "inside", "7", (6,)), node(6, "StaticText", "inside"),
    ]  # fmt: skip
    assert text_of(*nodes, b5=True, b6=True) == "[1] clickable 'vel'\naround\n[2] link 'inside'"
    assert text_of(*nodes) == "vel\naround\n[1] link 'inside'"


def test_options_have_numbers_by_which_edits_find_them() -> None:
    def page(role: str) -> str:
        return text_of(
            node(0, "RootWebArea", "", "0", (1,)),
            node(1, role, "Size", "3", (2, 3), value="S"),
            node(2, "option", "S", "4", (), selected=True),
            node(3, "option", "M", "5", (), selected=False),
        )

    assert page("combobox") == "[1] combobox 'Size' value='S'\n[2] option 'S' selected\n[3] option 'M'"
    assert page("listbox") == "[1] listbox 'Size'\n[2] option 'S' selected\n[3] option 'M'"


def test_parts_of_a_date_and_ignored_nodes_are_not_told() -> None:
    date = node(1, "Date", "When", "3", (2,), value="2012-02-04")
    part = node(2, "spinbutton", "Month", "3")
    ignored = {**node(3, "button", "hidden", "9"), "ignored": True}
    text = text_of(node(0, "RootWebArea", "", "0", (1, 3)), date, part, ignored)
    assert text == "[1] Date 'When' value='2012-02-04'"
    assert text_of(node(0, "RootWebArea", "", "0")) == "(an empty page)"


def told(action: str) -> str:
    """The call of a page that has shown three elements, the third of which it does not show any more."""
    numbers = Numbers()
    for bid in ("17", "a3", "99"):
        numbers.of(bid)
    return parse_action(action, numbers, {1, 2}, CALLS)


def test_calls_reach_the_browser_with_its_own_ids() -> None:
    assert told("click('2')") == told(" click(2) ") == "click('a3')"
    assert told("fill('1', 'it\\'s \"2\"')") == "fill('17', 'it\\'s \"2\"')"
    assert told("drag_and_drop('1', '2')") == "drag_and_drop('17', 'a3')"
    assert told("select_option('1', ['2', 'b'])") == "select_option('17', ['2', 'b'])"
    assert told("noop()") == told("noop(9e9)") == "noop(1000.0)"
    assert told("noop(-5)") == "noop(0.0)"


@pytest.mark.parametrize(
    "action",
    ["", "click", "click '1'", "click('1') click('2')", "click('1", "click(bid='1')", "click(open('x'))",
     "a.click('1')",
     "click(*[1])", "fill('1', {'a': 1})", "[" * 9999, "type('1', 'x')", "__import__('os')", "click('3')", "click('9')",
     "click('²')", "click('1.0')", "click(None)", "click('')", "click('-1')", "noop(1)\nclick('1')", "\0"],
)  # fmt: skip
def test_whatever_no_browser_should_see_is_refused_in_words_that_count_as_invalid(action: str) -> None:
    assert str(refused(lambda: told(action), error=ActionError)).startswith(REFUSALS)


def test_lines_of_elements() -> None:
    assert Element(None, "text", "hello").line == "hello"
    assert Element(4, "option", "M", None, ("selected",)).line == "[4] option 'M' selected"
    assert Element(7, "textbox", "it's", "x", ("disabled",)).line == "[7] textbox \"it's\" value='x' disabled"
