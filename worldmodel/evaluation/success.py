"""Dreamed success beside real success: is the dream optimistic, and do its actions work in reality?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldmodel.evaluation.intervals import SHARE, clusters, estimate, proportion


@dataclass(frozen=True, slots=True)
class Triple:
    """One task and seed, played by one policy in the dream, replayed from there in reality, and played in reality.

    Attributes:
        policy: its name.
        task_id: what was played.
        seed: of the policy's chance, the same in dream and reality: with a perfect model both are one episode.
        dreamed: solved in the dream; ``None`` where an episode failed (malformed, crashed), which is no loss.
        replayed: solved by the dreamed actions in the real environment; ``None`` where there is no dream to replay.
        real: solved by the policy in the real environment.
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
    names = _clusters(whole)
    rows = [
        (float(t.dreamed or 0), float(t.replayed or 0), float(t.real or 0), float(bool(t.replayed and t.real)), 1.0)
        for t in whole
    ]
    guard_rows = [(float(t.guarded or 0), 0.0, float(t.real or 0), 0.0, 1.0) for t in guarded]
    return {
        "n": len(whole),
        "failures": len(triples) - len(whole),
        "dream": proportion([bool(t.dreamed) for t in whole], names).to_json(),
        "replay": proportion([bool(t.replayed) for t in whole], names).to_json(),
        "real": proportion([bool(t.real) for t in whole], names).to_json(),
        "guarded": proportion([bool(t.guarded) for t in guarded], _clusters(guarded)).to_json(),
        "gap": estimate(rows, names, gap, seed, bounds=(-1.0, 1.0)).to_json(),
        "guarded_gap": estimate(guard_rows, _clusters(guarded), gap, seed, bounds=(-1.0, 1.0)).to_json(),
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
