"""What the real world refuses, learned from a log.

Few logs say which actions were refused, and a list of phrases would hold for one parser only. So an answer is taken for
a refusal by what follows from it, in a world that is a function of its commands:

1. *Nothing follows from it.* Let a state be a task, its beginning and the actions so far. Where the log holds an action
   b both after a state and after the same state and one more action a, the two answers to b are compared. Were they
   ever different, a's answer told of a change. An answer *pattern* (the words of the action masked, so that "You have
   to unlock the safe first" is one pattern for every container) is inert where it has been compared at least five times
   and at most 2 % of those differed. It never paid and never ended anything.
2. *The action wanted something.* Looking around is inert as well, and no refusal. A verb (first word) is effective if
   one of its answers paid, ended the episode or was followed by a difference. An inert pattern is a refusal if, among
   the turns compared, it answers an effective verb ("You can't go that way.") or at least three different first words
   ("You can't see any such thing.").

An environment that says so itself (``Turn.info`` holds ``"refused"``) is believed. What was too rare to be compared
stays unclassified and counts as accepted, so the definition errs on the side of too few refusals. In TextWorld the
definition can be checked against the simulator's list of admissible commands, which it does not read: docs/log/.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from real_envs.trajectory import NO_ANSWER, Trajectory, Turn

COMPARED = 5  # fewer comparisons than this say nothing about a pattern
TOLERATED = 0.02  # share of comparisons that may differ in an inert pattern
FIRST_WORDS = 3  # an inert answer to this many different first words refuses, whatever the verbs do elsewhere
_WORD = re.compile(r"[\w']+")
_Answer = tuple[str, float | None, bool]
_Task = tuple[str, str]  # and its beginning


@lru_cache(maxsize=1 << 16)
def pattern(action: str, observation: str) -> str:
    """The answer with the action's words masked: what is said of the chest is said of every container.

    >>> pattern("open chest", "You have to unlock the chest with the key first.")
    'You have to unlock the _ with the key first.'
    """
    words = {word for word in _WORD.findall(action.lower()) if len(word) > 1}
    masked = _WORD.sub(lambda found: "_" if found[0].lower() in words else found[0], observation.strip())
    return re.sub(r"_(\s+_)+", "_", masked)


@dataclass(frozen=True, slots=True)
class Refusals:
    """The patterns of answers that refuse; see the module's text for how they were found."""

    patterns: frozenset[str]

    def refuses(self, action: str, observation: str) -> bool:
        # Garbled actions hold words of the refusal itself ("go you can see"), which must not be masked in it.
        return pattern(action, observation) in self.patterns or observation.strip() in self.patterns


def learn_refusals(log: Iterable[Trajectory]) -> Refusals:
    """Which answers are refusals, from real episodes that share beginnings (several per task)."""
    episodes = list(log)
    answers = _answers(episodes)
    compared: Counter[str] = Counter()
    differed: Counter[str] = Counter()
    verbs: dict[str, set[str]] = {}  # by pattern, where it was compared
    consequential: set[str] = set()
    effective: set[str] = set()
    after: dict[tuple[_Task, tuple[str, ...]], set[str]] = {}
    for task, history, action in answers:
        after.setdefault((task, history), set()).add(action)
    for (task, history, action), (observation, reward, end) in answers.items():
        shape = pattern(action, observation)
        if reward or end:
            consequential.add(shape)
            effective.add(_verb(action))
        here, there = after[task, history], after.get((task, (*history, action)), set())
        for other in here & there:
            differs = answers[task, history, other] != answers[task, (*history, action), other]
            compared[shape] += 1
            differed[shape] += differs
            verbs.setdefault(shape, set()).add(_verb(action))
            if differs:
                effective.add(_verb(action))
    frequent = {
        shape
        for shape, times in compared.items()
        if times >= COMPARED
        and differed[shape] <= TOLERATED * times
        and shape not in consequential
        and (len(verbs[shape]) >= FIRST_WORDS or verbs[shape] & effective)
    }
    declared = {pattern(u.action, u.observation) for t in episodes for u in t.turns if "refused" in u.info}
    return Refusals(frozenset(frequent | declared))


def _answers(episodes: Sequence[Trajectory]) -> dict[tuple[_Task, tuple[str, ...], str], _Answer]:
    """(task, actions so far, action) -> answer; the first one where the world answered in several ways."""
    answers: dict[tuple[_Task, tuple[str, ...], str], _Answer] = {}
    for trajectory in episodes:
        history: tuple[str, ...] = ()
        for turn in trajectory.turns:
            if NO_ANSWER not in turn.info:
                answers.setdefault(((trajectory.task_id, trajectory.start), history, turn.action), answer(turn))
            history = (*history, turn.action)
    return answers


def answer(turn: Turn) -> _Answer:
    """What the world answered: stripped text, reward, end."""
    return turn.observation.strip(), turn.reward, turn.terminated


def _verb(action: str) -> str:
    """The first word; of a call, its name."""
    return re.split(r"[\s(]", action.strip().lower(), maxsplit=1)[0]
