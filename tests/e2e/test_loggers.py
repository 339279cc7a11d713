"""Where losses are logged is the user's choice, and changes nothing that is made."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest

from imagination.commands.clone import clone
from imagination.runs.fingerprint import READS, fingerprint
from imagination.settings import Config


@pytest.fixture
def logged(run: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """One supervised stage of a few steps; the clone starts from scratch."""
    monkeypatch.chdir(run)  # where Lightning would put logs that nobody asked for
    tiny.logger = "none"
    tiny.clone.steps, tiny.clone.from_world_model = 11, False
    return tiny


def test_a_log_file_gets_lines_and_no_epochs(logged: Config, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logged.logger = "none"
    clone(logged, run)
    said = capfd.readouterr()
    assert "Epoch" not in said.out + said.err
    (line,) = [line for line in said.err.splitlines() if line.startswith("clone")]
    assert "11/11 100%" in line
    assert "tokens/s" in line
    assert "loss" in line
    assert not any((run / name).exists() for name in ("tensorboard", "csv", "lightning_logs", "wandb"))


def test_a_bar_ends_with_the_error_that_ends_its_stage(
    logged: Config, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr("imagination.learning.supervised.cross_entropy_loss", broken)
    before = threading.active_count()
    with pytest.raises(ValueError, match="broken"):
        clone(logged, run)
    assert threading.active_count() == before


def test_csv_and_tensorboard_have_files_of_their_own(logged: Config, run: Path) -> None:
    logged.logger = "csv"
    clone(logged, run)
    rows = (run / "csv" / "clone" / "metrics.csv").read_text().splitlines()
    assert "loss" in rows[0]
    assert len(rows) == 1 + 11
    logged.logger = "tensorboard"
    clone(logged, run)
    assert list((run / "tensorboard" / "clone").glob("events.*"))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_wandb_is_one_line_that_names_the_command(logged: Config, run: Path) -> None:
    logged.logger = "wandb"
    with pytest.raises(ValueError, match=r"pip install 'imagination\[wandb\]'"):
        clone(logged, run)


def test_wandb_logs_offline(logged: Config, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged.logger = "wandb"
    clone(logged, run)
    wandb.finish()
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("stage", ["", *READS])
def test_the_logger_is_no_part_of_what_a_stage_makes(stage: str) -> None:
    assert fingerprint(Config(logger="csv"), stage) == fingerprint(Config(logger="none"), stage)
