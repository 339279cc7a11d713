"""Logged episodes told once more with other names, so that a model learns to copy names and not to know them.

A log has a few dozen nouns, and a small model trained on it knows those and no other: where a new task has nylon in
place of oak it answers nonsense. In a renamed episode every thing that the world named first and an action may name has
a made-up name, the same throughout (data recombination: Jia and Liang 2016, arXiv 1606.03622; made-up words for
copying: Lake and Baroni 2023, "Human-like systematic generalization through a meta-learning neural network").
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from real_envs.streams import stream_seed
from real_envs.trajectory import Trajectory, Turn

_WORD = re.compile(r"(?<![\w'])[A-Za-z]{3,}(?![\w'])")  # the unit of 25kg is none, nor is a part of bath_tub
_COMMON = 0.6  # of the tasks: what more of them have is the world's grammar, such as its verbs and directions
_NAMED = 0.1  # of the tasks that have it: words that actions seldom name, such as "nothing", are no things
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def with_renamed(log: Sequence[Trajectory], copies: int, seed: int) -> list[Trajectory]:
    """The log, and after it so many copies of it in which things have made-up names; ids and rewards stay.

    A word is a thing's name if actions name it in a tenth of the tasks that have it, at most six tenths of all tasks
    have it, and in this episode no action says it before the world does.
    """
    names = _names(log) if copies else frozenset()
    rng = random.Random(stream_seed("renamed", seed))
    return [*log, *(_retold(trajectory, names, rng) for _ in range(copies) for trajectory in log)]


def _names(log: Sequence[Trajectory]) -> frozenset[str]:
    shown: dict[str, set[str]] = {}
    acted: dict[str, set[str]] = {}
    for t in log:
        shown.setdefault(t.task_id, set()).update(_words(t.start), *(_words(u.observation) for u in t.turns))
        acted.setdefault(t.task_id, set()).update(*(_words(u.action) for u in t.turns))
    tasks, named = (Counter(word for words in by.values() for word in words) for by in (shown, acted))
    return frozenset(
        word for word, n in tasks.items() if n <= _COMMON * len(shown) and named[word] >= max(1, _NAMED * n)
    )


def _retold(trajectory: Trajectory, names: frozenset[str], rng: random.Random) -> Trajectory:
    shown, said = _words(trajectory.start), set[str]()
    for turn in trajectory.turns:
        said |= _words(turn.action) - shown
        shown |= _words(turn.observation)
    known = shown | said
    new: dict[str, str] = {}
    for word in sorted((shown & names) - said):
        new[word] = _made_up(known, rng)
        known.add(new[word])

    def other(match: re.Match[str]) -> str:
        word = match[0]
        name = new.get(word.lower(), word)
        return name.capitalize() if word[0].isupper() and name != word else name

    def tell(text: str) -> str:
        return _WORD.sub(other, text)

    def tell_turn(turn: Turn) -> Turn:
        info = {key: tell(str(value)) if key == "reasoning" else value for key, value in turn.info.items()}
        return replace(turn, action=tell(turn.action), observation=tell(turn.observation), info=info)

    turns = tuple(map(tell_turn, trajectory.turns))
    facts = tuple(map(tell, trajectory.world_facts))
    return replace(trajectory, start=tell(trajectory.start), turns=turns, trace=None, world_facts=facts)


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _made_up(known: set[str], rng: random.Random) -> str:
    """One to three syllables that are no word of the episode."""
    syllables: list[Callable[[], str]] = [lambda: rng.choice(_CONSONANTS) + rng.choice(_VOWELS)]
    syllables.append(lambda: syllables[0]() + rng.choice(_CONSONANTS))
    while True:
        word = "".join(rng.choice(syllables)() for _ in range(rng.randint(1, 3)))
        if word not in known:
            return word
