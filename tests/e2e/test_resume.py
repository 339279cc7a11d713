"""A stopped run goes on as if it had never stopped, bit for bit (on CPU)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from imagination.runs.lifecycle import need
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.stages.clone import clone
from imagination.stages.fit_world_model import fit_world_model
from imagination.stages.train import train


class _Killed(RuntimeError):
    """Stands for whatever ends a process."""


def _kill_at(monkeypatch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    honest = RunFolder.record

    def record(self: RunFolder, at: str, number: int, metrics: Mapping[str, float]) -> None:
        if at == stage and number >= step:
            raise _Killed
        honest(self, at, number, metrics)

    monkeypatch.setattr(RunFolder, "record", record)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def _assert_same_model(a: Path, b: Path) -> None:
    one, two = _weights(a), _weights(b)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def _metrics(folder: Path, stage: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time"} for row in rows if row["stage"] == stage]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "epo"])
def test_four_updates_equal_two_then_a_kill_then_two_more(
    run: Path, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    tiny.algorithm.name = algorithm  # type: ignore[assignment]
    fit_world_model(tiny, run)
    clone(tiny, run)
    stopped = shutil.copytree(run, tmp_path / "stopped")

    train(tiny, run)
    with monkeypatch.context() as patch:
        _kill_at(patch, "train", 3)
        with pytest.raises(_Killed):
            train(tiny, stopped)
    assert need(stopped / "checkpoints" / "train.ckpt", "train")
    train(tiny, stopped)

    assert [row["step"] for row in _metrics(run, "train")] == [0, 1, 2, 3]
    assert _metrics(stopped, "train") == _metrics(run, "train")
    _assert_same_model(run / "models" / "policy", stopped / "models" / "policy")
    before, after = _weights(run / "models" / "policy-clone"), _weights(run / "models" / "policy")
    assert any(not torch.equal(before[name], after[name]) for name in before), "four updates changed nothing"
    summary = json.loads((stopped / "summary.json").read_text())
    assert summary["real_steps"]["train"] == 0
    assert summary["dreamed_turns"] == sum(row["turns"] for row in _metrics(run, "train")) > 0


def test_supervised_training_goes_on_where_it_stopped(
    run: Path, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.fit.average = 0.9  # what is averaged so far is part of the state
    stopped = shutil.copytree(run, tmp_path / "stopped")
    fit_world_model(tiny, run)
    with monkeypatch.context() as patch:
        _kill_at(patch, "fit_world_model", 100)
        with pytest.raises(_Killed):
            fit_world_model(tiny, stopped)
    assert (stopped / "checkpoints" / "fit_world_model.ckpt").exists()
    fit_world_model(tiny, stopped)
    _assert_same_model(run / "models" / "worldmodel", stopped / "models" / "worldmodel")


def test_a_state_saved_under_other_settings_is_not_gone_on_from(
    run: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _kill_at(patch, "fit_world_model", 100)
        with pytest.raises(_Killed):
            fit_world_model(tiny, run)
    tiny.fit.lr = 1e-4
    fit_world_model(tiny, run)
    steps = [row["step"] for row in _metrics(run, "fit_world_model")]
    assert steps == list(range(0, 150, 10)), "it must have started again from step 0"
