from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from tests.scale.trained import Trained, Trainings, config
from tests.support.corridor_world import register
from tests.support.tiny import write_log


@pytest.fixture(scope="session")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    pytest.importorskip("ray")
    place = tmp_path_factory.mktemp("scale")
    with pytest.MonkeyPatch.context() as patch:
        register(place / "packages", patch)
        patch.setenv("OMP_NUM_THREADS", "1")
        cloned = place / "cloned"
        write_log(cloned)
        fit_world_model(config(), cloned)
        clone(config(), cloned)
        yield Trainings(cloned, place)


@pytest.fixture(scope="session")
def undisturbed(trainings: Trainings) -> Callable[..., Trained]:
    """A training in one process, by its words; done once."""
    done: dict[tuple[str, ...], Trained] = {}

    def give(*words: str) -> Trained:
        if words not in done:
            done[words] = trainings.train(f"one-{len(done)}", *words)
        return done[words]

    return give


@pytest.fixture
def run_name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A name for the run of a test."""
    return tmp_path.name
