"""What an audit of a good world model finds, to be changed by tests."""

from __future__ import annotations

import copy
from typing import Any

from imagination.evaluation.verdict import targets, verdict
from imagination.settings import AuditSettings


def e(value: float | None, n: int = 100, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    interval = None if value is None else [value - 0.01 if low is None else low, value + 0.01 if high is None else high]
    return {"value": value, "n": n, "ci95": interval}


def one_set(about: str) -> dict[str, Any]:
    rates = {"precision": e(0.98), "recall": e(0.97), "accuracy": e(0.99)}
    bins = [
        {"low": 0.9, "high": 1.0, "n": 90, "confidence": 0.97, "right": 0.96},
        {"low": 0.1, "high": 0.2, "n": 10, "confidence": 0.15, "right": 0.1},
    ]
    calibration = {"ece": e(0.02), "confidence": 0.95, "right": 0.94, "bins": bins}
    wrong = {"observation": "<script>", "reward": 1.0, "terminated": True, "confidence": 0.9, "outcome_confidence": 1.0}
    example = {
        "episode": "e", "task": "tw-<1>", "turn": 1, "actions_before": ["look"], "action": "go <b>east</b>",
        "real": {"observation": "Hall", "reward": 0.0, "terminated": False}, "predicted": wrong,
    }  # fmt: skip
    group = {"group": "other_state", "title": "Another state: a wrong room", "n": 7, "share_of_wrong": 1.0}
    drift = {
        "n": 60, "first_divergence": {"0": 3, "1": 8}, "never": 49,
        "exact_at": {"1": e(0.95, 60), "2": e(0.85, 60), "3": e(0.7, 50)},
        "true_until": {"1": e(0.95, 60), "2": e(0.82, 60), "3": e(0.6, 50)},
    }  # fmt: skip
    return {
        "about": about, "n": 100, "episodes": 10, "tasks": 2, "new": {"exact": e(0.92), "text": e(0.94)}, "failed": 0,
        "exact": e(0.93), "text": e(0.94), "token_f1": e(0.96), "malformed": e(0.0),
        "by_step": {"0": e(0.99), "1": e(0.9)}, "by_changes": {"0": e(0.99), "8+": e(0.7)}, "by_task": {"t": e(0.93)},
        "reward": {**rates, "by_task": {"t": copy.deepcopy(rates)}}, "end": rates,
        "calibration": {"whole": calibration, "outcome": calibration, "deciding": calibration},
        "refusals": {"patterns": 3, "refused_too": e(0.95), "refused_in_its_words": e(0.9), "accepted_too": e(0.99)},
        "drift": drift, "behr": {"behr": e(-0.05), "absolute": e(0.1), "differing": 6},
        "failures": {"n": 100, "wrong": 7, "wrong_reward": 1, "groups": [{**group, "examples": [example]}]},
    }  # fmt: skip


def good() -> dict[str, Any]:
    """An audit in which everything is as it should be."""
    measures = {
        "dream": e(0.9), "guarded": e(0.8), "replay": e(0.9), "real": e(0.9), "gap": e(0.01), "guarded_gap": e(-0.1),
        "cr": e(1.0), "cr_pairwise": e(0.97),
    }  # fmt: skip
    ranks = {
        "policies": 10, "episodes_each": 60, "planned": 60, "spearman": e(0.97, 10), "kendall": e(0.9, 10),
        "mean_absolute_gap": e(0.02, 10),
    }  # fmt: skip
    abouts = {
        "held_out": "episodes of the log",
        "on_policy": "the actions of policy",
        "on_policies": "the actions of all policies",
    }
    return {
        "run": "demo", "world_model": {"name": "worldmodel", "version": "abc"}, "seeds": {"run": 0, "bootstrap": 0},
        "horizon": 12, "seconds": 12.0, "real_steps": 1000, "notes": [],
        "sets": {name: one_set(about) for name, about in abouts.items()},
        "sensitivity": {"states": 30, "sensitivity": e(0.97), "specificity": e(0.95)},
        "policies": [{"name": name, "n": 60, "failures": 0, **measures} for name in ("policy-clone", "policy")],
        "agreement": {"plain": {**ranks, "cr_pairwise": e(0.95)}, "guarded": ranks},
    }  # fmt: skip


def finished(found: dict[str, Any]) -> dict[str, Any]:
    settings = AuditSettings()
    return {**found, "verdict": verdict(found, settings), "targets": targets(found, settings)}
