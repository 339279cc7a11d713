"""Web pages as text: an accessibility tree becomes a line an element, with numbers that stay the same.

BrowserGym numbers elements by their place in the document, hidden ones included, so the same button has another number
in every episode. Here elements are numbered as they come into view, from 1 in every episode, and keep their number for
as long as they live. A page then is text like this, and what an action changes are few of its lines::

    Username
    [1] textbox '' value='ada'
    [2] checkbox 'Remember me' checked
    [3] button 'Login'

Actions are BrowserGym's calls on these numbers: ``click('3')``, ``fill('1', 'ada')``, ``select_option('4', 'France')``.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Roles that say nothing that their parent or their children do not say.
_SILENT = frozenset({"none", "InlineTextBox", "ListMarker", "LineBreak", "LayoutTable", "LayoutTableRow"})
_WHOLE = frozenset({"textbox", "searchbox", "slider", "spinbutton", "Date", "DateTime", "InputTime", "ColorWell"})
_HOLDS_VALUE = _WHOLE | {"combobox"}  # what is inside of the others is their value once more, or the browser's business
# What one can act on, wherever it has a number.
_CONTROLS = _HOLDS_VALUE | {"button", "checkbox", "link", "listbox", "option", "radio", "switch", "tab", "treeitem"}
_CONTROLS |= {"menuitem", "menuitemcheckbox", "menuitemradio"}
_TEXT = "StaticText"
# What one can click if the page says so.
_GROUPS = frozenset({"generic", "paragraph", "LabelText", "listitem", "cell", "gridcell", "row"})
_GROUPS |= {"image", "Section", "Pre", "Canvas", "SvgRoot"}
REFUSALS = ("this is no action", "there is no action", "there is no element")


class ActionError(ValueError):
    """An action that no browser can carry out, with what is wrong about it, for the agent to read."""


@dataclass(frozen=True, slots=True)
class Element:
    """A line of a page."""

    number: int | None  # what actions call it by; ``None`` for text alone
    role: str
    name: str
    value: str | None = None  # what has been put into it, ``None`` where nothing can be
    # such as ``checked``, ``selected``, ``expanded``. Where the focus is, is not told: it would move with every action,
    # and actions name their elements.
    states: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Example: ``[2] textbox 'Name' value='ada'``."""
        if self.role == "text":
            return self.name
        number = [] if self.number is None else [f"[{self.number}]"]
        value = [] if self.value is None else [f"value={self.value!r}"]
        return " ".join([*number, self.role, repr(self.name), *value, *self.states])


class Numbers:
    """The numbers of the elements of one episode, and BrowserGym's ids behind them."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._id: dict[int, str] = {}

    def of(self, browser_id: str) -> int:
        """The element's number, a new one at its first sight."""
        if browser_id not in self._number:
            number = len(self._number) + 1
            self._number[browser_id], self._id[number] = number, browser_id
        return self._number[browser_id]

    def browser_id(self, number: str, here: Collection[int]) -> str:
        """Raises ``ActionError`` where there is no such element on the page."""
        if not number.isascii() or not number.isdecimal() or int(number) not in here:
            raise ActionError(f"there is no element {number!r}")
        return self._id[int(number)]


def read_page(tree: Mapping[str, Any], properties: Mapping[str, Mapping[str, Any]], numbers: Numbers) -> list[Element]:
    """The elements of a page, in the order of the document."""
    nodes = {node["nodeId"]: node for node in tree["nodes"]}
    elements: list[Element] = []

    def visit(node: Mapping[str, Any], above: str) -> None:
        role, name, browser_id = _role(node), _name(node), node.get("browsergym_id")
        if role == _TEXT:
            if name and name not in above and not (elements and elements[-1].name == name):
                elements.append(Element(None, "text", name))
            return
        below = [nodes[k] for k in node.get("childIds", ()) if k in nodes and k != node["nodeId"]]
        shown = above
        if role not in _SILENT and not node.get("ignored"):
            own = properties.get(str(browser_id), {})
            if role in _CONTROLS and browser_id:
                if not (name and name == above):  # a link within a tab of the same name is the tab
                    elements.append(_element(node, role, name, numbers.of(browser_id)))
                    shown = name
                if role in _WHOLE:
                    return
            elif browser_id and own.get("clickable") and role in _GROUPS and own.get("visibility", 1.0):
                text = _only_text(below, nodes)
                if text is not None and not ((text or name) and (text or name) == above):
                    shown = text or name
                    elements.append(_element(node, "clickable", shown, numbers.of(browser_id)))
            elif role == "heading" and name:
                elements.append(Element(None, "text", name))
                shown = name
        for child in below:
            visit(child, shown)

    if tree["nodes"]:
        visit(tree["nodes"][0], "")
    return elements


def page_text(elements: Sequence[Element]) -> str:
    return "\n".join(element.line for element in elements) or "(an empty page)"


def parse_action(
    action: str, numbers: Numbers, here: Collection[int], ids: Mapping[str, Sequence[int]], longest_wait: float = 1000.0
) -> str:
    """The action with BrowserGym's ids in place of our numbers.

    Args:
        here: numbers that the page shows.
        ids: the calls that are known, each with the places of its arguments that name elements.
        longest_wait: ms to which a ``noop`` is cut.

    Raises:
        ActionError: it is no call, no known one, or names an element that is not there. The message begins with one
            of ``REFUSALS``.
    """
    try:
        call = ast.parse(action.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ActionError("this is no action") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        raise ActionError("this is no action")
    if call.func.id not in ids:
        raise ActionError(f"there is no action {call.func.id!r}")
    try:
        arguments = [ast.literal_eval(argument) for argument in call.args]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ActionError("this is no action") from error
    if not all(_plain(argument) for argument in arguments):
        raise ActionError("this is no action")
    for place in ids[call.func.id]:
        if place < len(arguments):
            arguments[place] = numbers.browser_id(str(arguments[place]), here)
    if call.func.id == "noop":
        asked = arguments[0] if arguments else longest_wait
        arguments = [max(0.0, min(float(asked), longest_wait)) if isinstance(asked, (int, float)) else longest_wait]
    return f"{call.func.id}({', '.join(map(repr, arguments))})"


def _plain(argument: object) -> bool:
    return isinstance(argument, (str, int, float)) or (
        isinstance(argument, list) and all(isinstance(part, str) for part in argument)
    )


def _role(node: Mapping[str, Any]) -> str:
    return str(node.get("role", {}).get("value", ""))


def _name(node: Mapping[str, Any]) -> str:
    return " ".join(str(node.get("name", {}).get("value", "")).split())


def _only_text(below: Sequence[Mapping[str, Any]], nodes: Mapping[Any, Mapping[str, Any]]) -> str | None:
    """The text of these nodes, or ``None`` if there is more in them than text."""
    parts: list[str] = []
    for node in below:
        role = _role(node)
        if role == _TEXT:
            parts.append(_name(node))
        elif role == "generic" and node.get("childIds"):
            deeper = _only_text([nodes[k] for k in node["childIds"] if k in nodes], nodes)
            if deeper is None:
                return None
            parts.append(deeper)
        elif role not in ("InlineTextBox", "generic", "none", "image", "SvgRoot"):
            return None
    return " ".join(" ".join(parts).split())


def _element(node: Mapping[str, Any], role: str, name: str, number: int) -> Element:
    held = node.get("value", {}).get("value")
    value = str(held) if role in _HOLDS_VALUE and held not in (None, "") else None
    values = {p["name"]: p.get("value", {}).get("value") for p in node.get("properties", ())}
    states = [state for state in ("selected", "disabled") if values.get(state) is True]
    if values.get("checked") in ("true", True, "mixed"):
        states.append("checked")
    if values.get("expanded") is not None and role != "combobox":
        states.append("expanded" if values["expanded"] else "collapsed")
    return Element(number, role, name, value, tuple(states))
