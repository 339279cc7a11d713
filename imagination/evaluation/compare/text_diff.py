"""What differs between two texts, down to the words: pure functions, for pages and terminals to mark."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

Span = tuple[int, int]  # characters [start, end) of a text
LONG = 2000  # words; matching them takes time that grows with their square


def word_diff(a: str, b: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both texts cut into ``(piece, differs)``; the pieces of a side joined are that side's text.

    Texts that have less than half in common differ as a whole: marking the "the" that they share only blurs that. So
    do very long ones, between the words with which both begin and end.

    >>> word_diff("a red lamp", "a blue lamp")
    ([('a ', False), ('red', True), (' lamp', False)], [('a ', False), ('blue', True), (' lamp', False)])
    """
    words_a, words_b = re.findall(r"\s+|\w+|[^\w\s]", a), re.findall(r"\s+|\w+|[^\w\s]", b)
    if max(len(words_a), len(words_b)) > LONG:
        return _ends(words_a, words_b)
    matcher = SequenceMatcher(None, words_a, words_b, autojunk=False)
    if matcher.ratio() < 0.5:
        return [(a, True)] * bool(a), [(b, True)] * bool(b)
    left: list[tuple[str, bool]] = []
    right: list[tuple[str, bool]] = []
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        if a1 > a0:
            left.append(("".join(words_a[a0:a1]), kind != "equal"))
        if b1 > b0:
            right.append(("".join(words_b[b0:b1]), kind != "equal"))
    return _merge(left), _merge(right)


def _ends(a: list[str], b: list[str]) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """What lies between the common words at the beginning and at the end differs."""
    limit = min(len(a), len(b))
    head = next((i for i in range(limit) if a[i] != b[i]), limit)
    tail = next((i for i in range(limit - head) if a[-1 - i] != b[-1 - i]), limit - head)

    def cut(words: list[str]) -> list[tuple[str, bool]]:
        end = len(words) - tail
        parts = [("".join(words[:head]), False), ("".join(words[head:end]), True), ("".join(words[end:]), False)]
        return [part for part in parts if part[0]]

    return cut(a), cut(b)


def _merge(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Joins differing pieces that only white space keeps apart, so that a phrase is marked as one."""
    merged: list[tuple[str, bool]] = []
    for i, (text, differs) in enumerate(pieces):
        bridge = not text.strip() and 0 < i < len(pieces) - 1 and pieces[i - 1][1] and pieces[i + 1][1]
        marked = differs or bridge
        if merged and merged[-1][1] == marked:
            merged[-1] = (merged[-1][0] + text, marked)
        else:
            merged.append((text, marked))
    return merged


def line_diff(a: str, b: str) -> tuple[list[Span], list[Span]]:
    """The differing spans of both texts: lines are matched first, then the words inside the lines that changed.

    White space alone is no difference. A line that only one side has is marked whole.

    >>> line_diff("Hall\\nA red lamp.", "Hall\\nA blue lamp.\\nA cat.")
    ([(7, 10)], [(7, 11), (18, 24)])
    """
    lines_a, lines_b = a.splitlines(keepends=True), b.splitlines(keepends=True)
    matcher = SequenceMatcher(None, [_folded(x) for x in lines_a], [_folded(x) for x in lines_b], autojunk=False)
    spans_a: list[Span] = []
    spans_b: list[Span] = []
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        if kind == "equal":
            continue
        common = min(a1 - a0, b1 - b0)  # the first lines of both stand for each other, what is left has no partner
        for i in range(max(a1 - a0, b1 - b0)):
            left = lines_a[a0 + i] if a0 + i < a1 else ""
            right = lines_b[b0 + i] if b0 + i < b1 else ""
            pieces = word_diff(left, right) if i < common else ([(left, True)], [(right, True)])
            spans_a += _spans(pieces[0], sum(map(len, lines_a[: a0 + i])))
            spans_b += _spans(pieces[1], sum(map(len, lines_b[: b0 + i])))
    return spans_a, spans_b


def _folded(line: str) -> str:
    return " ".join(line.split())


def _spans(pieces: list[tuple[str, bool]], start: int) -> list[Span]:
    """Where the differing pieces lie, without white space around them."""
    spans = []
    for text, differs in pieces:
        if differs and text.strip():
            spans.append((start + len(text) - len(text.lstrip()), start + len(text.rstrip())))
        start += len(text)
    return spans
