"""A dream beside reality, turn by turn: the same start and the same actions, and how each pair of answers differs.

Pure functions of two trajectories. Example, a dream that went wrong at its second turn::

    alignment = align(dream, real)
    [turn.kind for turn in alignment.turns]  # [SAME, STATE, STATE, ALONE]
    alignment.first                          # 1

Only the first divergence is the world model's own mistake: what differs later may follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any

from real_envs.trajectory import StopReason, Trajectory, Turn, same_reward

# Words without which a sentence still says the same. Nothing that negates, counts, orders or places is among them.
FUNCTION_WORDS = frozenset(
    re.findall(r"\w+", "a an the this that these those some there here you your it its and also now is are")
)
_SENTENCES = re.compile(r"[.!?;]+(?=\s|$)|\n")
_EDGES = ".,;:!?\"'()*"  # punctuation around a word; a sign or a bracket is part of it: -5 is not 5


class TurnClass(StrEnum):
    """How two answers to the same action differ, the gravest first where there are several."""

    INVALID = "invalid"  # the world model wrote nothing that could be read
    STATE = "state"  # they say different things
    REWARD = "reward"  # they pay differently
    END = "end"  # only one of them ends
    WORDING = "wording"  # they say the same in other words
    SAME = "same"  # equal but for white space
    ALONE = "alone"  # only one of the two worlds played this turn


@dataclass(frozen=True, slots=True)
class AlignedTurn:
    """One action and both answers.

    Attributes:
        dream, real: ``None`` where a world had ended, was cut, or gave no answer that could be read.
        kind: the gravest difference.
        differs: all of them, gravest first.
        unsure: the guard ended the dream here. Its words were predicted, but the reward was withheld and the end not
            acted on, so neither is compared.
    """

    action: str
    dream: Turn | None
    real: Turn | None
    kind: TurnClass
    differs: tuple[TurnClass, ...] = ()
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Alignment:
    """All turns of a pair. Where both did not begin with the same words, nothing can be said about the dream."""

    turns: tuple[AlignedTurn, ...]
    same_start: bool

    @property
    def compared(self) -> int:
        """Turns that both worlds answered, or that the dream failed to answer."""
        return sum(turn.kind is not TurnClass.ALONE for turn in self.turns)

    @property
    def first(self) -> int | None:
        """Index of the first turn that differs at all; ``None`` if there is none."""
        return self._first(TurnClass.SAME)

    @property
    def first_in_substance(self) -> int | None:
        """The same, where other words for the same thing are no difference."""
        return self._first(TurnClass.SAME, TurnClass.WORDING)

    def _first(self, *harmless: TurnClass) -> int | None:
        ignored = (*harmless, TurnClass.ALONE)
        return next((k for k, turn in enumerate(self.turns) if turn.kind not in ignored), None)


def same_words(a: str, b: str) -> bool:
    """Equal but for white space."""
    return a.split() == b.split()


def rewards_agree(a: float | None, b: float | None) -> bool:
    """Equal but for rounding; a reward that nobody measured agrees with any."""
    return a is None or b is None or same_reward(a, b)


def says_the_same(a: str, b: str) -> bool:
    """Whether both texts consist of the same sentences, in any order, but for case, punctuation and function words.

    A synonym counts as another state, because one word is what tells an open door from a closed one.

    >>> says_the_same("There is a lamp. You see a key.", "You see the key! A lamp is here.")
    False
    >>> says_the_same("There is a lamp. You see a key.", "You see the key! There is a lamp.")
    True
    """
    return _sentences(a) == _sentences(b)


def _sentences(text: str) -> list[tuple[str, ...]]:
    sentences = []
    for sentence in _SENTENCES.split(text.casefold()):
        words = [word.strip(_EDGES) for word in sentence.split()]
        sentences.append(tuple(word for word in words if word and word not in FUNCTION_WORDS))
    return sorted(words for words in sentences if words)


def differences(dream: Turn, real: Turn, unsure: bool = False) -> tuple[TurnClass, ...]:
    """In what two answers to the same action differ, gravest first; nothing where they are the same."""
    differs = []
    words = not same_words(dream.observation, real.observation)
    wording = words and says_the_same(dream.observation, real.observation)
    if words and not wording:
        differs.append(TurnClass.STATE)
    if not unsure and not rewards_agree(dream.reward, real.reward):
        differs.append(TurnClass.REWARD)
    if not unsure and dream.terminated != real.terminated:
        differs.append(TurnClass.END)
    if wording:
        differs.append(TurnClass.WORDING)
    return tuple(differs)


def align(dream: Trajectory, real: Trajectory, attempted: str = "") -> Alignment:
    """Pairs the turns of a dream and of a real episode with the same actions.

    Args:
        real: the dream's replay, or the logged episode whose actions were dreamed.
        attempted: the action to which the dream's answer could not be read, where ``real`` does not tell it.

    Raises:
        ValueError: a turn that both have has another action: they are no pair.
    """
    for k, (a, b) in enumerate(zip(dream.turns, real.turns, strict=False)):
        if a.action != b.action:
            raise ValueError(f"turn {k} of {dream.id} is {a.action!r}, but of {real.id} it is {b.action!r}: no pair")
    return align_turns(dream.turns, real.turns, dream.stop, attempted, same_words(dream.start, real.start))


def align_turns(
    dream: Sequence[Turn], real: Sequence[Turn], stop: StopReason | None = None, attempted: str = "", start: bool = True
) -> Alignment:
    """See ``align``. ``stop``: of the dream; ``None`` compares its turns alone, also one at which the guard cut it."""
    turns = []
    broken = len(dream) if stop is StopReason.PREDICTION_INVALID else None
    for k in range(max(len(dream) + (broken is not None), len(real))):
        a, b = (turns_of[k] if k < len(turns_of) else None for turns_of in (dream, real))
        action = a.action if a else b.action if b else attempted
        if k == broken:
            turns.append(AlignedTurn(action, a, b, TurnClass.INVALID, (TurnClass.INVALID,)))
        elif a is None or b is None:
            turns.append(AlignedTurn(action, a, b, TurnClass.ALONE))
        else:
            unsure = stop is StopReason.UNSURE and k == len(dream) - 1
            differs = differences(a, b, unsure)
            turns.append(AlignedTurn(action, a, b, differs[0] if differs else TurnClass.SAME, differs, unsure))
    return Alignment(tuple(turns), start)


Row = Mapping[str, Any]  # one line of rollouts.jsonl


@dataclass(frozen=True, slots=True)
class ReplayedPair:
    """A dream and its replay: two rows of ``rollouts.jsonl``, of which ``real["twin_of"]`` is the dream's id."""

    dream: Row
    real: Row
    alignment: Alignment

    @property
    def false_success(self) -> bool:
        """The dream was solved, the game was not: what a policy must not learn from."""
        return bool(self.dream.get("solved")) and not self.real.get("solved")


def replayed_pairs(rollouts: Iterable[Row]) -> list[ReplayedPair]:
    """Pairs every replay with its dream. A replay that crashed says nothing and is left out.

    Turns are compared as far as both were played: a dream that was cut is not wrong where the game went on, nor is a
    reward that the guard withheld.
    """
    rows = list(rollouts)
    dreams = {row["id"]: row for row in rows if row.get("source") == "dream"}
    pairs = []
    for real in rows:
        dream = dreams.get(real.get("twin_of"))
        if dream is not None and not StopReason(real["stop"]).is_failure:
            pairs.append(ReplayedPair(dream, real, align_turns(_turns(dream), _turns(real), StopReason(dream["stop"]))))
    return pairs


def _turns(row: Row) -> list[Turn]:
    return [
        Turn(turn["action"], turn["observation"], turn["reward"], turn["terminated"], turn.get("info") or {})
        for turn in row["turns"]
    ]


def still_true(pairs: Sequence[ReplayedPair]) -> list[tuple[int, float, int]]:
    """``survival`` of the pairs' dreams. Turns copied from a log (``prefix_turns``) were not dreamed."""
    lives = []
    for pair in pairs:
        first = pair.alignment.first
        end = pair.alignment.compared if first is None else first
        dreamed = max(end - int(pair.dream.get("prefix_turns") or 0), 0)
        lives.append((dreamed, False) if first is None else (dreamed + 1, True))
    return survival(lives)


def survival(lives: Sequence[tuple[int, bool]]) -> list[tuple[int, float, int]]:
    """``(k, share of dreams still true to reality after k turns, dreams at risk)``, starting with ``(0, 1.0, n)``.

    Kaplan and Meier's product, JASA 53 (1958) 457-481: a dream that ended without parting leaves the count at its end
    instead of pulling the curve up or down.

    Args:
        lives: of each dream, the turns until it parted (that one included) or ended, and whether it parted.
    """
    curve, share = [(0, 1.0, len(lives))], 1.0
    for k in range(1, max((turns for turns, _ in lives), default=0) + 1):
        at_risk = sum(turns >= k for turns, _ in lives)
        share *= 1 - sum(parted and turns == k for turns, parted in lives) / at_risk
        curve.append((k, share, at_risk))
    return curve if lives else []


Span = tuple[int, int]  # characters [start, end) of a text
LONG = 2000  # words; matching them takes time that grows with their square


def word_diff(a: str, b: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both texts cut into ``(piece, differs)``; the pieces of a side joined are that side's text.

    Texts that have less than half in common differ as a whole; so do very long ones, between the words with which both
    begin and end.

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
