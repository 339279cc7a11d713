"""Does a dream keep to what it has said itself? Counted without a simulator, in dreams or in real episodes.

A turn contradicts the episode before it where a rule mined from the log (``worldmodel/rules/``) foretells another
answer from the words of the episode, or where an action that was just refused is accepted though nothing was done in
between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from real_envs.trajectory import StopReason, Trajectory, Turn
from worldmodel.evaluation.intervals import clusters, proportion
from worldmodel.rules.rule_set import Answer, RuleSet


class Contradiction(StrEnum):
    """How a turn contradicts what the episode said before."""

    ACCEPTED = "accepted"  # what a rule refuses was done: a move where no exit is, a thing taken that is not there
    REFUSED = "refused"  # what a rule knows to be possible was refused
    CHANGED = "changed"  # a text that should have come back is another: a room that changed behind one's back
    WORDS = "words"  # another answer than the one that the log always gives
    OUTCOME = "outcome"  # the words are right, reward or end are not: paid twice, or not at all
    INVARIANT = "invariant"  # says what such answers never say, or leaves out what they all say: a room of another name
    RETRIED = "retried"  # refused, and then accepted, with nothing but refusals in between


def contradiction(found: Answer | None, turn: Turn, rules: RuleSet) -> Contradiction | None:
    """How a turn contradicts what the rules foretell of it; ``None`` where it does not, or no rule applies."""
    if found is None:
        return None
    rule, refused = found.rule, rules.language.refuses(turn.action, turn.observation)
    if rule.is_right(found.observation, turn):
        return None
    if turn.observation.strip() == found.observation.strip():
        return Contradiction.OUTCOME
    if rule.refuses:
        return None if refused else Contradiction.ACCEPTED
    if refused:
        return Contradiction.REFUSED
    return Contradiction.WORDS if rule.copy.kind == "say" else Contradiction.CHANGED


def contradictions_of(trajectory: Trajectory, rules: RuleSet) -> list[Contradiction | None]:
    """One entry for each of the episode's own turns, without one that the guard rejected."""
    found: list[Contradiction | None] = []
    just_refused: set[str] = set()
    session = ("contradictions", trajectory.id)
    believed = len(trajectory.turns) - (trajectory.stop is StopReason.UNSURE)
    for k, turn in enumerate(trajectory.turns[:believed]):
        refused = rules.language.refuses(turn.action, turn.observation)
        if k >= trajectory.prefix_turns:
            start, history = trajectory.start, trajectory.turns[:k]
            answer = rules.answer(start, history, turn.action, session)
            answer = answer or rules.words(start, history, turn.action, session)
            kind = contradiction(answer, turn, rules)
            if answer is None and rules.broken(start, history, turn, session):
                kind = Contradiction.INVARIANT
            if kind is None and not refused and turn.action in just_refused:
                kind = Contradiction.RETRIED
            found.append(kind)
        just_refused = just_refused | {turn.action} if refused else set()
    rules.release(session)
    return found


def contradiction_metrics(episodes: Sequence[Trajectory], rules: RuleSet) -> dict[str, Any]:
    """
    Returns:
        ``rate`` of turns that contradict their episode (with an interval over tasks), ``by_kind`` as shares of turns,
        and how many ``turns`` there were.
    """
    hits: list[bool] = []
    tasks: list[str] = []
    ids: list[str] = []
    kinds: Counter[str] = Counter()
    for episode in episodes:
        for kind in contradictions_of(episode, rules):
            hits.append(kind is not None)
            tasks.append(episode.task_id)
            ids.append(episode.id)
            if kind is not None:
                kinds[kind.value] += 1
    n = len(hits)
    return {
        "rate": proportion(hits, clusters(tasks, ids)).to_json(),
        "by_kind": {kind.value: kinds[kind.value] / n if n else 0.0 for kind in Contradiction},
        "turns": n,
    }
