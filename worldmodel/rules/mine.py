"""Rules found in a log by counting: under which conditions is an answer known from the episode's own words?

For each action template there are candidate answers (a pattern with the fillers, the last text of a kind, the answer to
the same action before, ...) and candidate conditions. A rule is a conjunction of at most three conditions that is right
on nearly all turns of one half of the tasks; it is kept if the lower end of the one-sided 95 % Wilson interval of its
precision on the other half is at least 0.99. What is so often right is a law of the world as far as the log goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from real_envs.trajectory import Trajectory, Turn, same_reward
from worldmodel.rules.conditions import Condition, Copy, CopyKind, Rule
from worldmodel.rules.episode import (
    SCOPES,
    EpisodeText,
    Language,
    find_inverses,
    find_kinds,
    find_mentions,
    find_removing,
    fold_refused,
    name_of,
    placeholder_of,
)
from worldmodel.rules.invariants import OPENING, OUTCOME, REFUSAL, Invariant, PhraseTable, find_link
from worldmodel.rules.pages import describe, find_notices, page_of
from worldmodel.rules.refusals import learn_refusals
from worldmodel.rules.rule_set import RuleSet
from worldmodel.rules.search import (
    LEAST_TURNS,
    PRECISION,
    Conjunction,
    conjunctions,
    find_conjunctions,
    judging_half,
)
from worldmodel.rules.templates import ANY, OTHER, Action, blank, find_templates, flat, words

_PATTERNS = 4  # answers with slots, of a template
_SAMPLE = 4000  # turns of a template in which contexts are looked for
_CONTEXTS = 10  # of a slot and a scope
_VALUES = 8
_MANY_FILLERS = 8  # different ones, from which on a claim is taken to hold for others
_CHANGES = 8  # of pages, by the actions of a template


def mine_rules(log: Sequence[Trajectory], on_done: Callable[[int, int], None] | None = None) -> RuleSet:
    """The rules and invariants of a log.

    Args:
        on_done: called with how many templates are done, of how many.
    """
    refusals = learn_refusals(log)
    held = judging_half(log)
    templates = find_templates(turn.action for t in log for turn in t.turns)
    templates = fold_refused(templates, [t for t in log if t.id not in held])
    language = Language(templates, find_kinds(log), refusals.refuses, notices=find_notices(log))
    language = replace(language, inverses=find_inverses(log, language), mentions=find_mentions(log, language))
    tables = {name: _Table(name) for name in (*templates.texts, OTHER, ANY)}
    texts: dict[tuple[str, str], PhraseTable] = {}
    for _, episode, action, turn in _turns(log, language):
        for name in _tables_of(action):
            tables[name].count(episode, action, turn)
    removing = find_removing(log, language)
    for table in tables.values():
        table.choose(templates.texts, removing)
    for trajectory, episode, action, turn in _turns(log, language):
        for name in _tables_of(action):
            tables[name].record(episode, action, turn, trajectory.id in held)
        if kind := _kind_of(turn, language):
            key = (action.template, kind)
            if key not in texts:
                texts[key] = PhraseTable(
                    *key, LEAST_TURNS, link=find_link(tables[action.template].links, kind, LEAST_TURNS)
                )
            name = name_of(turn.observation, kind)
            texts[key].count(episode, action, turn, _contexts(episode.start, name) if name else iter(()))
    for text in texts.values():
        text.choose([placeholder_of(mention) for mention in language.mentions])
    for trajectory, episode, action, turn in _turns(log, language):
        if kind := _kind_of(turn, language):
            texts[action.template, kind].record(episode, action, turn, trajectory.id in held)
    rules: list[Rule] = []
    invariants: list[Invariant] = []
    total = len(tables) + len(texts)
    for done, table in enumerate(tables.values(), start=1):
        rules += table.rules()
        invariants += table.always()
        if on_done is not None:
            on_done(done, total)
    for done, text in enumerate(texts.values(), start=1 + len(tables)):
        invariants += text.invariants()
        if on_done is not None:
            on_done(done, total)
    return RuleSet(language, rules, invariants)


def _tables_of(action: Action) -> tuple[str, ...]:
    return (action.template, ANY) if action.fillers else (action.template,)


def _kind_of(turn: Turn, language: Language) -> str | None:
    text = flat(turn.observation)
    return next((kind for kind in language.kinds if text.startswith(f" {kind} ")), None)


def _turns(log: Sequence[Trajectory], language: Language) -> Iterator[tuple[Trajectory, EpisodeText, Action, Turn]]:
    for trajectory in log:
        episode = EpisodeText(language, trajectory.start)
        for turn in trajectory.turns:
            action = language.templates.read(turn.action)
            if turn.known:
                yield trajectory, episode, action, turn
            episode.add(action, turn.observation, turn.reward)


@dataclass
class _Table:
    """All turns of one template: what is known before each, and which candidate answers were right."""

    template: str
    turns: int = 0
    patterns: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[float, bool]] = field(default_factory=Counter)
    contexts: dict[tuple[int, str], Counter[tuple[str, bool]]] = field(default_factory=dict)
    paying: Counter[tuple[str, bool]] = field(default_factory=Counter)  # contexts of what the first text mentions
    values: dict[int, Counter[str]] = field(default_factory=dict)
    deeds: dict[int, Counter[tuple[str, int]]] = field(default_factory=dict)
    links: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    changes: Counter[Copy] = field(default_factory=Counter)
    refusing: set[str] = field(default_factory=set)
    conditions: list[Condition] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    _kinds: tuple[str, ...] = ()
    _condition_rows: list[list[bool]] = field(default_factory=list)
    _accepted: list[list[int]] = field(default_factory=list)
    _right: list[list[int]] = field(default_factory=list)  # by copy: -1 where there is none, else when it was seen
    _equal: list[list[bool]] = field(default_factory=list)
    _outcome: list[int] = field(default_factory=list)
    _held: list[bool] = field(default_factory=list)
    _fillers: list[tuple[str, ...]] = field(default_factory=list)
    _refused: list[bool] = field(default_factory=list)
    _answer_kind: list[str] = field(default_factory=list)  # the kind of the answer

    # first pass: which conditions and answers are worth a look

    def count(self, episode: EpisodeText, action: Action, turn: Turn) -> None:
        self.turns += 1
        shape = blank(turn.observation.strip(), action.fillers)
        self.patterns[shape] += 1
        refused = episode.language.refuses(turn.action, turn.observation)
        if refused:
            self.refusing.add(shape)
        self.outcomes[round(turn.reward or 0.0, 6), turn.terminated] += 1
        self._kinds = tuple(episode.language.kinds)
        if episode.page and episode.language.notices is not None:
            notice, page = page_of(turn.observation, episode.language.notices)
            if change := describe(episode.page, notice, page, action.written):
                kind: CopyKind = "edit" if change.slot else "page"
                parts = change.sets, change.slot, change.drops, change.others, change.named
                self.changes[Copy(kind, *parts)] += 1
        if self.turns > _SAMPLE or self.template == ANY:
            return
        for placeholder, name in episode.mentions.items():
            near = dict.fromkeys(context.replace("_", placeholder) for context in _contexts(episode.state, name, 4))
            self.paying.update((context, bool(turn.reward)) for context in ("", *near))
        for slot, filler in enumerate(action.fillers, start=1):
            self.values.setdefault(slot, Counter())[filler] += 1
            if deed := episode.last_deed.get(filler):
                self.deeds.setdefault(slot, Counter())[deed] += 1
            for scope in ("start", "last", "state", *self._kinds):
                near = dict.fromkeys(_contexts(episode.text(scope), filler))
                self.contexts.setdefault((slot, scope), Counter()).update((context, refused) for context in near)
            if not refused:
                self._count_link(episode, slot, filler, turn.observation)

    def _count_link(self, episode: EpisodeText, slot: int, filler: str, observation: str) -> None:
        """The words between the filler and the name of the text that came, in the last text of its kind."""
        for kind in self._kinds:
            if not " ".join(words(observation)).startswith(f"{kind} "):
                continue
            name = name_of(observation, kind)
            _, has_filler, after = episode.text(kind).partition(f" {filler} ")
            between, has_name, _ = after.partition(f" {name} ")
            if name and has_filler and has_name and 0 < len(between.split()) <= 5:
                self.links[kind, slot, between.strip()] += 1

    def choose(self, templates: Sequence[str], removing: Sequence[str]) -> None:
        """Conditions and answers; after actions of ``removing`` texts may no longer name what they were done to."""
        self._templates = list(templates)
        self.copies = [Copy("say", shape) for shape, n in self.patterns.most_common(_PATTERNS) if n >= LEAST_TURNS]
        if self.template == ANY:
            self.conditions = [Condition("missing", scope=scope) for scope in (*SCOPES, *self._kinds)]
            return
        enough = max(10, min(self.turns, _SAMPLE) / 100)
        for (slot, scope), counts in self.contexts.items():
            scores = {
                c: abs(counts[c, True] - counts[c, False]) + counts[c, True] + counts[c, False] for c, _ in counts
            }
            often = [c for c, _ in counts if counts[c, True] + counts[c, False] >= enough]
            ranked = sorted(set(often), key=lambda c: (-scores[c], len(c.split()), c))[:_CONTEXTS]
            self.conditions += [Condition("text", slot, context, scope) for context in {"_": 1} | dict.fromkeys(ranked)]
        for slot, values in self.values.items():
            self.conditions.append(Condition("text", slot, "_", "seen"))
            common = [value for value, n in values.most_common(_VALUES) if n >= enough]
            self.conditions += [Condition("is", slot, value) for value in common]
            if len(common) > 1:  # one direction alone is too seldom refused to prove that all of them are
                self.conditions.append(Condition("is", slot, " | ".join(common)))
            often_done = [deed for deed, n in self.deeds.get(slot, Counter()).items() if n >= enough]
            self.conditions += [Condition("last_deed", slot, name, other=other) for name, other in often_done]
            self.conditions += [Condition("did", slot, name, other=other) for name, other in often_done]
        paid, unpaid = (max(1, self.paying["", pays]) for pays in (True, False))
        telling = {c: self.paying[c, True] / paid - self.paying[c, False] / unpaid for c, _ in self.paying if c}
        often = [c for c in telling if self.paying[c, True] + self.paying[c, False] >= 10]
        ranked = sorted(often, key=lambda c: (-abs(telling[c]), len(c.split()), c))[:_CONTEXTS]
        self.conditions += [Condition("text", 0, context, "state") for context in ranked]
        self.conditions += [Condition("done", value=name) for name in self._templates]
        self.conditions.append(Condition("paid"))
        if self.turns >= LEAST_TURNS:
            kinds = self._kinds
            hows: tuple[CopyKind, ...] = ("last", "line", "way")
            places = [Copy(how, kind) for how in hows for kind in kinds]
            places += [Copy("link", k, slot, of) for (k, slot, of), n in self.links.most_common(2) if n >= enough]
            less = [replace(copy, without=name) for copy in places if copy.kind != "line" for name in removing]
            self.copies += [Copy("again"), *places, *less]
            self.copies += [copy for copy, n in self.changes.most_common(_CHANGES) if n >= LEAST_TURNS]

    # second pass: what held, and what was right

    def record(self, episode: EpisodeText, action: Action, turn: Turn, held: bool) -> None:
        if not self.copies:
            return
        self._condition_rows.append([c.holds(episode, action) for c in self.conditions])
        self._accepted.append([episode.accepted[name] for name in self._templates])
        made = [copy.make(episode, action) for copy in self.copies]
        truth = turn.observation.strip()
        self._right.append([-1 if m is None else m[1] for m in made])
        self._equal.append([m is not None and m[0].strip() == truth for m in made])
        outcomes = [o for o, _ in self.outcomes.most_common(4)]
        reward, end = turn.reward or 0.0, turn.terminated
        self._outcome.append(next((k for k, (r, e) in enumerate(outcomes) if same_reward(r, reward) and e == end), -1))
        self._held.append(held)
        self._fillers.append(action.fillers)
        self._answer_kind.append(_kind_of(turn, episode.language) or "")
        self._refused.append(episode.language.refuses(turn.action, turn.observation))

    def rules(self) -> list[Rule]:
        """Those that answer most turns first."""
        if not self._condition_rows:
            return []
        base, held = np.array(self._condition_rows, dtype=bool), np.array(self._held)
        accepted, outcome = np.array(self._accepted), np.array(self._outcome)
        times, equal = np.array(self._right), np.array(self._equal)
        outcomes = [o for o, n in self.outcomes.most_common(4) if n >= LEAST_TURNS]
        covered = np.zeros(len(held), dtype=bool)
        rules: list[Rule] = []
        open_ = [(c, o) for c in range(len(self.copies)) for o in range(len(outcomes))]
        open_ = [(c, o) for c, o in open_ if (equal[:, c] & (outcome == o)).sum() >= LEAST_TURNS]
        if self.template == OTHER:  # nothing is known of what is said there, and a policy would say anything
            open_ = [(c, o) for c, o in open_ if not any(outcomes[o])]
        while open_:
            best: Conjunction | None = None
            best_of: tuple[int, int, list[Condition]] | None = None
            for c, o in list(open_):
                right = equal[:, c] & (outcome == o)
                if (right & ~covered).sum() < LEAST_TURNS:
                    open_.remove((c, o))
                    continue
                here = times[:, c] >= 0
                table, conditions = base, self.conditions
                if self.copies[c].kind != "say":
                    extra, since = self._since(accepted, times[:, c], right, here)
                    table, conditions = np.hstack([base, extra]), [*self.conditions, *since]
                candidate = find_conjunctions(table, right, here, covered, held, LEAST_TURNS)
                if candidate is None:
                    open_.remove((c, o))
                elif best is None or candidate.gain > best.gain:
                    best, best_of = candidate, (c, o, conditions)
            if best is None or best_of is None:
                break
            c, o, conditions = best_of
            reward, terminated = outcomes[o]
            refuses = (
                self.copies[c].kind == "say" and self.copies[c].text in self.refusing and not (reward or terminated)
            )
            rule = Rule(self.template, (), self.copies[c], reward, terminated, refuses)
            rule = best.proves(rule, conditions)
            rules.append(replace(rule, conditions=within_evidence(rule, self._fillers_of(best))))
            covered |= best.covers
        return rules + self._words(base, times, equal, covered, held)

    def _words(
        self, base: np.ndarray, times: np.ndarray, equal: np.ndarray, covered: np.ndarray, held: np.ndarray
    ) -> list[Rule]:
        """Where the page after an action is known, whatever it pays."""
        rules: list[Rule] = []
        for c, copy in enumerate(self.copies):
            if copy.kind not in ("page", "edit"):
                continue
            for best in conjunctions(base, equal[:, c], times[:, c] >= 0, covered, held, LEAST_TURNS):
                rules.append(best.proves(Rule(self.template, (), copy, None, False, False), self.conditions))
        return rules

    def always(self) -> list[Invariant]:
        """When an action of the template is not refused, what it pays and ends, and what kind of text answers it."""
        if not self._condition_rows or self.template == OTHER:
            return []
        base, held = np.array(self._condition_rows, dtype=bool), np.array(self._held)
        answer_kind, outcome = np.array(self._answer_kind), np.array(self._outcome)
        cases = [(Invariant(self.template, "", (), REFUSAL, False), ~np.array(self._refused))]
        for k, (reward, terminated) in enumerate(o for o, _ in self.outcomes.most_common(4)):
            rewarded = bool(reward or terminated)
            wanted = Invariant(self.template, "", (), OUTCOME, rewarded, reward=reward, terminated=terminated)
            cases.append((wanted, outcome == k))
        cases += [(Invariant(self.template, kind, (), OPENING, True), answer_kind == kind) for kind in self._kinds]
        invariants: list[Invariant] = []
        for invariant, right in cases:
            if right.sum() < LEAST_TURNS:
                continue
            covered = np.zeros(len(held), dtype=bool)
            for best in conjunctions(base, right, np.ones_like(held), covered, held, LEAST_TURNS):
                claim = best.proves(invariant, self.conditions)
                invariants.append(replace(claim, conditions=within_evidence(claim, self._fillers_of(best))))
        return invariants

    def _fillers_of(self, best: Conjunction) -> list[tuple[str, ...]]:
        return [self._fillers[k] for k in np.flatnonzero(best.covers)]

    def _since(
        self, accepted: np.ndarray, times: np.ndarray, right: np.ndarray, here: np.ndarray
    ) -> tuple[np.ndarray, list[Condition]]:
        """Conditions on what was done since the copied text was seen: the templates that spoil it, one by one."""
        since = accepted > times[:, None]
        spoiling: list[int] = []
        alive = here.copy()
        columns, conditions = [], []
        for _ in range(6):
            wrong = alive & ~right
            if wrong.sum() <= (1 - PRECISION) * alive.sum() / 2:
                break
            # most errors taken away for each right answer given up
            lost = (since & (alive & right)[:, None]).sum(0)
            gone = (since & wrong[:, None]).sum(0)
            k = int(np.argmax(gone / (lost + 5.0) * (gone > 0)))
            if gone[k] == 0 or gone[k] <= 0.05 * lost[k]:
                break
            spoiling.append(k)
            alive &= ~since[:, k]
            names = [self._templates[j] for j in spoiling]
            columns.append(since[:, spoiling].any(1))
            conditions.append(Condition("since", value=" | ".join(names)))
        if not columns:
            return np.zeros((len(times), 0), dtype=bool), []
        return np.stack(columns, axis=1), conditions


def within_evidence(claim: Rule | Invariant, seen: Sequence[tuple[str, ...]]) -> tuple[Condition, ...]:
    """Conditions of a claim. One that pays or ends holds for the fillers it was ``seen`` with, unless they are many.

    In a log in which only coins were ever taken, "take {1}" always pays; a policy would find that doors pay, too.
    """
    if not (claim.reward or claim.terminated):
        return claim.conditions
    values = [sorted(set(column)) for column in zip(*seen, strict=False)]
    few = [(slot, names) for slot, names in enumerate(values, start=1) if len(names) < _MANY_FILLERS]
    limits = [Condition("is", slot, " | ".join(names)) for slot, names in few]
    return tuple(dict.fromkeys([*claim.conditions, *limits]))


def _contexts(text: str, filler: str, most: int = 2) -> Iterator[str]:
    """Up to three words before, ``most`` after, or one on both sides of where a filler stands."""
    begin = text.find(f" {filler} ")
    while begin >= 0:
        before = text[max(0, begin - 60) : begin].split()[-3:]
        after = text[begin + len(filler) + 2 : begin + len(filler) + 60].split()[:most]
        yield "_"
        for k in range(1, len(before) + 1):
            yield " ".join([*before[-k:], "_"])
        for k in range(1, len(after) + 1):
            yield " ".join(["_", *after[:k]])
        if before and after:
            yield f"{before[-1]} _ {after[0]}"
        begin = text.find(f" {filler} ", begin + 1)
