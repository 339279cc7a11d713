"""Does the dream rank policies as reality does? If so, it can choose between checkpoints without a real step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from worldmodel.evaluation.intervals import Estimate, bootstrap, clusters, sums_by_cluster
from worldmodel.evaluation.success import Triple


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of their ranks.

    >>> ranks([0.3, 0.1, 0.3])
    [2.5, 1.0, 2.5]
    """
    order = sorted(values)
    return [order.index(v) + (order.count(v) + 1) / 2 for v in values]


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks (Spearman 1904, with mean ranks for ties); ``None`` if either is constant."""
    a, b = np.asarray(ranks(x)), np.asarray(ranks(y))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(np.clip(a @ b / scale, -1, 1)) if scale else None


def kendall_tau_b(x: Sequence[float], y: Sequence[float]) -> float | None:
    """(concordant - discordant) / sqrt((pairs not tied in x) (pairs not tied in y)); ``None`` if either is constant.

    Kendall, Biometrika 33 (1945) 239-251.
    """
    score = untied_x = untied_y = 0
    for i in range(len(x)):
        for j in range(i):
            a, b = _sign(x[i] - x[j]), _sign(y[i] - y[j])
            score += a * b
            untied_x += a != 0
            untied_y += b != 0
    return score / (untied_x * untied_y) ** 0.5 if untied_x and untied_y else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def agreement_metrics(triples: Sequence[Triple], seed: int, guarded: bool = False) -> dict[str, Any]:
    """Rank agreement over policies, the mean absolute optimism gap, and CR_pw over all of their episodes.

    Every policy must have played the same tasks and seeds. A (task, seed) in which any policy has no complete triple is
    left out for all, so that policies stay comparable. Intervals: bootstrap over tasks (or over task and seed where
    there are few tasks); the set of policies is taken as it is. Noise makes the mean absolute gap positive and rank
    agreement smaller than 1 even for a model without bias.

    Args:
        guarded: compare guarded dreams instead of plain ones.

    Returns:
        ``n`` of each rank statistic is the number of policies; ``episodes_each`` of ``planned`` are compared.
    """
    policies = list(dict.fromkeys(t.policy for t in triples))
    table: dict[tuple[str, int], dict[str, Triple]] = {}
    for t in triples:
        if t.whole and not (guarded and t.guarded is None):
            table.setdefault((t.task_id, t.seed), {})[t.policy] = t
    common = {key: row for key, row in table.items() if len(row) == len(policies)}
    rows = []
    for row in common.values():
        believed = [row[p].guarded if guarded else row[p].dreamed for p in policies]
        real = [row[p].real for p in policies]
        both = sum(bool(row[p].real and row[p].replayed) for p in policies)
        rows.append([*map(float, map(bool, believed)), *map(float, map(bool, real)), float(both), 1.0])
    many = len(policies)

    def rates(total: np.ndarray) -> tuple[list[float], list[float]]:
        # rounded: sums of ones are exact, but their quotients must tie where the sums do
        shares = (total / total[-1]).round(9).tolist()
        return shares[:many], shares[many : 2 * many]

    def mean_gap(total: np.ndarray) -> float | None:
        dream, real = rates(total)
        return float(np.abs(np.subtract(dream, real)).mean())

    def pairwise(total: np.ndarray) -> float | None:
        solved = total[many : 2 * many].sum()
        return float(total[-2] / solved) if solved else None

    cluster = clusters([task for task, _ in common], [f"{task}/{seed}" for task, seed in common])

    def over(statistic: Callable[[np.ndarray], float | None], n: int) -> dict[str, Any]:
        if not rows:
            return Estimate(None, n).to_json()
        sums = sums_by_cluster(rows, cluster)
        value = statistic(sums.sum(0))
        return Estimate(value, n, None if value is None else bootstrap(sums, statistic, seed, (-1.0, 1.0))).to_json()

    solved = int(sum(sum(row[many : 2 * many]) for row in rows))
    result = {
        "policies": many,
        "episodes_each": len(rows),
        "planned": len({(t.task_id, t.seed) for t in triples}),
        "spearman": over(lambda total: spearman(*rates(total)), many),
        "kendall": over(lambda total: kendall_tau_b(*rates(total)), many),
        "mean_absolute_gap": over(mean_gap, many),
    }
    return result if guarded else {**result, "cr_pairwise": over(pairwise, solved)}
