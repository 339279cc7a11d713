"""Fixtures of several test files."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

from real_envs.env import Task
from real_envs.worlds.textworld import GameSettings, generate_games

TINY = GameSettings(rooms=2, objects=4, quest_length=3)
# Simulators in Java play a few turns here: a third of what each costs would be its compiler making them faster.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

hypothesis.settings.register_profile("any-machine", deadline=None)  # seconds are no property of the code
hypothesis.settings.load_profile("any-machine")


def pytest_configure(config: pytest.Config) -> None:
    """Files in the order of their names: xdist would leave the end-to-end ones, of few but long tests, to the end."""
    config.option.loadscopereorder = False


def pytest_collection_finish() -> None:
    """Loaded modules stay: full garbage collections, of which stages ask many, need not look through them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def games(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Two tiny TextWorld games; compiled once (3 s) and kept in pytest's cache folder for later runs."""
    return generate_games(kept(request, tmp_path_factory), [1, 2], TINY, workers=1)


@pytest.fixture(scope="session")
def give_games(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Puts the two games of ``preset=tiny`` into a run's folder, as a run that was stopped has them; compiled once."""
    folder = kept(request, tmp_path_factory)
    names = [task.id for task in generate_games(folder, [1, 2], GameSettings(2, 3, 2), workers=1)]

    def give(run: Path) -> None:
        (run / "games").mkdir(parents=True)
        for name in names:
            for ending in ("z8", "json"):
                shutil.copy(folder / f"{name}.{ending}", run / "games")

    return give


def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    return Path(cache.mkdir(f"textworld-{version('textworld')}")) if cache else tmp_path_factory.mktemp("games")
