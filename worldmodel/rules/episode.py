"""What the texts of a log are made of, found by counting (``Language``), and what an episode has said so far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from real_envs.trajectory import Trajectory
from worldmodel.rules.pages import page_of
from worldmodel.rules.search import LEAST_TURNS
from worldmodel.rules.templates import NEWLINE, OTHER, Action, Templates, flat, words

SCOPES = ("start", "last", "state", "seen")  # texts of an episode that are of no kind
_MOST_NAME = 6  # words
_KINDS = 6  # at most, in a language
_MENTIONS = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """A text of a kind: an observation from the line on that begins as its kind does."""

    text: str
    flat: str
    name: str  # the words that follow its opening, up to the next punctuation: ``the kitchen``
    time: int  # 0 for the start, k for the answer to the k-th action


@dataclass(frozen=True)
class Language:
    """What the texts of a log are made of."""

    templates: Templates  # of its actions
    kinds: tuple[str, ...]  # openings of observations, such as ``you are in``
    refuses: Callable[[str, str], bool]  # whether an answer refuses an action
    inverses: Mapping[str, str] = field(default_factory=dict)  # by action, the one that leads back
    # words after which the first text names something that later texts of a kind are about: in ``the coin that is
    # located in the pantry`` they are ``located in``. ``{located_in}`` stands for that name.
    mentions: tuple[str, ...] = ()
    # openings of lines before a page that are no part of it; ``None`` where texts are no pages
    notices: tuple[str, ...] | None = None

    def head(self, start: str) -> str:
        """The flat first text up to the first line, after line one, that begins a text of a kind."""
        first, *lines = start.strip().split("\n")
        own = next((k for k, line in enumerate(lines) if self.segments(line, 0)), len(lines))
        return flat("\n".join([first, *lines[:own]]))

    def mentioned(self, start: str) -> dict[str, str]:
        """By placeholder, the names that a first text mentions."""
        head, names = self.head(start), {}
        for phrase in self.mentions:
            if name := name_after(head, phrase):
                names[placeholder_of(phrase)] = name
        return names

    def segments(self, text: str, time: int) -> dict[str, Segment]:
        """The last segment of each kind in a text."""
        if not self.kinds:
            return {}
        segments: dict[str, Segment] = {}
        lines = text.strip().split("\n")
        for k, line in enumerate(lines):
            begin = flat(line)
            for kind in self.kinds:
                if begin.startswith(f" {kind} "):
                    rest = "\n".join(lines[k:])
                    segments[kind] = Segment(rest, flat(rest), name_of(rest, kind), time)
                    break
        return segments


def placeholder_of(mention: str) -> str:
    """``{located_in}`` for ``located in``: stands for the name after these words, see ``Language``."""
    return f"{{{mention.replace(' ', '_')}}}"


def name_after(text: str, phrase: str) -> str:
    """What follows these words in a flat text, up to the next punctuation; empty where they do not stand there."""
    _, match, after = text.partition(f" {phrase} ")
    name: list[str] = []
    for word in after.split()[: _MOST_NAME + 1] if match else ():
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


class EpisodeText:
    """The words of one episode so far. ``add`` each turn; ask in between.

    Attributes:
        start, last: flat texts of the first and the latest observation.
        state: of the latest observation that refused nothing.
        seen: all flat texts, one after the other.
        mentions: see ``Language``.
        page: the latest page without notices; empty where texts are none.
        answers: the last answer to each action, and when.
        last_deed: by filler, template and slot of the last accepted action with it.
        deeds: template, slot and filler of accepted actions.
        paid: actions that earned something.
        accepted: when an action of a template, or this very action, was last accepted; 0 is never.
    """

    def __init__(self, language: Language, start: str) -> None:
        self.language = language
        self.start = self.last = self.state = self.seen = flat(start)
        self.written = start
        self.mentions = language.mentioned(start) if language.mentions else {}
        self.segments: dict[str, list[Segment]] = {}
        self.page = ""
        self.time = 0
        self.answers: dict[str, tuple[str, int]] = {}
        self.last_deed: dict[str, tuple[str, int]] = {}
        self.deeds: set[tuple[str, int, str]] = set()
        self._done_to: list[tuple[int, str, tuple[str, ...]]] = []  # time, template, fillers of accepted actions
        self.paid: set[str] = set()
        self.accepted: Counter[str] = Counter()
        self._ways: dict[tuple[str, str, str], str] = {}  # kind, name, action -> name
        self._add_text(start)

    def _add_text(self, text: str) -> dict[str, Segment]:
        segments = self.language.segments(text, self.time)
        for kind, segment in segments.items():
            self.segments.setdefault(kind, []).append(segment)
        if self.language.notices is not None:
            self.page = page_of(text, self.language.notices)[1]
        return segments

    def add(self, action: Action, observation: str, reward: float | None = None) -> None:
        self.time += 1
        if reward:
            self.paid.add(action.text)
        before = {kind: seen[-1].name for kind, seen in self.segments.items()}
        segments = self._add_text(observation)
        self.last = flat(observation)
        self.seen += self.last
        self.written += f"\n{observation}"
        self.answers[action.text] = observation, self.time
        if self.language.refuses(action.text, observation):
            return
        self.state = self.last
        self.accepted[action.template] = self.accepted[" ".join(words(action.text))] = self.time
        self._done_to.append((self.time, action.template, action.fillers))
        for slot, filler in enumerate(action.fillers, start=1):
            self.last_deed[filler] = action.template, slot
            self.deeds.add((action.template, slot, filler))
        for kind, segment in segments.items():
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

    def done_to(self, template: str, since: int) -> list[str]:
        """Fillers of accepted actions of a template after a time."""
        return [
            filler for time, name, fillers in self._done_to if time > since and name == template for filler in fillers
        ]

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


def fold_refused(templates: Templates, log: Sequence[Trajectory]) -> Templates:
    """Without those that always get the same answer, where actions of no template get it too, or most of those do.

    All of them are then one case: what the world has no words for.
    """
    answers: dict[str, Counter[str]] = {}
    for trajectory in log:
        for turn in trajectory.turns:
            answers.setdefault(templates.read(turn.action).template, Counter())[turn.observation.strip()] += 1
    usual = Counter(answers.get(OTHER, ()))
    for name, counts in answers.items():
        if len(counts) == 1 and name != OTHER:
            usual.update(counts)
    if not usual:
        return templates
    answer, _ = usual.most_common(1)[0]
    shared = sum(answer in counts for counts in answers.values())
    if shared < 2:
        return templates
    return Templates([text for text in templates.texts if set(answers.get(text, ())) - {answer}])


def find_kinds(log: Sequence[Trajectory]) -> tuple[str, ...]:
    """Openings of three words, or fewer, that many observations share, which differ in what follows."""
    texts: Counter[str] = Counter(turn.observation.strip() for t in log for turn in t.turns)
    total, grouped, kinds = sum(texts.values()), set[str](), dict[str, int]()
    for length in (3, 2, 1):
        openings: dict[str, list[str]] = {}
        for text in texts:
            if text not in grouped and len(words(text)) > length:
                openings.setdefault(" ".join(words(text)[:length]), []).append(text)
        for opening, of in openings.items():
            times = sum(texts[text] for text in of)
            if times >= max(20, total / 200) and len(of) >= 10:
                kinds[opening] = sum(texts[text] * len(words(text)) for text in of)
                grouped.update(of)
    return tuple(sorted(kinds, key=lambda kind: -kinds[kind])[:_KINDS])


def find_mentions(log: Sequence[Trajectory], language: Language) -> tuple[str, ...]:
    """Two words after which most first texts name what a later text of a kind is about; where there are none, after
    which they name something else that differs from task to task and that later texts speak of, such as a goal."""
    before_names: Counter[str] = Counter()  # two words with a name after them
    spoken_of: dict[str, list[str]] = {}  # by two words, the names after them that texts of the task speak of
    names: set[str] = set()
    later: dict[str, str] = {}
    for trajectory in log:
        texts = [turn.observation for turn in trajectory.turns]
        names |= {s.name for text in texts for s in language.segments(text, 1).values() if s.name}
        later[trajectory.start] = later.get(trajectory.start, "") + "".join(map(flat, texts))
    heads = list(dict.fromkeys((t.task_id, t.start) for t in log))
    for _, start in heads:
        head = language.head(start)
        for two in dict.fromkeys(map(" ".join, pairwise(head.split()))):
            name = name_after(head, two)
            before_names[two] += name in names
            if name and f" {name} " in later[start]:
                spoken_of.setdefault(two, []).append(name)
    often = [two for two, n in before_names.most_common() if n >= 0.9 * len(heads)]
    if not often:
        most = 0.9 * len(heads)
        differ = {two: all_ for two, all_ in spoken_of.items() if len(all_) >= most and len(set(all_)) >= 5}
        often = sorted(differ, key=lambda two: (-sum(len(name.split()) for name in differ[two]), two))[:1]
    return tuple(often[:_MENTIONS])


def find_removing(log: Sequence[Trajectory], language: Language) -> list[str]:
    """Templates of actions after which the text of the same name no longer has a sentence on what they were done to."""
    removed: Counter[str] = Counter()
    for trajectory in log:
        episode = EpisodeText(language, trajectory.start)
        waiting: dict[tuple[str, str], list[tuple[str, str]]] = {}  # of a text by kind and name: template, filler
        for turn in trajectory.turns:
            action, before = language.templates.read(turn.action), episode.segments
            here = {kind: seen[-1] for kind, seen in before.items()}
            episode.add(action, turn.observation, turn.reward)
            if episode.accepted[action.template] != episode.time:
                continue
            for kind, seen in episode.segments.items():
                if seen[-1].time == episode.time:
                    for name, filler in waiting.pop((kind, seen[-1].name), ()):
                        removed[name] += f" {filler} " not in seen[-1].flat
            for kind, segment in here.items():
                for filler in action.fillers:
                    if f" {filler} " in segment.flat:
                        waiting.setdefault((kind, segment.name), []).append((action.template, filler))
    return [name for name, n in removed.most_common(2) if n >= LEAST_TURNS]


def find_inverses(log: Sequence[Trajectory], language: Language) -> dict[str, str]:
    """Actions that lead back: after the one, the other brings the text of a kind that was seen before the first."""
    tried: Counter[tuple[str, str]] = Counter()
    back: Counter[tuple[str, str]] = Counter()
    for trajectory in log:
        names: list[tuple[str, str, str]] = []  # before, action, after
        here: dict[str, str] = {}
        for time, text in enumerate([trajectory.start, *(turn.observation for turn in trajectory.turns)]):
            segments = language.segments(text, time)
            if time and segments:
                kind, segment = next(iter(segments.items()))
                action = trajectory.turns[time - 1].action
                if kind in here and here[kind] != segment.name:
                    if names and names[-1][2] == here[kind]:
                        pair = names[-1][1], action
                        tried[pair] += 1
                        back[pair] += names[-1][0] == segment.name
                    names.append((here[kind], action, segment.name))
            here |= {kind: segment.name for kind, segment in segments.items()}
    best: dict[str, str] = {}
    for (one, other), times in tried.most_common():
        if times >= LEAST_TURNS and back[one, other] >= 0.95 * times:
            best.setdefault(one, other)
    return best
