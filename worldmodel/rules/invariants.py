"""What an answer must say, or must not, whatever else it says: invariants of texts that no rule foretells as a whole.

``move {1}`` leads to a text that begins ``you are in {there}``, where ``{there}`` stood behind ``{1} you see`` before,
and says ``to the east you see {here}`` if {1} is west. A world model is asked again where it breaks one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from real_envs.trajectory import Turn, same_reward
from worldmodel.rules.conditions import Condition, Copy, Evidence
from worldmodel.rules.episode import EpisodeText, name_of, split_sentences, without_sentences
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
    words = []
    for word in phrase.split():
        if word.startswith("{") and word not in names:
            return None
        words.append(names.get(word, word))
    return " ".join(words)


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
        better = [(text, check(text)) for text in dict.fromkeys(_changes(answer, broken, episode, action))]
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
