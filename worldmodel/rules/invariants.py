"""What an answer must say, or must not, whatever else it says: invariants of texts that no rule foretells as a whole.

``move {1}`` leads to a text that begins ``you are in {there}``, where ``{there}`` stood behind ``{1} you see`` before,
and says ``to the east you see {here}`` if {1} is west. A world model is asked again where it breaks one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from real_envs.trajectory import Turn, same_reward
from worldmodel.rules.conditions import Condition, Copy, Evidence
from worldmodel.rules.episode import EpisodeText, name_of, split_sentences, without_sentences
from worldmodel.rules.search import PRECISION, conjunctions, distinct_columns, lower_bound
from worldmodel.rules.templates import ANY, NEWLINE, Action, flat

_SLOT = re.compile(r"\{\d\}")
LONGEST = 7  # words of a phrase
REFUSAL = "{refusal}"  # in place of a phrase: any answer that refuses
OPENING = "{opening}"  # in place of a phrase: that the answer is of the kind at all
OUTCOME = "{outcome}"  # in place of a phrase: what the answer pays, and whether it ends the episode
_MEND_ROUNDS = 4
_NAME = r"[\w' -]+?"


@dataclass(frozen=True, slots=True)
class Invariant(Evidence):
    """A phrase that the answers of a kind to actions of a template have, or do not have.

    Attributes:
        reward, terminated: of an ``OUTCOME``; where it is not required, they are nothing.
    """

    template: str
    kind: str
    # all must hold; the slot after the last of the template is the name in the answer
    conditions: tuple[Condition, ...]
    # with ``{here}`` for the name of the last text of the kind, ``{there}`` for the name that a link of the template
    # leads to, ``{name}`` for that of the answer and ``{1}``, ... for fillers; or one of ``REFUSAL``, ``OPENING`` and
    # ``OUTCOME``.
    phrase: str
    required: bool
    link: Copy | None = None  # where ``{there}`` is read
    once: bool = False  # it may stand there, but not twice
    turns: int = 0
    exceptions: int = 0
    held_turns: int = 0
    held_exceptions: int = 0
    reward: float = 0.0
    terminated: bool = False

    def broken(self, episode: EpisodeText, action: Action, turn: Turn) -> bool:
        """Whether the answer of a turn breaks it. One of another kind breaks nothing."""
        text = flat(turn.observation)
        of_kind = text.startswith(f" {self.kind} ")
        if self.phrase in (REFUSAL, OUTCOME, OPENING):
            if self.phrase == REFUSAL:
                wrong = episode.language.refuses(action.text, turn.observation)
            elif self.phrase == OPENING:
                wrong = not of_kind
            else:
                wrong = turn.terminated != self.terminated or not same_reward(turn.reward or 0.0, self.reward)
            return wrong and self.applies(episode, action)
        named = with_name(action, turn.observation, self.kind)
        if not of_kind or not self.applies(episode, named):
            return False
        phrase = fill_placeholders(self.phrase, names_of(episode, named, self.kind, self.link))
        if phrase is None:
            return False
        return text.count(f" {phrase} ") > 1 if self.once else (f" {phrase} " in text) != self.required

    def __str__(self) -> str:
        if self.phrase in (REFUSAL, OUTCOME, OPENING):
            pays = f"has reward {self.reward:g}{' and is the end' * self.terminated}"
            claim = {
                REFUSAL: "is not refused",
                OUTCOME: pays if self.required else "pays nothing and ends nothing",
                OPENING: f'the answer begins "{self.kind}"',
            }[self.phrase]
            return f"{self.under('any action' if self.template == ANY else self.template)} {claim} {self.counts}"
        verb = "has at most once" if self.once else "has" if self.required else "has no"
        slots = 1 + len(set(_SLOT.findall(self.template)))
        head = self.under("", ", if ").replace(f"{{{slots}}}", "{name}")
        return f'{self.template}{head}: an answer that begins "{self.kind}" {verb} "{self.phrase}" {self.counts}'

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Invariant:
        conditions = tuple(Condition(**c) for c in data["conditions"])
        link = Copy(**data["link"]) if data["link"] else None
        return Invariant(**{**data, "conditions": conditions, "link": link})


def opening_of(invariants: Sequence[Invariant], episode: EpisodeText, action: Action) -> str:
    """The words that an answer surely begins with, as they are written in this episode; empty where none are known."""
    for beginning in invariants:
        seen = episode.segments.get(beginning.kind) if beginning.phrase == OPENING else None
        if not seen or not beginning.applies(episode, action):
            continue
        before = as_written(seen[-1].text, beginning.kind)
        for named in invariants:
            if named.kind != beginning.kind or not named.required or named.conditions:
                continue
            first, _, rest = named.phrase.removeprefix(f"{beginning.kind} ").partition(" ")
            begins = named.phrase.startswith(f"{beginning.kind} {{")
            if not begins or first not in ("{there}", "{here}") or len(rest.split()) > 1:
                continue
            name = names_of(episode, with_name(action, "", beginning.kind), beginning.kind, named.link).get(first)
            if name and (written := as_written(seen[-1].text, name)):
                return f"{before} {written}{rest}"
        return before
    return ""


def as_written(text: str, phrase: str) -> str:
    """How a text writes a phrase of lower-case words; empty where it does not."""
    pattern = r"\s*".join(re.escape(word) for word in phrase.split())
    match = re.search(rf"(?<!\w){pattern}(?!\w)", text, flags=re.IGNORECASE)
    return match[0] if match else ""


def with_name(action: Action, answer: str, kind: str) -> Action:
    """The action with one more filler: the name in the answer."""
    return Action(action.template, (*action.fillers, name_of(answer, kind)), action.text)


def names_of(episode: EpisodeText, named: Action, kind: str, link: Copy | None) -> dict[str, str]:
    """What the placeholders of a phrase stand for; those that stand for nothing are not there."""
    here = episode.segments.get(kind)
    names = {"{here}": here[-1].name if here else None}
    plain = Action(named.template, named.fillers[:-1], named.text)
    names["{there}"] = link.target(episode, plain) if link is not None else None
    names["{name}"] = named.fillers[-1]
    names |= {placeholder: name for placeholder, name in episode.mentions.items() if name not in names.values()}
    names |= {f"{{{slot}}}": filler for slot, filler in enumerate(plain.fillers, start=1)}
    return {placeholder: name for placeholder, name in names.items() if name}


def fill_placeholders(phrase: str, names: Mapping[str, str]) -> str | None:
    """The phrase with names in place of placeholders, ``None`` where one stands for nothing."""
    text, placeholders = _placeholders(phrase)
    values = tuple(map(names.get, placeholders))
    return None if None in values else text % values


@lru_cache(maxsize=1 << 14)
def _placeholders(phrase: str) -> tuple[str, tuple[str, ...]]:
    """The phrase with ``%s`` in place of placeholders, and these."""
    words = phrase.split()
    text = " ".join("%s" if word.startswith("{") else word.replace("%", "%%") for word in words)
    return text, tuple(word for word in words if word.startswith("{"))


def phrases(answer: str, names: Mapping[str, str]) -> Iterator[str]:
    """Phrases of two to ``LONGEST`` words, with placeholders where names stand."""
    text = flat(answer)
    for placeholder, name in names.items():
        text = text.replace(f" {name} ", f" {placeholder} ")
    words = text.split()
    for begin in range(len(words)):
        for length in range(2, min(LONGEST, len(words) - begin) + 1):
            yield " ".join(words[begin : begin + length])


def mend(
    answer: str, check: Callable[[str], Sequence[Invariant]], episode: EpisodeText, action: Action
) -> tuple[str, Sequence[Invariant]]:
    """The answer with as few words changed as mend it, and what it still breaks; the answer itself where no change
    helps.

    Where a required phrase stands there with another name (``to the east you see the driveway`` for the way back to the
    greenhouse), the name is put right; a sentence that says what may not be said is left out. A change is kept only if
    fewer invariants are broken afterwards.
    """
    broken = check(answer)
    for _ in range(_MEND_ROUNDS):
        changes = dict.fromkeys(_changes(answer, broken, episode, action))
        better = [(text, check(text)) for text in changes if text.strip()]  # no words break nothing, and are no answer
        better = [(text, left) for text, left in better if len(left) < len(broken)]
        if not better:
            break
        answer, broken = min(better, key=lambda item: len(item[1]))
    return answer, broken


def _changes(answer: str, broken: Sequence[Invariant], episode: EpisodeText, action: Action) -> Iterator[str]:
    for invariant in broken:
        if invariant.phrase in (OPENING, OUTCOME, REFUSAL):
            continue
        names = names_of(episode, with_name(action, answer, invariant.kind), invariant.kind, invariant.link)
        words = invariant.phrase.split()
        if invariant.once:
            yield from _without_one(answer, fill_placeholders(invariant.phrase, names) or "")
            continue
        if not invariant.required:
            phrase = fill_placeholders(invariant.phrase, names) or ""
            yield without_sentences(answer, [phrase.strip(f" .,;:!?{NEWLINE}")])
            continue
        for k, word in enumerate(words):
            name = names.get(word)
            if name is None or not k:
                continue
            before, after = (fill_placeholders(" ".join(part), names) for part in (words[:k], words[k + 1 :]))
            if before is None or after is None:
                continue
            end = _pattern(after) if after else r"[.,;:!?\n]|$"
            written = as_written(episode.written, name) or name
            for match in re.finditer(rf"{_pattern(before)}\s+({_NAME})(?=\s*(?:{end}))", answer, flags=re.IGNORECASE):
                yield answer[: match.start(1)] + written + answer[match.end(1) :]


def _without_one(answer: str, phrase: str) -> Iterator[str]:
    """The text without one of the sentences that have a phrase."""
    lines = [split_sentences(line) for line in answer.split("\n")]
    for row, line in enumerate(lines):
        for k, sentence in enumerate(line):
            if f" {phrase} " in flat(sentence):
                rest = [*line[:k], *line[k + 1 :]]
                yield "\n".join(
                    " ".join(rest if r == row else other) for r, other in enumerate(lines) if r != row or rest
                )


def _pattern(phrase: str) -> str:
    return r"\s*".join(r"\n" if word == NEWLINE else re.escape(word) for word in phrase.split())


_SAMPLE = 3000  # turns in which phrases are looked for
_SHARE = 0.03  # of the answers that have a phrase, at least
_EXPECTED = 20  # times, at least, that a forbidden phrase would stand where it is forbidden
_NAMED, _PLAIN = 150, 150  # phrases that are tried, with and without placeholders
_VALUES, _CONTEXTS, _DONE = 6, 8, 12
_PER_PHRASE = 6


@dataclass
class PhraseTable:
    """The answers of one kind to the actions of one template."""

    template: str
    kind: str
    least: int
    turns: int = 0
    link: Copy | None = None
    counts: Counter[str] = field(default_factory=Counter)
    contexts: Counter[str] = field(default_factory=Counter)
    values: dict[int, Counter[str]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    conditions: list[Condition] = field(default_factory=list)
    phrases: list[str] = field(default_factory=list)
    _rows: list[list[bool]] = field(default_factory=list)
    _stands: list[list[int]] = field(default_factory=list)  # by phrase: 1 it stands there, 0 not, -1 a name is missing
    _held: list[bool] = field(default_factory=list)
    _twice: list[list[bool]] = field(default_factory=list)  # by phrase
    _elsewhere: dict[str, float] = field(default_factory=dict)  # share of answers that say the same of another name

    def count(self, episode: EpisodeText, action: Action, turn: Turn, contexts: Iterator[str]) -> None:
        """First pass. ``contexts``: of the name of the answer in the first text."""
        self.turns += 1
        if self.turns > _SAMPLE:
            return
        named = with_name(action, turn.observation, self.kind)
        names = names_of(episode, named, self.kind, self.link)
        self.counts.update(list(dict.fromkeys(phrases(turn.observation, names))))
        self.contexts.update(list(dict.fromkeys(contexts)))
        for slot, filler in enumerate(action.fillers, start=1):
            self.values.setdefault(slot, Counter())[filler] += 1
        self.done.update(list(episode.accepted))  # names alone, without their times

    def choose(self, mentions: Sequence[str]) -> None:
        """Chooses conditions and phrases; ``mentions`` are placeholders of what the first text mentions."""
        n = min(self.turns, _SAMPLE)
        enough = max(10, _SHARE * n)
        slot_of_name = len(self.values) + 1
        for slot, values in self.values.items():
            self.conditions += [Condition("is", slot, v) for v, k in values.most_common(_VALUES) if k >= enough]
        self.conditions += [Condition("is", slot_of_name, mention) for mention in mentions]
        self.conditions += [Condition("text", 0, mention, self.kind) for mention in mentions]
        self.conditions += [Condition("text", slot_of_name, "_", scope) for scope in ("start", "seen")]
        often = [c for c, k in self.contexts.most_common(3 * _CONTEXTS) if k >= enough and c != "_"][:_CONTEXTS]
        self.conditions += [Condition("text", slot_of_name, context, "start") for context in often]
        self.conditions += [Condition("done", value=a) for a, k in self.done.most_common(_DONE) if enough <= k]
        common = [p for p, k in self.counts.most_common() if k >= enough]
        with_names = [p for p in common if "{" in p]
        plain = [p for p in common if "{" not in p and len(p.split()) <= 3 and self.counts[p] <= 0.98 * n]
        ranked = sorted(with_names, key=lambda p: -self.counts[p] * len(p.split()))
        named = ranked[:_NAMED]
        # what is said of another place is perhaps never said of this one: no room is its own neighbour
        never = {p.replace("{here}", other): p for p in named if "{here}" in p for other in ("{there}", "{name}")}
        self.phrases = list(dict.fromkeys([*named, *never, *plain[:_PLAIN]]))
        self._elsewhere = {phrase: self.counts[other] / n for phrase, other in never.items()}

    def record(self, episode: EpisodeText, action: Action, turn: Turn, held: bool) -> None:
        if not self.phrases:
            return
        named = with_name(action, turn.observation, self.kind)
        names, text = names_of(episode, named, self.kind, self.link), flat(turn.observation)
        self._rows.append([c.holds(episode, named) for c in self.conditions])
        filled = [fill_placeholders(phrase, names) for phrase in self.phrases]
        times = [-1 if phrase is None else text.count(f" {phrase} ") for phrase in filled]
        self._twice.append([n > 1 for n in times])
        self._stands.append([min(n, 1) for n in times])
        self._held.append(held)

    def invariants(self) -> list[Invariant]:
        """Required phrases first."""
        if not self._rows:
            return []
        table, stands, held = np.array(self._rows), np.array(self._stands), np.array(self._held)
        first = distinct_columns(stands)
        kept: list[tuple[Invariant, np.ndarray]] = []
        for required in (True, False):
            # of phrases within phrases the longest is required, and the shortest is forbidden
            order = sorted(
                first.tolist(),
                key=lambda k: (-len(self.phrases[k].split()) if required else len(self.phrases[k].split()), k),
            )
            for k in order:
                for invariant, covers in self._of(k, required, table, stands[:, k], held):
                    within = [
                        c for i, c in kept if i.required == required and _implies(i.phrase, invariant.phrase, required)
                    ]
                    if not any((covers & ~c).sum() < self.least for c in within):
                        kept.append((invariant, covers))
        return [*(invariant for invariant, _ in kept), *self._once(stands, held)]

    def _once(self, stands: np.ndarray, held: np.ndarray) -> Iterator[Invariant]:
        """Phrases of three words without a name that stand in many answers, and in none twice."""
        twice = np.array(self._twice).any(axis=0).reshape(-1)
        used: list[np.ndarray] = []
        for k, phrase in enumerate(self.phrases):
            has = stands[:, k] == 1
            plain = "{" not in phrase and len(phrase.split()) == 3 and all(word.isalpha() for word in phrase.split())
            if twice[k] or not plain or any((has == other).all() for other in used):
                continue
            counts = int((has & ~held).sum()), int((has & held).sum())
            if counts[0] >= self.least and lower_bound(counts[1], counts[1]) >= PRECISION:
                used.append(has)
                yield Invariant(self.template, self.kind, (), phrase, False, None, True, counts[0], 0, counts[1], 0)

    def _of(
        self, k: int, required: bool, table: np.ndarray, stands: np.ndarray, held: np.ndarray
    ) -> Iterator[tuple[Invariant, np.ndarray]]:
        here, right = stands >= 0, stands == int(required)
        if required and (stands == 1).sum() < self.least:
            return
        link = self.link if "{there}" in self.phrases[k] else None
        covered = np.zeros(len(held), dtype=bool)
        for conjunction in islice(conjunctions(table, right, here, covered, held, self.least), _PER_PHRASE):
            invariant = Invariant(self.template, self.kind, (), self.phrases[k], required, link)
            invariant, covers = conjunction.proves(invariant, self.conditions), conjunction.covers
            if required or self._is_law(invariant, here & ~covers, stands == 1):
                yield invariant, covers

    def _is_law(self, forbidden: Invariant, elsewhere: np.ndarray, stands: np.ndarray) -> bool:
        """Whether the phrase hardly ever stands under the conditions, though it would often if it did as often as
        elsewhere. What is rare everywhere is left out in 99 % of all answers, and no law: where a model says it, it is
        mostly true.
        """
        share = max(stands[elsewhere].mean() if elsewhere.any() else 0.0, self._elsewhere.get(forbidden.phrase, 0.0))
        exceptions = forbidden.exceptions + forbidden.held_exceptions
        often = share * (forbidden.turns + forbidden.held_turns) >= _EXPECTED
        return often and exceptions <= (1 - PRECISION) * stands.sum()


def _implies(one: str, other: str, required: bool) -> bool:
    """Whether the first phrase says all that the second does."""
    inner, outer = (other, one) if required else (one, other)
    return f" {inner} " in f" {outer} "


def find_link(links: Counter[tuple[str, int, str]], kind: str, enough: float) -> Copy | None:
    best: Sequence[tuple[tuple[str, int, str], int]] = [item for item in links.most_common() if item[0][0] == kind]
    if not best or best[0][1] < enough:
        return None
    (_, slot, between), _ = best[0]
    return Copy("link", kind, slot, between)
