"""What an episode's own words say before an action: texts by kind, what was done to things, the way between places."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from worldmodel.rules.pages import page_of
from worldmodel.rules.templates import NEWLINE, Action, Templates, flat, words

SCOPES = ("start", "last", "state", "seen")  # texts of an episode that are of no kind
_MOST_NAME = 6  # words


@dataclass(frozen=True, slots=True)
class Segment:
    """A text of a kind: an observation from the line on that begins as its kind does.

    Attributes:
        text: as it was seen.
        flat: see ``flat``.
        name: the words that follow its opening, up to the next punctuation: ``the kitchen``.
        time: 0 for the start, k for the answer to the k-th action.
    """

    text: str
    flat: str
    name: str
    time: int


@dataclass(frozen=True)
class Language:
    """What the texts of a log are made of.

    Attributes:
        templates: of its actions.
        kinds: openings of observations, such as ``you are in``.
        refuses: whether an answer refuses an action.
        inverses: by action, the one that leads back.
        mentions: words after which the first text names something that later texts of a kind are about: in ``the
            coin that is located in the pantry`` they are ``located in``. ``{located_in}`` stands for that name.
        notices: openings of lines before a page that are no part of it; ``None`` where texts are no pages.
    """

    templates: Templates
    kinds: tuple[str, ...]
    refuses: Callable[[str, str], bool]
    inverses: Mapping[str, str] = field(default_factory=dict)
    mentions: tuple[str, ...] = ()
    notices: tuple[str, ...] | None = None

    def head(self, start: str) -> str:
        """The flat first text up to the first line, after line one, that begins a text of a kind."""
        first, *lines = start.strip().split("\n")
        own = next((k for k, line in enumerate(lines) if self.segments(line, 0)), len(lines))
        return flat("\n".join([first, *lines[:own]]))

    def mentioned(self, start: str) -> dict[str, str]:
        """By placeholder, the names that a first text mentions."""
        head, found = self.head(start), {}
        for words_ in self.mentions:
            if name := name_after(head, words_):
                found[f"{{{words_.replace(' ', '_')}}}"] = name
        return found

    def segments(self, text: str, time: int) -> dict[str, Segment]:
        """The last segment of each kind in a text."""
        if not self.kinds:
            return {}
        found: dict[str, Segment] = {}
        lines = text.strip().split("\n")
        for k, line in enumerate(lines):
            begin = flat(line)
            for kind in self.kinds:
                if begin.startswith(f" {kind} "):
                    rest = "\n".join(lines[k:])
                    found[kind] = Segment(rest, flat(rest), name_of(rest, kind), time)
                    break
        return found


def name_after(text: str, words_: str) -> str:
    """What follows these words in a flat text, up to the next punctuation; empty where they do not stand there."""
    _, found, after = text.partition(f" {words_} ")
    name: list[str] = []
    for word in after.split()[: _MOST_NAME + 1] if found else ():
        if not (word[0].isalnum() or word[0] == "_"):
            break
        name.append(word)
    return " ".join(name)


def name_of(text: str, kind: str) -> str:
    """What follows the opening of a text: of ``You are in the kitchen. ...`` it is ``the kitchen``."""
    name = []
    for word in words(text)[len(kind.split()) :][: _MOST_NAME + 1]:
        if word == NEWLINE or not (word[0].isalnum() or word[0] == "_"):
            break
        name.append(word)
    return " ".join(name)


class Episode:
    """The words of one episode so far. ``add`` each turn; ask in between.

    Attributes:
        start, last: flat texts of the first and the latest observation.
        state: of the latest observation that refused nothing.
        seen: all flat texts, one after the other.
        written: the same as they were written.
        mentions: see ``Language``.
        segments: by kind, in the order in which they were seen.
        page: the latest page without notices; empty where texts are none.
        time: number of turns.
    """

    def __init__(self, language: Language, start: str) -> None:
        self.language = language
        self.start = self.last = self.state = self.seen = flat(start)
        self.written = start
        self.mentions = language.mentioned(start) if language.mentions else {}
        self.segments: dict[str, list[Segment]] = {}
        self.page = ""
        self.time = 0
        self.answers: dict[str, tuple[str, int]] = {}  # by action: its last answer, and when
        self._last_deed: dict[str, tuple[str, int]] = {}  # by filler: template and slot of the last accepted action
        self._deeds: set[tuple[str, int, str]] = set()  # template, slot, filler of accepted actions
        self._done_to: list[tuple[int, str, tuple[str, ...]]] = []  # time, template, fillers of accepted actions
        self._paid: set[str] = set()
        self._accepted: dict[str, int] = {}  # by template, and by action: when it was last accepted
        self._ways: dict[tuple[str, str, str], str] = {}  # kind, name, action -> name
        self._keep(start)

    def _keep(self, text: str) -> dict[str, Segment]:
        found = self.language.segments(text, self.time)
        for kind, segment in found.items():
            self.segments.setdefault(kind, []).append(segment)
        if self.language.notices is not None:
            self.page = page_of(text, self.language.notices)[1]
        return found

    def add(self, action: Action, observation: str, reward: float | None = None) -> None:
        """The next turn."""
        self.time += 1
        if reward:
            self._paid.add(action.text)
        before = {kind: seen[-1].name for kind, seen in self.segments.items()}
        found = self._keep(observation)
        self.last = flat(observation)
        self.seen += self.last
        self.written += f"\n{observation}"
        self.answers[action.text] = observation, self.time
        if self.language.refuses(action.text, observation):
            return
        self.state = self.last
        self._accepted[action.template] = self._accepted[" ".join(words(action.text))] = self.time
        self._done_to.append((self.time, action.template, action.fillers))
        for slot, filler in enumerate(action.fillers, start=1):
            self._last_deed[filler] = action.template, slot
            self._deeds.add((action.template, slot, filler))
        for kind, segment in found.items():
            if kind in before and self.last.startswith(f" {kind} "):
                self._ways[kind, before[kind], action.text] = segment.name
                if back := self.language.inverses.get(action.text):
                    self._ways.setdefault((kind, segment.name, back), before[kind])

    def text(self, scope: str) -> str:
        """The flat text that a condition looks at: ``start``, ``last``, ``state``, ``seen``, or the last of a kind."""
        if scope in SCOPES:
            return str(getattr(self, scope))
        seen = self.segments.get(scope)
        return seen[-1].flat if seen else ""

    def last_deed(self, filler: str) -> tuple[str, int] | None:
        """Template and slot of the last accepted action that named it."""
        return self._last_deed.get(filler)

    def did(self, template: str, slot: int, filler: str) -> bool:
        return (template, slot, filler) in self._deeds

    def done_to(self, template: str, since: int) -> list[str]:
        """Fillers of accepted actions of a template after a time."""
        return [
            filler for time, name, fillers in self._done_to if time > since and name == template for filler in fillers
        ]

    def was_paid(self, action: str) -> bool:
        """Whether this action has earned something."""
        return action in self._paid

    def accepted_at(self, template: str) -> int:
        """When an action of the template, or this very action, was last accepted; 0 is never."""
        return self._accepted.get(template, 0)

    def accepted_actions(self) -> list[str]:
        """Templates and actions that were accepted."""
        return list(self._accepted)

    def way(self, kind: str, action: str) -> str | None:
        """The name of where the action led from here before, or where one that it undoes came from."""
        here = self.segments.get(kind)
        return self._ways.get((kind, here[-1].name, action)) if here else None

    def named(self, kind: str, name: str) -> Segment | None:
        """The last text of a kind with this name."""
        return next((s for s in reversed(self.segments.get(kind, ())) if s.name == name), None)


_SENTENCE = re.compile(r"(?<=[.!?;]) +")


def split_sentences(line: str) -> list[str]:
    return _SENTENCE.split(line)


def without_sentences(text: str, names: Sequence[str]) -> str:
    """The text without sentences that hold one of the names; lines that become empty go.

    >>> without_sentences("A hall. There is a lamp.\\nExits: east.", ["lamp"])
    'A hall.\\nExits: east.'
    """
    if not names:
        return text
    lines = []
    for line in text.split("\n"):
        sentences = split_sentences(line)
        kept = [s for s in sentences if not any(f" {name} " in flat(s) for name in names)]
        if kept or not sentences:
            lines.append(" ".join(kept))
    return "\n".join(lines)


__all__ = [
    "SCOPES",
    "Episode",
    "Language",
    "Segment",
    "name_after",
    "name_of",
    "split_sentences",
    "without_sentences",
]
