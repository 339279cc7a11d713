"""Did dreams like these make policies better in reality? An audit's numbers beside the runs of ``make fidelity``.

``forecast.json`` beside this file holds those runs::

    {"command": "make fidelity",
     "best": {"clone": {"measure": "reward_precision", "worlds": {"babyai": {"spearman": 0.6, "ci95": [0.4, 0.8]}}}},
     "runs": [{"world": "babyai", "variant": "reward-30", "seed": 0, "gain": -0.05, "clone": {"gap": 0.4, ...}, ...}]}

``gain`` is success on held-out tasks after training in dreams minus before, in reality. ``clone`` and ``trained`` are
the measures of below, on the actions of the policy before training and after it; ``best`` is for each the one whose
rank correlation with the gain has an interval of the right sign in every world, and among these the surest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from worldmodel.evaluation.proportions import interval, number

NEAREST = 15  # runs that a forecast looks at; from fewer than that nothing is said
CLONES = ("policy-clone", "clone-")  # how names of policies begin that have not learned in dreams yet


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of an audit that may tell whether its dreams teach."""

    key: str
    title: str
    path: tuple[str, ...]  # in ``audit.json``; ``last`` is the last policy's
    better: int = 1  # or -1 where less is better


_OWN = ("sets", "on_policy")
MEASURES = (
    Measure("exact_own", "exact match, own actions", (*_OWN, "exact")),
    Measure("reward_precision", "reward precision, own actions", (*_OWN, "reward", "precision")),
    Measure("reward_precision_sampled", "the same, as dreams sample", (*_OWN, "sampled", "reward", "precision")),
    Measure("reward_recall", "reward recall, own actions", (*_OWN, "reward", "recall")),
    Measure("gap", "optimism gap", ("last", "gap"), better=-1),
    Measure("cr_pairwise", "CR pairwise", ("last", "cr_pairwise")),
    Measure("contradictions", "dreamed turns that contradict their dream", ("contradictions", "rate"), better=-1),
    Measure("confidence", "mean confidence, own actions", (*_OWN, "calibration", "whole", "confidence")),
)
NAMED = {"reward_precision_sampled": "reward precision as dreams sample, own actions"}  # where it stands alone


def measures_of(audit: Mapping[str, Any]) -> dict[str, float | None]:
    """The measures by key, from what ``audit.json`` holds; ``None`` where it lacks one."""
    policies = audit.get("policies") or [{}]
    return {measure.key: _at({**audit, "last": policies[-1]}, (*measure.path, "value")) for measure in MEASURES}


def _at(audit: Any, path: tuple[str, ...]) -> float | None:
    for key in path:
        if not isinstance(audit, Mapping):
            break  # a mean, which stands there without n and interval
        audit = audit.get(key)
    return None if audit is None else float(audit)


def shipped() -> dict[str, Any]:
    """``forecast.json``."""
    return dict(json.loads(files("imagination.evaluation").joinpath("forecast.json").read_text(encoding="utf-8")))


def forecast(
    audit: Mapping[str, Any], known: Mapping[str, Any] | None = None, least_n: int = 0
) -> dict[str, Any] | None:
    """What came of the runs whose dreams were most like these by the measure that tells in every world of the file.

    Args:
        audit: what ``audit.json`` holds.
        known: in place of the file of this package.
        least_n: of the turns that the measure was taken on.

    Returns:
        ``sentence`` ('Dreams like these raised real success by 0.05 to 0.31 in 14 of 15 runs of ...'), ``measure``,
        ``value``, ``runs`` (how many it looked at), ``raised`` (in how many of them success rose) and ``gain`` (the
        least and the largest rise; ``None`` without any). ``None`` where the audit lacks the measure, or
        has it of too few turns, or fewer than ``NEAREST`` runs have it.
    """
    known = shipped() if known is None else known
    policies = audit.get("policies") or [{"name": ""}]
    name = Path(str(policies[-1]["name"])).name  # of folders that are called alike, the name is a path
    which = "clone" if name.startswith(CLONES) else "trained"
    best = known.get("best", {}).get(which)
    if best is None:
        return None
    key = best["measure"]
    value = measures_of(audit)[key]
    runs = [run for run in known["runs"] if run[which].get(key) is not None]
    path = next(measure.path for measure in MEASURES if measure.key == key)
    of = (*path[:-1], "ece") if key == "confidence" else path  # a mean has no n of its own
    few = path[0] == "sets" and (_at(audit, (*of, "n")) or 0) < least_n
    if value is None or few or len(runs) < NEAREST:
        return None
    nearest = sorted(runs, key=lambda run: abs(run[which][key] - value))[:NEAREST]
    rises = [run["gain"] for run in nearest if run["gain"] > 0]
    result = {
        "measure": key,
        "value": value,
        "runs": len(nearest),
        "raised": len(rises),
        "gain": [min(rises), max(rises)] if rises else None,
    }
    there = [run[which][key] for run in nearest]
    return {"sentence": _sentence(result, (min(there), max(there)), best, known), **result}


def _sentence(
    result: Mapping[str, Any], there: tuple[float, float], best: Mapping[str, Any], known: Mapping[str, Any]
) -> str:
    key, value = result["measure"], result["value"]
    title = NAMED.get(key) or next(measure.title for measure in MEASURES if measure.key == key)
    rise = "did not raise real success in any"
    if result["raised"]:
        low, high = result["gain"]
        rise = f"raised real success by {number(low)} to {number(high)} in {result['raised']}"
    beyond = "" if there[0] <= value <= there[1] else ", none like it"
    ranks = " and ".join(f"{number(w['spearman'])} {interval(w['ci95'])} in {n}" for n, w in best["worlds"].items())
    worlds = " and ".join(best["worlds"])
    return (
        f"Dreams like these {rise} of {result['runs']} runs of {worlds} ({title} {number(value)}, there "
        f"{number(there[0])} to {number(there[1])}{beyond}; its rank correlation with the gain is {ranks}; "
        f"{known['command']}). In another world that is a guess."
    )
