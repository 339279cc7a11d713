"""Calibration: from the world model's own probabilities to those of being right.

A map is fitted (``worldmodel.evaluation.calibration``) on predictions of real turns that no model was trained on, once
for the whole prediction and once for its outcome (reward and end). It is stored as ``calibration.json`` beside
the weights that it belongs to.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from real_envs.files import read_json, write_json
from worldmodel.world_model import Prediction

FILE = "calibration.json"
_TINY = 1e-12  # a probability of a hundred tokens underflows; its logarithm must not
_STEPS = 500  # of gradient ascent


@dataclass(frozen=True, slots=True)
class Isotonic:
    """A map that never falls: knots ``(x, y)``, linear between them and constant outside.

    Raises:
        ValueError: the knots are none, not of one length, or not in order.

    Example::

        Isotonic((0.2, 0.8), (0.1, 0.9))(0.5)  # 0.5
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a <= b for a, b in pairwise(self.x)) and all(a <= b for a, b in pairwise(self.y))
        if not self.x or len(self.x) != len(self.y) or not rising:
            raise ValueError(f"an isotonic map needs as many rising x as rising y, got {self.x} and {self.y}")

    def __call__(self, raw: float) -> float:
        right = bisect.bisect_right(self.x, raw)
        if right == 0:
            return self.y[0]
        if right == len(self.x):
            return self.y[-1]
        (x0, x1), (y0, y1) = self.x[right - 1 : right + 1], self.y[right - 1 : right + 1]
        return y0 + (y1 - y0) * (raw - x0) / (x1 - x0)


def fit_isotonic(pairs: Sequence[tuple[float, bool]]) -> Isotonic:
    """The non-decreasing map of least squared error from a score to the share that is right.

    Pool adjacent violators (Ayer, Brunk, Ewing, Reid and Silverman, Annals of Mathematical Statistics 26, 1955,
    641-647): equal scores are one block; a block whose mean is not above that of the block before it joins that block.
    As calibration: Zadrozny and Elkan, KDD 2002. The result does not depend on the order of ``pairs``.

    Raises:
        ValueError: there are no pairs.
    """
    if not pairs:
        raise ValueError("an isotonic map needs at least one pair of a score and whether it was right")
    sums: dict[float, list[int]] = {}
    for score, hit in pairs:
        at = sums.setdefault(score, [0, 0])
        at[0] += hit
        at[1] += 1
    blocks: list[tuple[float, float, int, int]] = []  # first score, last score, right, all
    for score in sorted(sums):
        right, n = sums[score]
        low = high = score
        while blocks and blocks[-1][2] * n >= right * blocks[-1][3]:  # mean before >= mean here, without rounding
            low, _, right_before, n_before = blocks.pop()
            right, n = right + right_before, n + n_before
        blocks.append((low, high, right, n))
    x: list[float] = []
    y: list[float] = []
    for low, high, right, n in blocks:
        x += [low] if low == high else [low, high]
        y += [right / n] * (1 if low == high else 2)
    return Isotonic(tuple(x), tuple(y))


@dataclass(frozen=True, slots=True)
class Score:
    """One number from the model's own probability and, where it has one, its disagreement; higher is likelier right.

    ``sure * logit(confidence) - unsure * disagreement``, both weights at least 0, as a logistic regression found them
    (Platt 1999, with a second input). ``unsure`` of 0 leaves the order of the probabilities as it is.
    """

    sure: float = 1.0
    unsure: float = 0.0

    def __call__(self, confidence: float, disagreement: float | None) -> float:
        if self.unsure == 0 or disagreement is None:
            return confidence
        z = self.sure * _logit(confidence) - self.unsure * disagreement
        return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


def _logit(p: float) -> float:
    p = min(max(p, _TINY), 1 - 1e-9)
    return math.log(p) - math.log1p(-p)


def fit_score(seen: Sequence[tuple[float, float | None, bool]]) -> Score:
    """Weights of a logistic regression of *right* on probability and disagreement, by projected gradient ascent.

    The identity where any disagreement is missing, where all disagree alike, or where more disagreement does not go
    with more errors.
    """
    known = [d for _, d, _ in seen if d is not None]
    if len(known) < len(seen) or len(set(known)) < 2:
        return Score()
    inputs = np.array([[_logit(c), -d] for (c, _, _), d in zip(seen, known, strict=True)])  # [n, 2]
    right = np.array([r for _, _, r in seen], dtype=float)
    scale = np.sqrt((inputs**2).mean(axis=0))
    scale[scale == 0] = 1.0
    inputs /= scale
    weights, bias = np.array([0.5, 0.0]), 0.0
    for _ in range(_STEPS):
        error = right - 1 / (1 + np.exp(-np.clip(inputs @ weights + bias, -500, 500)))
        weights = np.maximum(weights + error @ inputs / len(right), 0.0)
        bias += float(error.mean())
    sure, unsure = (float(w) for w in weights / scale)
    return Score(sure, unsure) if unsure > 0 else Score()


@dataclass(frozen=True, slots=True)
class Calibration:
    """Probabilities of being right."""

    score: Score  # what orders whole predictions
    exact: Isotonic  # from that score to the probability that observation, reward and end are all right
    outcome: Isotonic  # from ``Prediction.outcome_confidence`` to the probability that reward and end are right
    temperature: float  # at which the predictions were made that it was fitted on
    n: int
    # the pattern of the declared goal that rewards and ends were judged by; empty where they were the log's
    goal: str = ""

    def probability(self, prediction: Prediction) -> float:
        return self.exact(self.score(prediction.confidence, prediction.disagreement))

    def outcome_probability(self, prediction: Prediction) -> float:
        return self.outcome(prediction.outcome_confidence)

    def save(self, folder: Path) -> None:
        data = {
            "score": {"sure": self.score.sure, "unsure": self.score.unsure},
            "exact": {"x": self.exact.x, "y": self.exact.y},
            "outcome": {"x": self.outcome.x, "y": self.outcome.y},
            "temperature": self.temperature,
            "n": self.n,
            "goal": self.goal,
        }
        write_json(folder / FILE, data)

    @classmethod
    def load(cls, folder: Path) -> Calibration | None:
        """``None`` where there is none: a model that nobody calibrated. Raises ``UserError``: the file is damaged."""
        path = folder / FILE
        if not path.exists():
            return None
        data = read_json(path)
        maps = {name: Isotonic(tuple(data[name]["x"]), tuple(data[name]["y"])) for name in ("exact", "outcome")}
        return cls(
            Score(**data["score"]),
            maps["exact"],
            maps["outcome"],
            float(data["temperature"]),
            int(data["n"]),
            str(data.get("goal", "")),
        )
