"""What of a run is done, with which settings: read from its files, nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from imagination.runs.fingerprint import fingerprint
from imagination.settings import Config

STEPS = (
    *("collect", "fit_world_model", "refine_world_model", "reflect", "relabel", "clone", "fit_critic"),
    *("train", "evaluate"),
)
State = Literal["done", "other settings", "stopped", "not done"]


def summary(folder: Path) -> dict[str, Any]:
    """What the stages of a run noted; nothing for a new run."""
    path = folder / "summary.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def state(config: Config, folder: Path, stage: str) -> State:
    """Whether a stage was finished with these settings or with others, or was stopped on the way."""
    done = summary(folder).get("done", {}).get(stage)
    if done == fingerprint(config, stage):
        return "done"
    if (folder / "checkpoints" / f"{stage}.ckpt").exists():
        return "stopped"
    return "other settings" if done else "not done"
