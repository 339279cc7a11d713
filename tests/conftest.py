"""Fixtures of several test files."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from real_envs.env import Task
from real_envs.textworld import GameSettings, generate_games

TINY = GameSettings(rooms=2, objects=4, quest_length=3)


@pytest.fixture(scope="session")
def games(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Two tiny TextWorld games; compiled once (3 s) and kept in pytest's cache folder for later runs."""
    cache = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    folder = Path(cache.mkdir(f"textworld-{version('textworld')}")) if cache else tmp_path_factory.mktemp("games")
    return generate_games(folder, [1, 2], TINY, workers=1)
