"""A tiny flow, stage by stage: what it leaves is what a stage that met a fault must come to in the end."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_envs.store import TrajectoryStore
from tests.chaos.faulty import Done, Faulty

SETTINGS = (
    *("preset=tiny", "games.rooms=1", "games.objects=2", "games.quest_length=1", "collect.episodes=16"),
    *(
        "collect.heldout_episodes=2",
        "collect.workers=1",
        "collect.validation=0.3",
        "fit.steps=200",
        "clone.steps=10",
        "train.updates=3",
    ),
    *("train.groups=2", "train.group_size=3", "train.checkpoint_every=1", "evaluate.episodes=3"),
    *("evaluate.heldout_episodes=2", "dream.min_confidence=0", "dream.min_outcome_confidence=0"),
    *("dream.max_turns=3", "collect.max_turns=4", "evaluate.max_turns=3", "tripwires.enabled=false"),
)
# What is changed while a stage itself meets faults: later stages want a world model that was fitted for longer.
SHORTER = {"fit-world-model": ("fit.steps=10",)}
STAGES = ("collect", "fit-world-model", "clone", "train", "evaluate", "report")
# Depends on how long something took, or counts what a stopped stage had already spent.
_OF_THE_CLOCK = {
    "time",
    "wall_seconds",
    "real_seconds",
    "real_steps",
    "real_resets",
    "real_money",
    "dreamed_turns",
    "speed",
}
NAME = "tiny"


@dataclass(frozen=True)
class Flow:
    """
    Attributes:
        before: by stage, a folder as it is before it; under ``""`` as it is after the last.
    """

    faulty: Faulty
    place: Path
    before: dict[str, Path]

    def run(self, stage: str, root: Path, mode: str = "count", at: int = 0, more: Sequence[str] = ()) -> Done:
        words = [stage, f"run={NAME}", f"output={root}", *SETTINGS, *more]
        return self.faulty.run(words, root / NAME, mode, at)

    def copy(self, stage: str, name: str) -> Path:
        """A new folder of the run as it is before the stage; what was there under that name goes."""
        root = self.place / name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        if self.before[stage].exists():
            shutil.copytree(self.before[stage], root / NAME)
        return root


def play_through(faulty: Faulty, place: Path) -> Flow:
    flow, root = Flow(faulty, place, {}), place / "undisturbed"
    for stage in STAGES:
        flow.before[stage] = place / f"before-{stage}"
        if (root / NAME).exists():
            shutil.copytree(root / NAME, flow.before[stage])
        done = flow.run(stage, root)
        assert done.code == 0, f"{stage}: {done.err}"
    flow.before[""] = root / NAME
    one = min((root / NAME / "games").glob("*.z8"))  # to make a game takes seconds: one of two is there
    (flow.before["collect"] / "games").mkdir(parents=True)
    for path in one.parent.glob(f"{one.stem}.*"):
        shutil.copy(path, flow.before["collect"] / "games")
    return flow


def digests(folder: Path, *parts: str) -> dict[str, str]:
    """Of the files below some parts of a folder, without what a killed process left in a folder for drafts."""
    paths = [path for part in parts for path in (folder / part, *(folder / part).rglob("*")) if path.is_file()]
    paths = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def result(run: Path) -> dict[str, Any]:
    """What a run came to, without what depends on the clock or on how often it was stopped."""
    log = TrajectoryStore.open(run / "log")
    made: dict[str, Any] = {"log": sorted(log.read(), key=lambda t: t.id), "splits": dict(log.splits)}
    made |= digests(run, "models", "games", "tokenizer")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        text = (run / name).read_text() if (run / name).exists() else ""
        made[name] = [_timeless(json.loads(line)) for line in text.splitlines()]
    made["summary"] = _timeless(json.loads((run / "summary.json").read_text()))
    if (run / "report.md").exists():
        report = json.loads((run / "report.json").read_text())
        made["report"] = [report[key] for key in ("policy", "world_model", "optimism_gap", "notes")]
    return made


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in {*_OF_THE_CLOCK, "sha256"}}
