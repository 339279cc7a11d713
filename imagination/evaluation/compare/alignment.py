"""A dream beside reality, turn by turn: the same start and the same actions, and how each pair of answers differs.

Pure functions of two trajectories. Example, a dream that went wrong at its second turn::

    alignment = align(dream, real)
    [turn.kind for turn in alignment.turns]  # [SAME, STATE, STATE, ALONE]
    alignment.first                          # 1

Only the first divergence is the world model's own mistake. After it the two worlds may be in different states, and what
differs then may follow from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from real_envs.trajectory import StopReason, Trajectory, Turn
from real_envs.trajectory import same_reward as equal_rewards

# Words without which a sentence still says the same. Nothing that negates, counts, orders or places is among them.
FUNCTION_WORDS = frozenset(
    re.findall(r"\w+", "a an the this that these those some there here you your it its and also now is are")
)
_SENTENCES = re.compile(r"[.!?;]+(?=\s|$)|\n")
_EDGES = ".,;:!?\"'()*"  # punctuation around a word; a sign or a bracket is part of it: -5 is not 5


class TurnClass(StrEnum):
    """How two answers to the same action differ, the gravest first where there are several.

    ``INVALID``: the world model wrote nothing that could be read. ``STATE``: they say different things. ``REWARD`` and
    ``END``: they say the same and pay differently, or only one of them ends. ``WORDING``: they say the same in other
    words. ``SAME``: equal but for white space. ``ALONE``: only one of the two worlds played this turn.
    """

    INVALID = "invalid"
    STATE = "state"
    REWARD = "reward"
    END = "end"
    WORDING = "wording"
    SAME = "same"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class AlignedTurn:
    """One action and both answers.

    Attributes:
        action: what was done in both worlds.
        dream, real: the answers; ``None`` where a world had ended, was cut, or gave none that could be read.
        kind: the gravest difference.
        differs: all of them, gravest first; empty where there is none.
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
    """All turns of a pair.

    Attributes:
        turns: in order.
        same_start: whether both began with the same words; where not, the worlds were different ones from the start and
            nothing can be said about the dream.
    """

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


def same_reward(a: float | None, b: float | None) -> bool:
    """Equal but for rounding; a reward that nobody measured agrees with any."""
    return a is None or b is None or equal_rewards(a, b)


def says_the_same(a: str, b: str) -> bool:
    """Whether both texts consist of the same sentences, in any order, but for case, punctuation and function words.

    Strict on purpose: a synonym counts as another state, because one word is what tells an open door from a closed one.
    So the share of turns that differ only in wording is a lower bound.

    >>> says_the_same("There is a lamp. You see a key.", "You see the key! A lamp is here.")
    False
    >>> says_the_same("There is a lamp. You see a key.", "You see the key! There is a lamp.")
    True
    """
    return _sentences(a) == _sentences(b)


def _sentences(text: str) -> list[tuple[str, ...]]:
    found = []
    for sentence in _SENTENCES.split(text.casefold()):
        words = [word.strip(_EDGES) for word in sentence.split()]
        found.append(tuple(word for word in words if word and word not in FUNCTION_WORDS))
    return sorted(words for words in found if words)


def differences(dream: Turn, real: Turn, unsure: bool = False) -> tuple[TurnClass, ...]:
    """In what two answers to the same action differ, gravest first; nothing where they are the same."""
    found = []
    words = not same_words(dream.observation, real.observation)
    wording = words and says_the_same(dream.observation, real.observation)
    if words and not wording:
        found.append(TurnClass.STATE)
    if not unsure and not same_reward(dream.reward, real.reward):
        found.append(TurnClass.REWARD)
    if not unsure and dream.terminated != real.terminated:
        found.append(TurnClass.END)
    if wording:
        found.append(TurnClass.WORDING)
    return tuple(found)


def align(dream: Trajectory, real: Trajectory, attempted: str = "") -> Alignment:
    """Pairs the turns of a dream and of a real episode with the same actions.

    Args:
        dream: from ``DreamEnv``.
        real: its replay, or the logged episode whose actions were dreamed.
        attempted: the action to which the dream's answer could not be read, where ``real`` does not tell it.

    Raises:
        ValueError: a turn that both have has another action: they are no pair.
    """
    turns = []
    broken = len(dream.turns) if dream.stop is StopReason.PREDICTION_INVALID else None
    for k in range(max(len(dream.turns) + (broken is not None), len(real.turns))):
        a = dream.turns[k] if k < len(dream.turns) else None
        b = real.turns[k] if k < len(real.turns) else None
        if a is not None and b is not None and a.action != b.action:
            raise ValueError(f"turn {k} of {dream.id} is {a.action!r}, but of {real.id} it is {b.action!r}: no pair")
        action = a.action if a else b.action if b else attempted
        if k == broken:
            turns.append(AlignedTurn(action, a, b, TurnClass.INVALID, (TurnClass.INVALID,)))
        elif a is None or b is None:
            turns.append(AlignedTurn(action, a, b, TurnClass.ALONE))
        else:
            unsure = dream.stop is StopReason.UNSURE and k == len(dream.turns) - 1
            found = differences(a, b, unsure)
            turns.append(AlignedTurn(action, a, b, found[0] if found else TurnClass.SAME, found, unsure))
    return Alignment(tuple(turns), same_words(dream.start, real.start))
