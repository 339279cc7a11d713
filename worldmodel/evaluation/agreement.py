"""Dreamed success beside real success: is the dream optimistic, and do its actions work in reality?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldmodel.evaluation.intervals import SHARE, Interval, clusters, estimate, proportion


@dataclass(frozen=True, slots=True)
class Triple:
    """One task and seed, played by one policy in the dream, replayed from there in reality, and played in reality.

    With a perfect model dream and reality are one episode, as the seed is the same.

    Attributes:
        dreamed: solved in the dream; ``None`` where an episode failed (malformed, crashed), which is no loss.
        replayed: solved by the dreamed actions in the real environment; ``None`` where there is no dream to replay.
        guarded: solved in a dream that a guard ends, unsolved, where the model is unsure.
    """

    policy: str
    task_id: str
    seed: int
    dreamed: bool | None
    replayed: bool | None
    real: bool | None
    guarded: bool | None = None

    @property
    def whole(self) -> bool:
        return None not in (self.dreamed, self.replayed, self.real)


def success_metrics(triples: Sequence[Triple], seed: int) -> dict[str, Any]:
    """What the dream believed of one policy, and what was true.

    Shares solved: ``dream`` SR_wm, ``replay`` SR_w2r (the dreamed actions in reality), ``real`` SR_real. ``cr`` =
    SR_w2r / SR_real, the consistency ratio (Word2World, arXiv 2512.18832). ``cr_pairwise`` = of the pairs that were
    solved in reality, how many were solved by the dreamed actions as well (Pairwise Consistency Ratio, arXiv
    2604.13824). ``gap`` = SR_wm - SR_real, the optimism. Incomplete triples count as ``failures`` only; a failed
    guarded dream is left out of ``guarded``. Intervals of ratios and gaps: bootstrap over tasks, or over pairs where
    there are few tasks.
    """
    whole = [t for t in triples if t.whole]
    guarded = [t for t in whole if t.guarded is not None]
    names, guard_names = _clusters(whole), _clusters(guarded)
    rows = [list(map(float, map(bool, (t.dreamed, t.replayed, t.real, t.replayed and t.real, True)))) for t in whole]
    guard_rows = [list(map(float, map(bool, (t.guarded, False, t.real, False, True)))) for t in guarded]
    return {
        "n": len(whole),
        "failures": len(triples) - len(whole),
        "dream": proportion([bool(t.dreamed) for t in whole], names).to_json(),
        "replay": proportion([bool(t.replayed) for t in whole], names).to_json(),
        "real": proportion([bool(t.real) for t in whole], names).to_json(),
        "guarded": proportion([bool(t.guarded) for t in guarded], guard_names).to_json(),
        "gap": estimate(rows, names, gap, seed, bounds=(-1.0, 1.0)).to_json(),
        "guarded_gap": estimate(guard_rows, guard_names, gap, seed, bounds=(-1.0, 1.0)).to_json(),
        "cr": estimate(rows, names, consistency_ratio, seed, bounds=(0.0, math.inf)).to_json(),
        "cr_pairwise": estimate(rows, names, pairwise_ratio, seed, sum(bool(t.real) for t in whole), SHARE).to_json(),
    }


def _clusters(triples: Sequence[Triple]) -> Sequence[str]:
    return clusters([t.task_id for t in triples], [f"{t.task_id}/{t.seed}" for t in triples])


def gap(total: np.ndarray) -> float | None:
    """SR_wm - SR_real from the sums (dreamed, replayed, real, replayed and real, n)."""
    return float((total[0] - total[2]) / total[4]) if total[4] else None


def consistency_ratio(total: np.ndarray) -> float | None:
    """SR_w2r / SR_real; ``None`` where nothing was solved in reality."""
    return float(total[1] / total[2]) if total[2] else None


def pairwise_ratio(total: np.ndarray) -> float | None:
    """Of what was solved in reality, the share that the dreamed actions solve too."""
    return float(total[3] / total[2]) if total[2] else None


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
    a, b = (np.sign(np.subtract.outer(values, values)) for values in (np.asarray(x), np.asarray(y)))
    untied = float(np.abs(a).sum()) * float(np.abs(b).sum())
    return float((a * b).sum()) / untied**0.5 if untied else None


def agreement_metrics(triples: Sequence[Triple], seed: int, guarded: bool = False) -> dict[str, Any]:
    """Rank agreement over policies, the mean absolute optimism gap, and CR_pw over all of their episodes.

    A (task, seed) in which any policy has no complete triple is left out for all, so that policies stay comparable.
    Intervals: bootstrap over tasks (or over task and seed where there are few tasks). Noise makes the mean absolute gap
    positive and rank agreement smaller than 1 even for a model without bias.

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

    def over(statistic: Callable[[np.ndarray], float | None], n: int, bounds: Interval = (-1.0, 1.0)) -> dict[str, Any]:
        return estimate(rows, cluster, statistic, seed, n, bounds).to_json()

    solved = int(sum(sum(row[many : 2 * many]) for row in rows))
    result = {
        "policies": many,
        "episodes_each": len(rows),
        "planned": len({(t.task_id, t.seed) for t in triples}),
        "spearman": over(lambda total: spearman(*rates(total)), many),
        "kendall": over(lambda total: kendall_tau_b(*rates(total)), many),
        "mean_absolute_gap": over(mean_gap, many, SHARE),
    }
    return result if guarded else {**result, "cr_pairwise": over(pairwise, solved, SHARE)}
