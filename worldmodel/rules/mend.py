"""An answer that breaks invariants, with as few words changed as mend it.

Where a required phrase stands there with another name (``to the east you see the driveway`` for the way back to the
greenhouse), the name is put right; a sentence that says what may not be said is left out. A change is kept only if
fewer invariants are broken afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from worldmodel.rules.episode import Episode, split_sentences, without_sentences
from worldmodel.rules.invariants import OPENING, OUTCOME, REFUSAL, Invariant, names_of, spoken, surface, with_name
from worldmodel.rules.templates import NEWLINE, Action, flat

_ROUNDS = 4
_NAME = r"[\w' -]+?"


def mend(
    answer: str, check: Callable[[str], Sequence[Invariant]], episode: Episode, action: Action
) -> tuple[str, Sequence[Invariant]]:
    """
    Args:
        check: the invariants that a text breaks.
        episode: before the answer.

    Returns:
        The text that breaks fewest, and what it breaks; the answer itself where no change helps.
    """
    broken = check(answer)
    for _ in range(_ROUNDS):
        better = [(text, check(text)) for text in dict.fromkeys(_changes(answer, broken, episode, action))]
        better = [(text, left) for text, left in better if len(left) < len(broken)]
        if not better:
            break
        answer, broken = min(better, key=lambda item: len(item[1]))
    return answer, broken


def _changes(answer: str, broken: Sequence[Invariant], episode: Episode, action: Action) -> Iterator[str]:
    for invariant in broken:
        if invariant.phrase in (OPENING, OUTCOME, REFUSAL):
            continue
        names = names_of(episode, with_name(action, answer, invariant.kind), invariant.kind, invariant.link)
        words = invariant.phrase.split()
        if invariant.once:
            yield from _without_one(answer, spoken(invariant.phrase, names) or "")
            continue
        if not invariant.required:
            phrase = spoken(invariant.phrase, names) or ""
            yield without_sentences(answer, [phrase.strip(f" .,;:!?{NEWLINE}")])
            continue
        for k, word in enumerate(words):
            name = names.get(word)
            if name is None or not k:
                continue
            before, after = (spoken(" ".join(part), names) for part in (words[:k], words[k + 1 :]))
            if before is None or after is None:
                continue
            end = _pattern(after) if after else r"[.,;:!?\n]|$"
            written = surface(episode.written, name) or name
            for found in re.finditer(rf"{_pattern(before)}\s+({_NAME})(?=\s*(?:{end}))", answer, flags=re.IGNORECASE):
                yield answer[: found.start(1)] + written + answer[found.end(1) :]


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


__all__ = ["mend"]
