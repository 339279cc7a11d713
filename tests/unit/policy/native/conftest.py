"""A compiler as on a fresh machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.lm.native import steps as native


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.SWITCH, raising=False)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """As on a machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._library.cache_clear()
    yield monkeypatch
    native._library.cache_clear()


@pytest.fixture(scope="session")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where something is compiled once (10 s) for all tests and later runs; its name has the source in it."""
    cache = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    return Path(cache.mkdir("compiled")) if cache else tmp_path_factory.mktemp("compiled")


@pytest.fixture
def narrower(monkeypatch: pytest.MonkeyPatch, kept: Path) -> Iterator[None]:
    """Compiled for a processor with vectors of 256 bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    monkeypatch.setattr(native, "_COMPILE", native._COMPILE.replace("-march=native", "-march=haswell"))
    native._library.cache_clear()
    yield
    native._library.cache_clear()
