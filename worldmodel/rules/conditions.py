"""The closed language of rules: conditions on an episode's words, and answers made of them.

All are plain data, so a rule found by counting, or proposed by anybody, is JSON that cannot run anything.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from real_envs.trajectory import Turn, same_reward
from worldmodel.rules.episode import SCOPES, EpisodeText, Language, name_after, without_sentences
from worldmodel.rules.pages import Change, apply
from worldmodel.rules.templates import ANY, OTHER, Action, fill

ConditionKind = Literal["text", "is", "missing", "last_deed", "did", "done", "paid", "since"]
CopyKind = Literal["say", "last", "line", "again", "link", "way", "page", "edit"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One test of the words of an episode before an action."""

    # ``text``: the context stands in the text of a scope; ``is``: the filler is a value, or one of several with `` | ``
    # between them; ``missing``: some filler of
    # the action does not stand in the text of a scope; ``last_deed``: the last accepted action that named the filler
    # had it in this slot of this template; ``did``: some accepted action had it there; ``done``: an action of the
    # template was accepted; ``paid``: this action earned something before; ``since``: one was accepted after the text
    # that is copied was seen, or one of several, with `` | `` between them
    kind: ConditionKind
    slot: int = 0  # of the filler, from 1; 0 where there is none
    value: str = ""  # the context with ``_`` for the filler, the value, or the template
    scope: str = ""  # of ``text`` and ``missing``: see ``EpisodeText.text``
    other: int = 0  # the slot in the template of a deed
    negated: bool = False  # the condition holds where this is not so

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConditionKind):
            raise ValueError(f"{self.kind!r} is no condition: one of {', '.join(get_args(ConditionKind))}")
        _check_types(self, str, "value", "scope")
        _check_types(self, int, "slot", "other", "negated")

    def holds(self, episode: EpisodeText, action: Action, source: int = 0) -> bool:
        """Whether it holds before an action; ``source`` is when the text was seen that the answer copies."""
        return self._plain(episode, action, source) != self.negated

    def _plain(self, episode: EpisodeText, action: Action, source: int) -> bool:
        kind = self.kind
        if kind == "since":
            return any(episode.accepted[template] > source for template in self.value.split(" | "))
        if kind == "paid":
            return action.text in episode.paid
        if kind == "done":
            return episode.accepted[self.value] > 0
        if kind == "missing":
            return any(f" {filler} " not in episode.text(self.scope) for filler in action.fillers)
        if not self.slot:  # the words of the condition stand for themselves, or for what the first text mentions
            phrase = " ".join(episode.mentions.get(word, word) for word in self.value.split())
            return f" {phrase} " in episode.text(self.scope)
        filler = action.fillers[self.slot - 1]
        if kind == "text":
            return f" {self.value.replace('_', filler)} " in episode.text(self.scope)
        if kind == "is":
            return any(filler == episode.mentions.get(value, value) for value in self.value.split(" | "))
        if kind == "last_deed":
            return episode.last_deed.get(filler) == (self.value, self.other)
        return (self.value, self.other, filler) in episode.deeds

    def __str__(self) -> str:
        no = "not " if self.negated else ""
        thing = f"{{{self.slot}}}"
        if self.kind in ("text", "missing"):
            where = {"start": "the first text", "last": "the last text", "seen": "any text"}
            where["state"] = "the last text that refused nothing"
            place = where.get(self.scope, f'the last text that begins "{self.scope}"')
            if self.kind == "missing":
                all_ = "all that it names stands" if self.negated else "not all that it names stands"
                return f"{all_} in {place}"
            words = self.value.replace("_", thing) if self.slot else self.value
            return f'{no}"{words}" stands in {place}'
        if self.kind == "is":
            return f"{thing} is {no}{self.value.replace(' | ', ' or ')}"
        if self.kind == "paid":
            return f"it was {no}paid for before"
        deed = self.value.replace(f"{{{self.other}}}", thing) if self.other else self.value
        texts = {
            "last_deed": f'{no}"{deed}" is the last thing done with {thing}',
            "did": f'"{deed}" was {no or ""}done before',
            "done": f'"{deed}" was {no or ""}done before',
            "since": f'"{deed}" was {no or ""}done since',
        }
        return texts[self.kind]


@dataclass(frozen=True, slots=True)
class Copy:
    """Where the words of an answer come from.

    Attributes:
        slot, between: of ``link``: the filler, and the words between it and the name.
    """

    # ``say``: a pattern with the fillers; ``last``: the last text of a kind; ``line``: its first line; ``again``: the
    # answer to the same action before; ``link``: the last text of a kind whose name stands beside the filler in the
    # text now; ``way``: the last text of a kind of the place to which this action led before, or that a step came from
    # which it undoes; ``page``: the last page, behind a notice; ``edit``: the last page with a ``Change``
    kind: CopyKind
    text: str = ""  # the pattern, or the kind
    slot: int = 0
    between: str = ""
    without: str = ""
    # of ``edit``; ``text``, ``slot``, ``between``, ``without`` and this are the parts of the ``Change``
    named: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(CopyKind):
            raise ValueError(f"{self.kind!r} is no answer: one of {', '.join(get_args(CopyKind))}")
        _check_types(self, str, "text", "between", "without", "named")
        _check_types(self, int, "slot")

    def make(self, episode: EpisodeText, action: Action) -> tuple[str, int] | None:
        """The answer, and when the text was seen that it copies; ``None`` where there is none."""
        if self.kind == "say":
            return fill(self.text, action.fillers), 0
        if self.kind == "again":
            return episode.answers.get(action.text)
        if self.kind in ("page", "edit"):
            text = apply(self.change, episode.page, action.written)
            return None if text is None else (text, episode.time)
        if self.kind in ("last", "line"):
            seen = episode.segments.get(self.text)
            source = seen[-1] if seen else None
        else:
            name = episode.way(self.text, action.text) if self.kind == "way" else self.target(episode, action)
            source = episode.named(self.text, name) if name else None
        if source is None:
            return None
        text = source.text.split("\n", 1)[0] if self.kind == "line" else source.text
        if self.without:
            text = without_sentences(text, episode.done_to(self.without, source.time))
        return text, source.time

    @property
    def change(self) -> Change:
        return Change(self.slot, self.text, self.between, self.without, self.named)

    def target(self, episode: EpisodeText, action: Action) -> str | None:
        text = episode.text(self.text)
        return name_after(text, f"{action.fillers[self.slot - 1]} {self.between}") or None

    def __str__(self) -> str:
        if self.kind in ("page", "edit"):
            return str(self.change)
        less = f', without sentences on what "{self.without}" was done to since' if self.without else ""
        return less.join((self._plainly(), ""))

    def _plainly(self) -> str:
        return {
            "say": repr(self.text),
            "last": f'the last text that begins "{self.text}"',
            "line": f'the last line that begins "{self.text}"',
            "again": "what it answered to the same action before",
            "link": f'the last text that begins "{self.text}" of the place that stands behind "{{{self.slot}}} '
            f'{self.between}"',
            "way": f'the last text that begins "{self.text}" of the place where this action leads',
        }[self.kind]


class Evidence:
    """What rules and invariants share: the conditions under which they hold, and how often they did.

    Attributes:
        turns, exceptions: how often it applied in the episodes that it was found in, and was wrong.
        held_turns, held_exceptions: the same in those that it was not.
    """

    __slots__ = ()
    conditions: tuple[Condition, ...]
    turns: int
    exceptions: int
    held_turns: int
    held_exceptions: int

    @property
    def precision(self) -> float:
        """Share of the turns on which it was right by Laplace's rule of succession, so never 1."""
        turns, exceptions = self.turns + self.held_turns, self.exceptions + self.held_exceptions
        return (turns - exceptions + 1) / (turns + 2)

    @property
    def counts(self) -> str:
        turns, exceptions = self.turns + self.held_turns, self.exceptions + self.held_exceptions
        return f"({turns - exceptions:,} of {turns:,})"

    def applies(self, episode: EpisodeText, action: Action, source: int = 0) -> bool:
        slots = len(action.fillers)  # of any action there may be fewer than a condition names
        return all(c.slot <= slots and c.holds(episode, action, source) for c in self.conditions)

    def under(self, template: str, joint: str = ": if ") -> str:
        """The template with the conditions, in words."""
        return f"{template}{joint * bool(self.conditions)}{' and '.join(map(str, self.conditions))}"


@dataclass(frozen=True, slots=True)
class Rule(Evidence):
    """Under these conditions the world answers so.

    Attributes:
        reward, terminated: the outcome; where the reward is ``None``, the rule knows the words alone.
    """

    template: str
    conditions: tuple[Condition, ...]
    copy: Copy
    reward: float | None
    terminated: bool
    refuses: bool
    turns: int = 0
    exceptions: int = 0
    held_turns: int = 0
    held_exceptions: int = 0

    def answer(self, episode: EpisodeText, action: Action) -> str | None:
        """``None`` where the rule does not apply."""
        slots = {self.copy.slot} | (_slots(self.copy.text) if self.template == ANY else set())
        made = self.copy.make(episode, action) if max(slots) <= len(action.fillers) else None
        return made[0] if made is not None and self.applies(episode, action, made[1]) else None

    def is_right(self, answer: str, turn: Turn) -> bool:
        """Whether the world answered so: words and, where the rule knows them, reward and end."""
        if answer.strip() != turn.observation.strip():
            return False
        if self.reward is None:
            return True
        return same_reward(self.reward, turn.reward or 0.0) and self.terminated == turn.terminated

    def __str__(self) -> str:
        outcome = ", whatever it pays"
        if self.reward is not None:
            outcome = f", reward {self.reward:g}" * (self.reward != 0) + ", the end" * self.terminated
        template = {OTHER: "any other action", ANY: "any action"}.get(self.template, self.template)
        return f"{self.under(template)} -> {self.copy}{outcome} {self.counts}"

    def check(self, language: Language) -> None:
        """Raises ``ValueError`` where the rule speaks of a template, a slot or a kind of text that the language has
        not.
        """
        templates, scopes = {*language.templates.texts, OTHER, ANY}, {*SCOPES, *language.kinds}
        slots = _slots(self.template)
        named = [self.template, *([self.copy.without] if self.copy.without and self.copy.kind != "edit" else [])]
        used = {self.copy.slot}
        if self.copy.kind in ("say", "page", "edit"):
            used |= _slots(self.copy.text) | _slots(self.copy.named)
        for c in self.conditions:
            used.add(c.slot)
            named += c.value.split(" | ") if c.kind in ("last_deed", "did", "done", "since") else []
            if c.kind in ("text", "missing") and c.scope not in scopes:
                raise ValueError(f"no text is {c.scope!r}: one of {', '.join(sorted(scopes))}")
            if c.kind in ("is", "last_deed", "did") and not c.slot:
                raise ValueError(f"{c.kind} needs a slot")
        if unknown := sorted(set(named) - templates):
            raise ValueError(f"no action is {unknown[0]!r}")
        if wrong := sorted(slot for slot in used - slots - {0} if self.template != ANY or slot < 0):
            raise ValueError(f"{self.template!r} has no slot {wrong[0]}")
        if self.copy.kind in ("last", "line", "link", "way") and self.copy.text not in language.kinds:
            raise ValueError(f"no texts begin {self.copy.text!r}")
        if self.copy.kind in ("link", "edit") and not self.copy.slot:
            raise ValueError(f"{self.copy.kind} needs a slot")
        if self.copy.kind in ("page", "edit") and language.notices is None:
            raise ValueError("the log has no pages")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Rule:
        conditions = tuple(Condition(**c) for c in data["conditions"])
        return Rule(**{**data, "conditions": conditions, "copy": Copy(**data["copy"])})


def _check_types(part: Condition | Copy, kind: type, *names: str) -> None:
    """What was read from a file, or proposed, may be anything."""
    if wrong := [name for name in names if not isinstance(getattr(part, name), kind)]:
        raise ValueError(f"{wrong[0]} must be {kind.__name__}, not {getattr(part, wrong[0])!r}")


def _slots(text: str) -> set[int]:
    return {int(slot) for slot in re.findall(r"\{(\d)\}", text)}
