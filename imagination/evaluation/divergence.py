"""How far two distributions of words or tokens are apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def jensen_shannon(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Jensen-Shannon divergence of two histograms over the same words, in bits: 0 (equal) to 1 (no word in common).

    ``H((p + q) / 2) - (H(p) + H(q)) / 2`` (Lin, IEEE Transactions on Information Theory 37, 1991, 145-151, eq. 4.1).

    Args:
        p, q: ``[words]`` counts or proportions; each is normalised here.

    Raises:
        ValueError: shapes disagree, or one is empty.
    """
    if p.shape != q.shape or p.sum() <= 0 or q.sum() <= 0:
        raise ValueError(f"two histograms over the same words are needed, got {p.shape} and {q.shape}, or one is empty")
    p, q = p / p.sum(), q / q.sum()
    return float(max(_entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2, 0.0))


def _entropy(p: NDArray[np.float64]) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())
