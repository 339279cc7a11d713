"""A run folder: what a run wrote down, in files that survive it and that a report can be made of."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from imagination.runs.machine import processor
from imagination.settings import LoggerName, Strategy, UserError
from real_envs.files import read_json, read_text, write_atomically, write_json
from real_envs.trajectory import Trajectory


class RunFolder:
    """``outputs/<run>/`` with its log, models, checkpoints, metrics and rollouts.

    Files are appended to or replaced atomically; a stage that starts anew first drops what it wrote before.
    """

    def __init__(
        self,
        path: Path,
        seed: int,
        settings: str = "",
        logger: LoggerName = "none",
        strategy: Strategy = "ddp",
        activation_checkpointing: bool = False,
    ) -> None:
        self.path = path
        self.logger = logger  # of the metrics of its trainings, beside metrics.jsonl
        self.strategy, self.activation_checkpointing = strategy, activation_checkpointing  # of its trainings
        self.settings = settings  # fingerprint of the configuration: what a saved state may be gone on from with
        path.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        if not self.summary:
            packages = ("torch", "transformers", "lightning", "textworld")  # TextWorld is not installed on Windows
            versions = {package: version(package) for package in packages if find_spec(package)}
            hardware = f"{processor()}, {os.cpu_count()} cores"
            self.update({"seed": seed, "hardware": hardware, "versions": versions})

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def origin(self) -> Path:
        """The log of another run, of other tasks, from which this one began; most runs have none."""
        return self.path / "origin"

    @property
    def games(self) -> Path:
        return self.path / "games"

    def model(self, name: str) -> Path:
        """Folder of a Hugging Face checkpoint: ``worldmodel``, ``worldmodel-1``, ``policy-clone`` or ``policy``."""
        return self.path / "models" / name

    def training_state(self, stage: str) -> Path:
        """The Lightning checkpoint that a stopped stage goes on from."""
        return self.path / "checkpoints" / f"{stage}.ckpt"

    def training_states(self, stage: str) -> list[Path]:
        """Those of a stage, and of its members where it trains several models: ``fit_world_model-1``."""
        folder = self.path / "checkpoints"
        return [path for path in folder.glob(f"{stage}*.ckpt") if path.stem == stage or path.stem[len(stage)] == "-"]

    # numbers

    @property
    def summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def update(self, values: Mapping[str, Any]) -> None:
        """Merges ``values`` into ``summary.json``; nested dicts are merged key by key."""
        merged = _merge(self.summary, values)
        write_json(self.path / "summary.json", merged)

    def record(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """One line of ``metrics.jsonl``."""
        line = {"stage": stage, "step": step, "time": round(time.monotonic() - self._started, 3), **metrics}
        _append(self.path / "metrics.jsonl", json.dumps(line) + "\n")

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` that a stage wrote. Raises ``UserError``: one of them is no JSON."""
        return self._lines("metrics.jsonl", stage)

    def rollouts(self, stage: str) -> list[dict[str, Any]]:
        """The lines of ``rollouts.jsonl`` that a stage wrote, as ``metrics``."""
        return self._lines("rollouts.jsonl", stage)

    def _lines(self, name: str, stage: str) -> list[dict[str, Any]]:
        path = self.path / name
        text = read_text(path) if path.exists() else ""
        try:
            rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from error
        return [row for row in rows if row["stage"] == stage]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds of the block to ``wall_seconds[stage]``."""
        start = time.monotonic()
        try:
            yield
        finally:
            before = self.summary.get("wall_seconds", {}).get(stage, 0.0)
            self.update({"wall_seconds": {stage: round(before + time.monotonic() - start, 2)}})

    def forget(self, stage: str, from_step: int = 0) -> None:
        """Drops what a stage wrote from ``from_step`` on, because it is about to be written again."""
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            path = self.path / name
            if path.exists():
                lines = read_text(path).splitlines(keepends=True)
                kept = [line for line in lines if not _of(line, stage, from_step)]
                write_atomically(path, "".join(kept))
        if from_step == 0 and stage in self.summary.get("wall_seconds", {}):
            self.update({"wall_seconds": {stage: 0.0}})

    # episodes

    def add_rollouts(
        self, stage: str, trajectories: Sequence[Trajectory], twins: Mapping[str, str] | None = None, **labels: Any
    ) -> None:
        """Lines of ``rollouts.jsonl``; ``twins`` maps the id of a replay to that of the dream it replays."""
        lines = []
        for t in trajectories:
            row: dict[str, Any] = {"id": t.id, "stage": stage, **labels}
            if twins and t.id in twins:
                row["twin_of"] = twins[t.id]
            row |= {"task_id": t.task_id, "group_id": t.group_id, "source": t.source.value, "agent": t.agent}
            row |= {key: getattr(t, key) for key in ("seed", "policy_version", "world_model_version", "start")}
            row |= {"turns": [asdict(turn) for turn in t.turns], "stop": t.stop.value}
            row |= {"failure": t.failure, "prefix_turns": t.prefix_turns, "solved": t.solved}
            lines.append(json.dumps(row) + "\n")
        _append(self.path / "rollouts.jsonl", "".join(lines))


def _append(path: Path, lines: str) -> None:
    """Adds whole lines. The torn last line of a run that was killed goes; where the disk is full, nothing is added.
    Raises ``UserError``: the file is a link, which may lead out of the folder.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a link, and is not written through; put the file itself there")
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if file.read(1) not in (b"", b"\n"):
            file.seek(0)
            end = file.readall().rfind(b"\n") + 1
            file.truncate(end)
        rest = memoryview(lines.encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):  # a disk that has become read-only
                file.truncate(end)
            raise


def _of(line: str, stage: str, from_step: int) -> bool:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return True  # the torn last line of a run that was killed
    return bool(row.get("stage") == stage and row.get("step", from_step) >= from_step)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
