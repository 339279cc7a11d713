"""A stopped run goes on as if it had never stopped, bit for bit (on CPU)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.train import train
from imagination.runs.lifecycle import need
from imagination.settings import Config
from tests.support.killing import Killed, assert_same_model, kill_at, metrics_of, weights


@pytest.mark.parametrize("algorithm", ["ppo", "epo", "istar"])
def test_four_updates_equal_two_then_a_kill_then_two_more(
    cloned: Path, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    tiny.algorithm.name = algorithm  # type: ignore[assignment]
    run, stopped = (Path(shutil.copytree(cloned, tmp_path / name)) for name in ("whole", "stopped"))
    train(tiny, run)
    with monkeypatch.context() as patch:
        kill_at(patch, "train", 3)
        with pytest.raises(Killed):
            train(tiny, stopped)
    assert need(stopped / "checkpoints" / "train.ckpt", "train")
    train(tiny, stopped)

    assert [row["step"] for row in metrics_of(run, "train")] == [0, 1, 2, 3]
    assert metrics_of(stopped, "train") == metrics_of(run, "train")
    assert_same_model(run / "models" / "policy", stopped / "models" / "policy")
    before, after = weights(run / "models" / "policy-clone"), weights(run / "models" / "policy")
    assert any(not torch.equal(before[name], after[name]) for name in before), "four updates changed nothing"
    summary = json.loads((stopped / "summary.json").read_text())
    assert summary["real_steps"]["train"] == 0
    assert summary["dreamed_turns"] == sum(row["turns"] for row in metrics_of(run, "train")) > 0


def test_supervised_training_goes_on_where_it_stopped(
    run: Path, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.fit.average, tiny.fit.steps = 0.9, 40  # what is averaged so far is part of the state
    stopped = shutil.copytree(run, tmp_path / "stopped")
    fit_world_model(tiny, run)
    with monkeypatch.context() as patch:
        kill_at(patch, "fit_world_model", 30)
        with pytest.raises(Killed):
            fit_world_model(tiny, stopped)
    assert (stopped / "checkpoints" / "fit_world_model.ckpt").exists()
    fit_world_model(tiny, stopped)
    assert_same_model(run / "models" / "worldmodel", stopped / "models" / "worldmodel")


def test_a_state_saved_under_other_settings_is_not_gone_on_from(
    run: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.fit.steps = 40
    with monkeypatch.context() as patch:
        kill_at(patch, "fit_world_model", 30)
        with pytest.raises(Killed):
            fit_world_model(tiny, run)
    assert (run / "checkpoints" / "fit_world_model.ckpt").exists()
    tiny.fit.lr = 1e-4
    fit_world_model(tiny, run)
    steps = [row["step"] for row in metrics_of(run, "fit_world_model")]
    assert steps == list(range(0, 40, 10)), "it must have started again from step 0"
    assert "fit_world_model.ckpt was saved under other settings" in capsys.readouterr().err
