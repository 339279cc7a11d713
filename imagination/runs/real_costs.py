"""What playing in the real world cost a run, by stage: steps, seconds, what failed, and money where a step has a price.

``summary.json`` holds it as ``real_steps``, ``real_resets``, ``real_seconds``, ``real_failures`` (by kind) and, where
``env.price`` is set, ``real_cost``.
"""

from __future__ import annotations

from typing import Any

from imagination.runs.run_folder import RunFolder
from real_envs.interaction import PoolStats

KEYS = ("real_steps", "real_resets", "real_seconds", "real_failures", "real_cost")
FAILURES = ("crashes", "timeouts", "garbage")


def real_costs(stage: str, spent: PoolStats, price: float) -> dict[str, Any]:
    """As the summary has it.

    Example::

        real_costs("collect", PoolStats(steps=40, resets=8, seconds=2.5), price=0.01)["real_cost"]  # {"collect": 0.4}
    """
    found: dict[str, Any] = {
        "real_steps": {stage: spent.steps},
        "real_resets": {stage: spent.resets},
        "real_seconds": {stage: round(spent.seconds, 3)},
        "real_failures": {stage: {kind: getattr(spent, kind) for kind in FAILURES}},
    }
    return found | ({"real_cost": {stage: round(spent.steps * price, 6)}} if price else {})


def spent_before(run: RunFolder, stage: str) -> PoolStats:
    """What the summary says that a stage has spent; nothing where it says nothing."""
    summary = run.summary
    return PoolStats(
        steps=int(summary.get("real_steps", {}).get(stage, 0)),
        resets=int(summary.get("real_resets", {}).get(stage, 0)),
        seconds=float(summary.get("real_seconds", {}).get(stage, 0.0)),
        **summary.get("real_failures", {}).get(stage, {}),
    )
