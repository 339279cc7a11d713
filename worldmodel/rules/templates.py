"""Texts as words, and actions as templates with slots: ``put coin in box`` is ``put {1} in {2}``.

A log parser in the manner of Drain (He et al. 2017): words that join (``in``, ``to``, ``the``) and punctuation are
literal, what stands between them fills a slot, and a slot that only ever holds one value is literal as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

NEWLINE = "¶"
OTHER = "*"  # the template of actions that match none
ANY = "**"  # stands for all templates with a slot
_TOKEN = re.compile(r"\n|\w+(?:['#.-]\w+)*|[^\w\s]")
_SLOT = re.compile(r"\{(\d)\}")
_MOST_SLOTS = 4
_LEAST = 20  # actions of a template
_JOINING_WORDS = """
    a an the this that these those my your his her its their our at to in into on onto from with without up down of
    off out over under inside near by for about and or as against through behind between beside across than then
"""
_JOINING = frozenset(_JOINING_WORDS.split())


@lru_cache(maxsize=1 << 16)
def words(text: str) -> tuple[str, ...]:
    """Lower-case words and single punctuation marks; a line break is ``¶``.

    >>> words("Go to the Hall.\\nNow")
    ('go', 'to', 'the', 'hall', '.', '¶', 'now')
    """
    return tuple(NEWLINE if token == "\n" else token for token in _TOKEN.findall(text.strip().lower()))


@lru_cache(maxsize=1 << 16)
def flat(text: str) -> str:
    """The words between single spaces, with one at either end: a phrase stands in it where ``f" {phrase} "`` does."""
    return f" {' '.join(words(text))} "


def _is_literal(word: str) -> bool:
    return word in _JOINING or not (word[0].isalnum() or word[0] == "_")


def _shape(tokens: Sequence[str]) -> tuple[str, ...]:
    """The template of an action, slots numbered from 1."""
    if not tokens:
        return ()
    parts, slots, filling = [tokens[0]], 0, False
    for token in tokens[1:]:
        if _is_literal(token):
            parts.append(token)
            filling = False
        elif not filling:
            slots += 1
            parts.append(f"{{{slots}}}")
            filling = True
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Action:
    """An action read by the template it matches."""

    template: str
    fillers: tuple[str, ...]  # the words in each slot, joined by spaces, in lower case
    text: str  # the action as it was given

    @property
    def written(self) -> tuple[str, ...]:
        """The fillers as they were written, in upper and lower case, with all blanks between quotes."""
        match = _surface_pattern(self.template).fullmatch(self.text.strip()) if self.fillers else None
        return match.groups() if match else self.fillers


@lru_cache(maxsize=1024)
def _surface_pattern(template: str) -> re.Pattern[str]:
    tokens = re.sub(r"""(?<=['"]) (?=\{\d\})|(?<=\d\}) (?=['"])""", "", template).split()
    parts = ("(.+?)".join(map(re.escape, re.split(r"\{\d\}", token))) for token in tokens)
    return re.compile(r"\s*".join(parts), flags=re.IGNORECASE)


@lru_cache(maxsize=1024)
def _pattern(template: str) -> re.Pattern[str]:
    """Of words that were joined by spaces."""
    return re.compile(
        " ".join("(.+?)" if _SLOT.fullmatch(token) else re.escape(token) for token in template.split(" "))
    )


class Templates:
    """An action is read by the first template that it matches: the most specific come first."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._by_verb: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
        for text in self.texts:
            self._by_verb.setdefault(text.split(" ", 1)[0], []).append((text, _pattern(text)))
        self._read: dict[str, Action] = {}

    def read(self, action: str) -> Action:
        parsed = self._read.get(action)
        if parsed is None:
            if len(self._read) > 1 << 15:
                self._read.clear()
            parsed = self._read[action] = self._match(action)
        return parsed

    def _match(self, action: str) -> Action:
        tokens = words(action)
        joined = " ".join(tokens)
        for text, pattern in self._by_verb.get(tokens[0] if tokens else "", ()):
            match = pattern.fullmatch(joined)
            if match:
                return Action(text, match.groups(), action)
        return Action(OTHER, (), action)


def find_templates(actions: Iterable[str]) -> Templates:
    """The templates that at least ``_LEAST`` of the actions have, and one in a thousand."""
    counts = Counter(actions)
    total = sum(counts.values())
    shapes: Counter[tuple[str, ...]] = Counter()
    values: dict[tuple[tuple[str, ...], int], Counter[str]] = {}
    for action, times in counts.items():
        tokens = words(action)
        shape = _shape(tokens)
        if not shape or sum(part.startswith("{") for part in shape) > _MOST_SLOTS:
            continue
        shapes[shape] += times
        match = _pattern(" ".join(shape)).fullmatch(" ".join(tokens))
        for slot, filler in enumerate(match.groups() if match else (), start=1):
            values.setdefault((shape, slot), Counter())[filler] += times
    kept = [shape for shape, times in shapes.items() if times >= max(_LEAST, total / 1000)]
    texts = {_with_constants(shape, values) for shape in kept}
    return Templates(sorted(texts, key=lambda text: (-len(_SLOT.sub("", text).split()), text)))


def _with_constants(shape: tuple[str, ...], values: dict[tuple[tuple[str, ...], int], Counter[str]]) -> str:
    parts, slot, number = [], 0, 0
    for part in shape:
        if _SLOT.fullmatch(part):
            slot += 1
            only = values.get((shape, slot), Counter())
            if len(only) == 1:
                part = next(iter(only))
            else:
                number += 1
                part = f"{{{number}}}"
        parts.append(part)
    return " ".join(parts)


def fill(pattern: str, fillers: Sequence[str]) -> str:
    """``You take the {1}.`` with its slots filled."""
    return _SLOT.sub(lambda m: fillers[int(m[1]) - 1] if int(m[1]) <= len(fillers) else m[0], pattern)


def blank(text: str, fillers: Sequence[str]) -> str:
    """The text with a slot wherever a filler stands, the longest filler first: the inverse of ``fill``."""
    for slot, filler in sorted(enumerate(fillers, start=1), key=lambda item: -len(item[1])):
        words_ = r"\s+".join(re.escape(word) for word in filler.split())
        text = re.sub(rf"(?<![\w{{]){words_}(?![\w}}])", f"{{{slot}}}", text, flags=re.IGNORECASE)
    return text
