"""Does the model know when it is right? Confidence beside accuracy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from real_envs.grouping import grouped
from real_envs.seeding import derive_seed
from worldmodel.calibration import Calibration, fit_isotonic, fit_score
from worldmodel.evaluation.intervals import SHARE, Estimate, estimate
from worldmodel.world_model import Prediction

if TYPE_CHECKING:  # transitions reads this module
    from worldmodel.evaluation.transitions import Judged

BINS = 10
_FOLDS = 5
Pair = tuple[float, bool]  # confidence, whether it was right


def expected_calibration_error(pairs: Sequence[Pair], bins: int = BINS) -> float | None:
    """Mean gap between confidence and accuracy over equal-width bins, weighted by size (Naeini et al. 2015)."""
    if not pairs:
        return None
    return _gap(np.sum([_row(pair, bins) for pair in pairs], axis=0))


def _row(pair: Pair, bins: int) -> list[float]:
    """What a prediction adds to the sums: count, then per bin its confidence less its rightness."""
    row = [1.0, *[0.0] * bins]
    row[1 + bin_of(pair[0], bins)] = pair[0] - pair[1]
    return row


def bin_of(confidence: float, bins: int) -> int:
    """Index of the bin; a bound belongs to the upper of its two bins, and 1 to the last."""
    return min(int(confidence * bins), bins - 1)


def _gap(total: np.ndarray) -> float | None:
    return float(np.abs(total[1:]).sum() / total[0]) if total[0] else None


def ece(pairs: Sequence[Pair], cluster: Sequence[str], seed: int) -> Estimate:
    """``expected_calibration_error`` with its interval. Chance alone makes it positive, more so for few pairs."""
    return estimate([_row(pair, BINS) for pair in pairs], cluster, _gap, seed, bounds=SHARE)


def reliability(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The reliability diagram, ``[{"low": 0.9, "high": 1.0, "n": 412, "confidence": 0.98, "right": 0.93}, ...]``.

    DeGroot and Fienberg 1983; empty bins are left out.
    """
    groups = grouped(pairs, lambda pair: bin_of(pair[0], BINS))
    return [
        {
            "low": k / BINS,
            "high": (k + 1) / BINS,
            "n": len(groups[k]),
            "confidence": sum(c for c, _ in groups[k]) / len(groups[k]),
            "right": sum(r for _, r in groups[k]) / len(groups[k]),
        }
        for k in sorted(groups)
    ]


def fit_calibration(judged: Sequence[Judged], temperature: float, goal: str = "") -> Calibration | None:
    """The maps for what was predicted of real turns; ``None`` where nothing was. ``goal``: see ``Calibration``."""
    seen = [(j.predicted, j.exact, j.outcome_right) for j in judged if j.predicted is not None]
    if not seen:
        return None
    score = fit_score([(p.confidence, p.disagreement, exact) for p, exact, _ in seen])
    return Calibration(
        score,
        fit_isotonic([(score(p.confidence, p.disagreement), exact) for p, exact, _ in seen]),
        fit_isotonic([(p.outcome_confidence, right) for p, _, right in seen]),
        temperature,
        len(seen),
        goal,
    )


def calibration_metrics(judged: Sequence[Judged]) -> dict[str, float | int | None]:
    """Expected calibration errors before and after, each turn mapped by a fit on the *other* episodes.

    Whole episodes are dealt to the folds, as turns of one episode share what is hard about it. ``None`` where there are
    fewer than two episodes, or no predictions.
    """
    episodes = sorted({j.trajectory_id for j in judged})
    random.Random(derive_seed("folds", 0)).shuffle(episodes)
    fold = {name: i % _FOLDS for i, name in enumerate(episodes)}
    raw: list[tuple[Judged, Prediction]] = [(j, j.predicted) for j in judged if j.predicted is not None]
    mapped: list[Pair] = []
    outcome: list[Pair] = []
    for k in range(_FOLDS):
        if (fit := fit_calibration([j for j in judged if fold[j.trajectory_id] != k], 0.0)) is not None:
            own = [(j, p) for j, p in raw if fold[j.trajectory_id] == k]
            mapped += [(fit.probability(p), j.exact) for j, p in own]
            outcome += [(fit.outcome_probability(p), j.outcome_right) for j, p in own]
    return {
        "ece_before": expected_calibration_error([(p.confidence, j.exact) for j, p in raw]),
        "ece_after": expected_calibration_error(mapped),
        "outcome_ece_before": expected_calibration_error([(p.outcome_confidence, j.outcome_right) for j, p in raw]),
        "outcome_ece_after": expected_calibration_error(outcome),
        "right": sum(j.exact for j, _ in raw) / len(raw) if raw else None,
        "n": len(raw),
    }
