"""If this fails, other processes train another policy than one process does, or play other episodes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import asdict

import pytest

from imagination.commands.collect import _collect
from imagination.commands.experiments.arms import play_clone
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from real_envs.store import TrajectoryStore
from tests.scale.trained import Trained, Trainings, actors, assert_same_training, config

Undisturbed = Callable[..., Trained]


BRANCHED = "train.real_share=0 train.failure_share=0.5 dream.branch_share=0.5"
OVERSAMPLED = "train.real_share=0.5 train.oversample=1.5"


@pytest.mark.scale
@pytest.mark.parametrize("players", [1, 3])
@pytest.mark.parametrize(
    "words",
    ["train.real_share=0", "train.real_share=0.5", "train.real_share=0 train.world=real", BRANCHED, OVERSAMPLED],
)
def test_players_train_as_one_process_does(
    trainings: Trainings, undisturbed: Undisturbed, run_name: str, words: str, players: int
) -> None:
    done = trainings.train(run_name, *words.split(), "scale=ray", f"scale.players={players}")
    expected = undisturbed(*words.split())
    assert_same_training(done, expected)
    assert done.counted() == done.sent() == expected.counted() == expected.sent()
    assert (done.counted()[0] > 0) == (words not in ("train.real_share=0", BRANCHED))


@pytest.mark.scale
def test_real_worlds_elsewhere_give_the_log_and_the_successes_of_one_process(
    trainings: Trainings, run_name: str
) -> None:
    """``collect`` and an evaluation, with the real world in two actors: what was done there is counted here."""
    runs = {}
    for name, words in (("here", ()), ("there", ("scale=ray", "scale.real_worlds=2"))):
        done = trainings.copy(f"{run_name}-{name}")
        episodes = [f"{key}=3" for key in ("collect.episodes", "evaluate.episodes", "evaluate.heldout_episodes")]
        settings = config(*words, *episodes, "collect.heldout_episodes=2")
        played = play_clone(settings, done.run)
        assert done.sent() == (played["real_steps"]["evaluate"], played["real_resets"]["evaluate"])
        collect_anew(settings, done)
        log = TrajectoryStore.open(done.run / "log")
        logged = sorted((asdict(t) for split in log.splits for t in log.read(split)), key=lambda t: t["id"])
        spent = done.summary["real_steps"]["collect"], done.summary["real_resets"]["collect"]
        assert done.sent() == spent
        runs[name] = played["heldout_tasks"], played["train_tasks"], logged, spent
    assert runs["here"] == runs["there"]
    assert len(runs["there"][2]) == 2 * (3 + 2)
    assert not actors("_EnvActor"), "they end with the command"


def collect_anew(settings: Config, done: Trained) -> None:
    """A log of scripted agents in place of the one that the run has."""
    shutil.rmtree(done.run / "log")
    done.journal.unlink()
    asyncio.run(_collect(settings, RunFolder(done.run, settings.seed)))
