from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.chaos.faulty import can_inject, faulty
from tests.chaos.flow import Flow, play_through


@pytest.fixture(scope="session")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flow]:
    """A tiny flow that was played without faults, from each stage of which others begin."""
    if not can_inject():
        pytest.skip("faults are put below the C library of Linux, by gcc")
    place = tmp_path_factory.mktemp("flow")
    with faulty(place) as runner:
        yield play_through(runner, place)
    shutil.rmtree(place, ignore_errors=True)
