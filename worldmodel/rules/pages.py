"""Pages: texts with a line for each element, such as accessibility trees. What does an action change, and what stays?

``[3] checkbox 'Apples' checked`` is the element 3 with a head (role and name) and attributes. Most actions leave the
page as it was, or set an attribute of the element that they name: ``click('3')`` checks it, ``fill('4', 'x')`` gives
it a value. Which of them do what, and when, is found by counting like every rule (``mine.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from real_envs.trajectory import Trajectory
from worldmodel.rules.templates import blank, fill, words

_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_ELEMENT = re.compile(rf"(?P<head>\s*\[(?P<id>[\w-]+)\] (?P<role>[\w-]+)(?: (?P<name>{_QUOTED}))?)(?P<rest>(?: .*)?)")
_ATTRIBUTE = re.compile(rf" ([\w-]+)(=(?:{_QUOTED}|[^\s'\"]+))?")
_OTHERWISE = re.compile(r"""['"\\]|^\s|\s$""")  # quotes, and blanks at the ends, which pages may trim
_LEAST = 20  # turns with a notice
_SHARE = 0.5  # of a log's observations that must have elements


@dataclass(frozen=True, slots=True)
class Change:
    """What an action does to a page; words in it may have slots, ``{1}`` for the first filler."""

    slot: int = 0  # of the filler that is the id of the element acted on; 0 leaves the page as it is
    # attributes that the element gets, ``checked`` or ``value='{2}'``; where ``slot`` is 0, a notice that stands before
    # the page
    sets: str = ""
    drops: str = ""  # names of those that it loses
    # names of attributes that all other elements of the same role lose: of that of the named one, if any
    others: str = ""
    named: str = ""  # ``{2} selected``: an attribute that the element with this name gets

    def __str__(self) -> str:
        if not self.slot:
            return f"the last page{f' behind {self.sets!r}' if self.sets else ''}"
        parts = [
            f"[{{{self.slot}}}] {self.sets}" * bool(self.sets),
            f"[{{{self.slot}}}] no longer {self.drops}" * bool(self.drops),
        ]
        parts += [f"no other {self.others}" * bool(self.others), f"the element named {self.named}" * bool(self.named)]
        return f"the last page with {', '.join(part for part in parts if part)}"


@dataclass(frozen=True, slots=True)
class ParsedElement:
    """A line of a page; ``attributes`` are such as ``("value", "='x'")``."""

    id: str
    role: str
    name: str
    head: str
    attributes: tuple[tuple[str, str], ...]

    def line(self) -> str:
        return self.head + "".join(f" {key}{value}" for key, value in self.attributes)


def read_element(line: str) -> ParsedElement | None:
    """The element of a line; ``None`` where the line is none, or holds more than attributes."""
    match = _ELEMENT.fullmatch(line)
    if match is None:
        return None
    rest, attributes, at = match["rest"], [], 0
    while at < len(rest):
        attribute = _ATTRIBUTE.match(rest, at)
        if attribute is None:
            return None
        attributes.append((attribute[1], attribute[2] or ""))
        at = attribute.end()
    return ParsedElement(match["id"], match["role"], (match["name"] or "''")[1:-1], match["head"], tuple(attributes))


def has_elements(text: str) -> bool:
    return any(_ELEMENT.match(line) for line in text.split("\n"))


def find_notices(log: Sequence[Trajectory]) -> tuple[str, ...] | None:
    """Openings of first lines that stand before a page and are no part of it, such as ``error :``; ``None`` where the
    log has no pages.

    Such a line came or went, and the rest of the text stayed as it was.
    """
    texts = [turn.observation for t in log for turn in t.turns]
    if sum(map(has_elements, texts)) < _SHARE * len(texts):
        return None
    openings: Counter[str] = Counter()
    for trajectory in log:
        before = trajectory.start.strip()
        for turn in trajectory.turns:
            after = turn.observation.strip()
            for longer, shorter in ((after, before), (before, after)):
                first, _, rest = longer.partition("\n")
                other, _, behind = shorter.partition("\n")
                if rest and (rest == shorter or (rest == behind and first != other)):
                    openings[opening(first)] += 1
            before = after
    return tuple(sorted(name for name, n in openings.items() if n >= _LEAST and name))


def opening(line: str) -> str:
    """The first two words of a line that is no element."""
    return "" if _ELEMENT.match(line) else " ".join(words(line)[:2])


def page_of(text: str, notices: Sequence[str]) -> tuple[str, str]:
    """The notices that stand before a page, and the page; it is empty where there is none."""
    lines = text.strip().split("\n")
    k = 0
    while k < len(lines) and opening(lines[k]) in notices:
        k += 1
    page = "\n".join(lines[k:])
    return "\n".join(lines[:k]), page if has_elements(page) else ""


def describe(page: str, notice: str, after: str, fillers: Sequence[str]) -> Change | None:
    """What an action did to the page, in a form that may hold for others too; ``None`` where it did more than that.

    Args:
        notice, after: of the answer, see ``page_of``.
    """
    if after == page:
        return Change(sets=blank(notice, fillers))
    if notice:
        return None
    for slot, filler in enumerate(fillers, start=1):
        change = _change(page.split("\n"), after.split("\n"), slot, filler, fillers)
        if change is not None and apply(change, page, fillers) == after:
            return change
    return None


def _change(
    before: Sequence[str], after: Sequence[str], slot: int, filler: str, fillers: Sequence[str]
) -> Change | None:
    if len(before) != len(after):
        return None
    sets = drops = lost = named = ""
    for old_line, new_line in zip(before, after, strict=True):
        old, new = read_element(old_line), read_element(new_line)
        if old_line == new_line:
            continue
        if old is None or new is None or old.head != new.head:
            return None
        gone = " ".join(key for key, _ in old.attributes if key not in dict(new.attributes))
        come = " ".join(f"{k}{v}" for k, v in new.attributes if dict(old.attributes).get(k) != v)
        if old.id == filler:
            sets, drops = blank(come, fillers), gone
        elif come and old.name in fillers and not named:
            named = f"{{{fillers.index(old.name) + 1}}} {come}"
        elif come:
            return None
        lost = gone if old.id != filler and gone else lost
    return Change(slot, sets, drops, lost, named)


def apply(change: Change, page: str, fillers: Sequence[str]) -> str | None:
    """The page after such a change; ``None`` where it cannot be made: no such element, or nothing to change, or a
    filler that the page would write in other ways.
    """
    written = [filler for slot, filler in enumerate(fillers, start=1) if f"{{{slot}}}" in change.sets]
    if not page or (change.slot and any(map(_OTHERWISE.search, written))):
        return None
    if not change.slot:
        notice = fill(change.sets, fillers)
        return f"{notice}\n{page}" if notice else page
    slot, _, gained = change.named.partition(" ")
    lines = page.split("\n")
    elements = [read_element(line) for line in lines]
    target = [k for k, e in enumerate(elements) if e is not None and e.id == fillers[change.slot - 1]]
    named = [k for k, e in enumerate(elements) if gained and e is not None and e.name == fill(slot, fillers)]
    if len(target) != 1 or (gained and not named):
        return None
    chosen = named[0] if gained else target[0]
    acted = elements[chosen]
    assert acted is not None
    for k, element in enumerate(elements):
        if element is None:
            continue
        if k == target[0]:
            line = _changed(element, fill(change.sets, fillers), change.drops)
            if line is None:
                return None
            lines[k] = line
        elif k == chosen:
            lines[k] = _changed(element, gained, "") or lines[k]
        elif change.others and element.role == acted.role:
            kept = tuple(pair for pair in element.attributes if pair[0] not in change.others.split())
            lines[k] = replace(element, attributes=kept).line()
    return "\n".join(lines)


def _changed(element: ParsedElement, sets: str, drops: str) -> str | None:
    """The line with attributes set and dropped; ``None`` where one to drop is not there, or a flag is set already."""
    attributes = dict(element.attributes)
    for key in drops.split():
        if key not in attributes:
            return None
        del attributes[key]
    for attribute in _ATTRIBUTE.finditer(f" {sets}" if sets else ""):
        key, value = attribute[1], attribute[2] or ""
        if not value and key in attributes:
            return None
        attributes[key] = value
    return replace(element, attributes=tuple(attributes.items())).line()
