"""Conjunctions of at most three conditions under which an answer is right, by counting."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from real_envs.trajectory import Trajectory

if TYPE_CHECKING:  # conditions are about episodes, whose language is found with these counts
    from worldmodel.rules.conditions import Condition, Rule
    from worldmodel.rules.invariants import Invariant

Claim = TypeVar("Claim", "Rule", "Invariant")
LEAST_TURNS = 30  # that a rule must answer in the half that it is found in
PRECISION = 0.99  # least, at the lower end of the interval
_Z = 1.6449  # one-sided 95 %
_CONDITIONS = 60  # the most informative ones, from which pairs and triples are made
_SINGLES = 6  # most promising ones, beside which others are looked for
_COMPANIONS = 6  # most informative ones where one of these holds
_BEAM = 40
_COST = 0.9  # what a further condition must be worth: a longer rule has to answer a ninth more turns
_TRIES = 40
_FEW_TASKS = 10


def judging_half(log: Sequence[Trajectory]) -> set[str]:
    """Ids of the episodes that rules are judged by: those of half of the tasks, of half of all where tasks are few."""
    few = len({t.task_id for t in log}) < _FEW_TASKS

    def side(name: str) -> bool:
        return hashlib.sha256(name.encode()).digest()[0] % 2 == 1

    return {t.id for t in log if side(t.id if few else t.task_id)}


def lower_bound(right: float, turns: float) -> float:
    """Lower end of the one-sided 95 % Wilson score interval of a share (Wilson 1927; Brown et al. 2001, eq. 4).

    >>> round(lower_bound(268, 268), 4)
    0.99
    """
    if not turns:
        return 0.0
    p, z2 = right / turns, _Z * _Z
    centre = p + z2 / (2 * turns)
    return float((centre - _Z * np.sqrt(p * (1 - p) / turns + z2 / (4 * turns * turns))) / (1 + z2 / turns))


@dataclass(frozen=True)
class Conjunction:
    """A conjunction that holds what was asked of it."""

    literals: tuple[tuple[int, bool], ...]  # (column, negated)
    covers: np.ndarray
    gain: float  # the turns that it answers and nothing before did, less for each condition
    turns: int
    exceptions: int
    held_turns: int
    held_exceptions: int

    def proves(self, claim: Claim, conditions: Sequence[Condition]) -> Claim:
        """The claim under these conditions, with the counts; ``conditions`` are those of the columns."""
        return replace(
            claim,
            conditions=tuple(replace(conditions[k], negated=negated) for k, negated in self.literals),
            turns=self.turns,
            exceptions=self.exceptions,
            held_turns=self.held_turns,
            held_exceptions=self.held_exceptions,
        )


def conjunctions(
    table: np.ndarray, right: np.ndarray, here: np.ndarray, covered: np.ndarray, held: np.ndarray, least: int
) -> Iterator[Conjunction]:
    """All that ``find_conjunctions`` finds one after the other; ``covered`` grows by the turns of each."""
    while (best := find_conjunctions(table, right, here, covered, held, least)) is not None:
        covered |= best.covers
        yield best


def find_conjunctions(
    table: np.ndarray, right: np.ndarray, here: np.ndarray, covered: np.ndarray, held: np.ndarray, least: int
) -> Conjunction | None:
    """The conjunction that answers most turns that are not answered yet, and holds on the other half.

    Args:
        table: ``[turns, conditions]``, which hold.
        right: ``[turns]``, the answer is right.
        here: ``[turns]``, there is an answer.
        covered: ``[turns]``, answered already.
        held: ``[turns]``, of the half that it is judged by.
        least: turns that it must answer in the other half.
    """
    fit = here & ~held
    if fit.sum() < least or (right & ~covered)[fit].sum() < least:
        return None
    literals = np.hstack([table, ~table])[fit]
    y, new = right[fit], (right & ~covered)[fit]
    n_conditions = table.shape[1]
    ranked = _candidates(literals, y, new)
    X = literals[:, ranked].astype(np.float32)
    candidates: list[tuple[float, tuple[int, ...]]] = []

    def offer(gain: float, turns: float, hits: float, chosen: tuple[int, ...]) -> None:
        if turns >= least and gain >= least and hits >= (1 - (1 - PRECISION) / 2) * turns:
            candidates.append((gain * _COST ** len(chosen), chosen))

    offer(float(new.sum()), len(y), float(y.sum()), ())
    singles = X.sum(0), X.T @ y, X.T @ new
    for k in range(len(ranked)):
        offer(singles[2][k], singles[0][k], singles[1][k], (k,))
    pairs = X.T @ X, (X * y[:, None]).T @ X, (X * new[:, None]).T @ X
    rows, cols = np.triu_indices(len(ranked), 1)
    for i, j in zip(rows.tolist(), cols.tolist(), strict=True):
        if pairs[2][i, j] >= least:
            offer(pairs[2][i, j], pairs[0][i, j], pairs[1][i, j], (i, j))
    # triples grow from the pairs that answer most for the errors they make
    score = pairs[2][rows, cols] - 3 * (pairs[0] - pairs[1])[rows, cols]
    for index in np.argsort(-score)[:_BEAM]:
        one, other = int(rows[index]), int(cols[index])
        both = X[:, one] * X[:, other]
        turns, hits, gains = both @ X, (both * y) @ X, (both * new) @ X
        for k in np.flatnonzero(gains >= least).tolist():
            if k not in (one, other):
                offer(gains[k], turns[k], hits[k], (one, other, k))
    candidates.sort(key=lambda item: (-item[0], len(item[1]), item[1]))
    for gain, chosen in candidates[:_TRIES]:
        picked = [int(ranked[k]) for k in chosen]
        named = tuple((k % n_conditions, k >= n_conditions) for k in picked)
        covers = here.copy()
        for k, negated in named:
            covers &= ~table[:, k] if negated else table[:, k]
        there, fitted = covers & held, covers & ~held
        held_right = int((there & right).sum())
        if lower_bound(held_right, int(there.sum())) >= PRECISION:
            return Conjunction(
                named,
                covers,
                gain,
                int(fitted.sum()),
                int((fitted & ~right).sum()),
                int(there.sum()),
                int(there.sum()) - held_right,
            )
    return None


def _candidates(literals: np.ndarray, y: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The columns that tell most on all turns, and those that tell most where one of the most promising ones holds.

    Which way a command goes says nothing of whether it is refused, and all where the text names no such way.
    """
    ranked = _informative(literals, y)[:_CONDITIONS]
    X = literals[:, ranked].astype(np.float32)
    score = X.T @ new - 3 * (X.T @ ~y)
    chosen = dict.fromkeys(ranked.tolist())
    for k in ranked[np.argsort(-score, kind="stable")][:_SINGLES]:
        where = literals[:, k]
        if y[where].any() and not y[where].all():
            chosen |= dict.fromkeys(_informative(literals[where], y[where])[:_COMPANIONS].tolist())
    return np.array(list(chosen), dtype=int)


def _informative(literals: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Columns that differ, those that tell right from wrong best first (by the difference of their shares)."""
    X = literals.astype(np.float32)
    positives, negatives = max(1.0, float(y.sum())), max(1.0, float((~y).sum()))
    by_right, by_wrong = X.T @ y.astype(np.float32) / positives, X.T @ (~y).astype(np.float32) / negatives
    kept = distinct_columns(literals)
    kept = kept[by_right[kept] > 0]
    return kept[np.argsort(-(by_right - by_wrong)[kept], kind="stable")]


def distinct_columns(table: np.ndarray) -> np.ndarray:
    """Of columns that are the same, the first. By their bytes: ``np.unique`` would sort them."""
    first: dict[bytes, int] = {}
    for k, column in enumerate(np.ascontiguousarray(table.T)):
        first.setdefault(column.tobytes(), k)
    return np.array(list(first.values()), dtype=int)
