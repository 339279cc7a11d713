"""Conjunctions of at most three conditions under which an answer is right, by counting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PRECISION = 0.99  # least, at the lower end of the interval
_Z = 1.6449  # one-sided 95 %
_CONDITIONS = 60  # the most telling ones, from which pairs and triples are made
_BEAM = 40
_COST = 0.9  # what a further condition must be worth: a longer rule has to answer a ninth more turns
_TRIES = 40


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
class Found:
    """A conjunction that holds what was asked of it.

    Attributes:
        literals: (column, negated).
        covers: the turns to which it applies.
        gain: the turns that it answers and nothing before did, less for each condition.
        turns, exceptions, held_turns, held_exceptions: see ``Rule``.
    """

    literals: tuple[tuple[int, bool], ...]
    covers: np.ndarray
    gain: float
    turns: int
    exceptions: int
    held_turns: int
    held_exceptions: int


def find_conjunctions(
    table: np.ndarray, right: np.ndarray, here: np.ndarray, covered: np.ndarray, held: np.ndarray, least: int
) -> Found | None:
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
    if fit.sum() < least:
        return None
    literals = np.hstack([table, ~table])[fit]
    y, new = right[fit], (right & ~covered)[fit]
    n_conditions = table.shape[1]
    ranked = _telling(literals, y)
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
        there, mine = covers & held, covers & ~held
        held_right = int((there & right).sum())
        if lower_bound(held_right, int(there.sum())) >= PRECISION:
            return Found(
                named,
                covers,
                gain,
                int(mine.sum()),
                int((mine & ~right).sum()),
                int(there.sum()),
                int(there.sum()) - held_right,
            )
    return None


def _telling(literals: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Columns that differ, those that tell right from wrong best first (by the difference of their shares)."""
    X = literals.astype(np.float32)
    positives, negatives = max(1.0, float(y.sum())), max(1.0, float((~y).sum()))
    by_right, by_wrong = X.T @ y.astype(np.float32) / positives, X.T @ (~y).astype(np.float32) / negatives
    _, first = np.unique(literals, axis=1, return_index=True)  # of columns that are the same, one
    kept = np.sort(first)
    kept = kept[by_right[kept] > 0]
    return kept[np.argsort(-(by_right - by_wrong)[kept], kind="stable")][:_CONDITIONS]
