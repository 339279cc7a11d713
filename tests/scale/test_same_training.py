"""If this fails, players in other processes train another policy than one process does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scale.trained import Trained, Trainings, assert_same_training

Undisturbed = Callable[..., Trained]


@pytest.mark.scale
@pytest.mark.parametrize("players", [1, 3])
@pytest.mark.parametrize("words", ["train.real_share=0", "train.real_share=0.5", "train.real_share=0 train.world=real"])
def test_players_train_as_one_process_does(
    trainings: Trainings, undisturbed: Undisturbed, run_name: str, words: str, players: int
) -> None:
    done = trainings.train(run_name, *words.split(), "scale=ray", f"scale.players={players}")
    expected = undisturbed(*words.split())
    assert_same_training(done, expected)
    assert done.counted() == done.sent() == expected.counted() == expected.sent()
    assert (done.counted()[0] > 0) == (words != "train.real_share=0")
