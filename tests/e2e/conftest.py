"""Runs of the tiny world."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.settings import Config
from tests.support.tiny import tiny_settings, write_log


@pytest.fixture
def tiny() -> Config:
    """Settings under which every stage takes about a second."""
    return tiny_settings()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that holds nothing but a log."""
    write_log(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as it is before ``train``."""
    folder = tmp_path_factory.mktemp("cloned")
    write_log(folder)
    config = tiny_settings()
    fit_world_model(config, folder)
    clone(config, folder)
    return folder
