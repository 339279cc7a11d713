"""Does the model know when it is right? Confidence beside accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from worldmodel.evaluation.intervals import SHARE, Estimate, estimate

BINS = 10
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


def bin_of(confidence: float, bins: int = BINS) -> int:
    """Index of the bin; a bound belongs to the upper of its two bins, and 1 to the last."""
    return min(int(confidence * bins), bins - 1)


def _gap(total: np.ndarray) -> float | None:
    return float(np.abs(total[1:]).sum() / total[0]) if total[0] else None


def ece(pairs: Sequence[Pair], cluster: Sequence[str], seed: int, bins: int = BINS) -> Estimate:
    """``expected_calibration_error`` with its interval. Chance alone makes it positive, more so for few pairs."""
    return estimate([_row(pair, bins) for pair in pairs], cluster, _gap, seed, bounds=SHARE)


def reliability(pairs: Sequence[Pair], bins: int = BINS) -> list[dict[str, Any]]:
    """The reliability diagram, one entry for each bin that is not empty (DeGroot and Fienberg 1983).

    ``[{"low": 0.9, "high": 1.0, "n": 412, "confidence": 0.98, "right": 0.93}, ...]``
    """
    groups: dict[int, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(bin_of(pair[0], bins), []).append(pair)
    return [
        {
            "low": k / bins,
            "high": (k + 1) / bins,
            "n": len(groups[k]),
            "confidence": sum(c for c, _ in groups[k]) / len(groups[k]),
            "right": sum(r for _, r in groups[k]) / len(groups[k]),
        }
        for k in sorted(groups)
    ]
