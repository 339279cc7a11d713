"""Invariants found by counting: phrases that answers of a kind always have, or never, under some conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from real_envs.trajectory import Turn
from worldmodel.rules.conditions import Condition, Copy
from worldmodel.rules.episode import EpisodeText
from worldmodel.rules.invariants import Invariant, fill_placeholders, names_of, phrases, with_name
from worldmodel.rules.search import PRECISION, conjunctions, lower_bound
from worldmodel.rules.templates import Action, flat

_SAMPLE = 3000  # turns in which phrases are looked for
_SHARE = 0.03  # of the answers that have a phrase, at least
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
        self.done.update(episode.accepted_actions())

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
        never = [p.replace("{here}", other) for p in named if "{here}" in p for other in ("{there}", "{name}")]
        self.phrases = list(dict.fromkeys([*named, *never, *plain[:_PLAIN]]))

    def record(self, episode: EpisodeText, action: Action, turn: Turn, held: bool) -> None:
        if not self.phrases:
            return
        named = with_name(action, turn.observation, self.kind)
        names, text = names_of(episode, named, self.kind, self.link), flat(turn.observation)
        self._rows.append([c.holds(episode, named) for c in self.conditions])
        filled = [fill_placeholders(phrase, names) for phrase in self.phrases]
        self._twice.append([phrase is not None and text.count(f" {phrase} ") > 1 for phrase in filled])
        self._stands.append([-1 if phrase is None else int(f" {phrase} " in text) for phrase in filled])
        self._held.append(held)

    def invariants(self) -> list[Invariant]:
        """Required phrases first."""
        if not self._rows:
            return []
        table, stands, held = np.array(self._rows), np.array(self._stands), np.array(self._held)
        _, first = np.unique(stands, axis=1, return_index=True)
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
            yield conjunction.proves(invariant, self.conditions), conjunction.covers


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
