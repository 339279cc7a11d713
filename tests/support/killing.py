"""A run that is stopped somewhere, and whether two runs came to the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from imagination.runs.run_folder import RunFolder


class Killed(RuntimeError):
    """Stands for whatever ends a process."""


def kill_at(monkeypatch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    honest = RunFolder.record

    def record(self: RunFolder, at: str, number: int, metrics: Mapping[str, float]) -> None:
        if at == stage and number >= step:
            raise Killed
        honest(self, at, number, metrics)

    monkeypatch.setattr(RunFolder, "record", record)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def assert_same_model(a: Path, b: Path) -> None:
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def metrics_of(folder: Path, stage: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time"} for row in rows if row["stage"] == stage]


def moved(folder: Path) -> float:
    """Largest change of a weight from the clone to the policy."""
    before, after = (load_file(folder / "models" / name / "model.safetensors") for name in ("policy-clone", "policy"))
    return max(float((after[name] - before[name]).abs().max()) for name in before)


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))
