"""A calibration fitted on real turns, and what it is worth on others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from real_envs.streams import stream_seed
from worldmodel.calibration import Calibration, disagreement_of, fit_isotonic, fit_score
from worldmodel.evaluation.confidence import expected_calibration_error
from worldmodel.evaluation.transitions import Judged
from worldmodel.world_model import Prediction


def fit_calibration(judged: Sequence[Judged], temperature: float, goal: str = "") -> Calibration | None:
    """The maps for what was predicted of real turns; ``None`` where nothing was. ``goal``: see ``Calibration``."""
    seen = [(j.predicted, j.exact, j.outcome_right) for j in judged if j.predicted is not None]
    if not seen:
        return None
    score = fit_score([(p.confidence, disagreement_of(p), exact) for p, exact, _ in seen])
    return Calibration(
        score,
        fit_isotonic([(score(p.confidence, disagreement_of(p)), exact) for p, exact, _ in seen]),
        fit_isotonic([(p.outcome_confidence, right) for p, _, right in seen]),
        temperature,
        len(seen),
        goal,
    )


def calibration_metrics(judged: Sequence[Judged], folds: int = 5, seed: int = 0) -> dict[str, float | int | None]:
    """Expected calibration errors before and after, each turn mapped by a fit on the *other* episodes.

    Whole episodes are dealt to the folds, as turns of one episode share what is hard about it. ``None`` where there are
    fewer than two episodes, or no predictions.
    """
    episodes = sorted({j.trajectory_id for j in judged})
    random.Random(stream_seed("folds", seed)).shuffle(episodes)
    fold = {name: i % folds for i, name in enumerate(episodes)}
    raw: list[tuple[Judged, Prediction]] = [(j, j.predicted) for j in judged if j.predicted is not None]
    mapped: list[tuple[float, bool]] = []
    outcome: list[tuple[float, bool]] = []
    for k in range(folds):
        fit = fit_calibration([j for j in judged if fold[j.trajectory_id] != k], 0.0)
        for j, p in raw if fit is not None else ():
            if fold[j.trajectory_id] == k:
                assert fit is not None
                mapped.append((fit.probability(p), j.exact))
                outcome.append((fit.outcome_probability(p), j.outcome_right))
    return {
        "ece_before": expected_calibration_error([(p.confidence, j.exact) for j, p in raw]),
        "ece_after": expected_calibration_error(mapped),
        "outcome_ece_before": expected_calibration_error([(p.outcome_confidence, j.outcome_right) for j, p in raw]),
        "outcome_ece_after": expected_calibration_error(outcome),
        "right": sum(j.exact for j, _ in raw) / len(raw) if raw else None,
        "n": len(raw),
    }
