"""What the model of screens is trained on. If these fail, an action is learned beside the screen of another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="pip install 'imagination[diffusion]'")

import torch

from imagination.commands.screens import fit_screens
from imagination.learning.screen_module import ScreenBatches
from imagination.settings import Config, UserError
from imagination.settings.compose import load_config
from tests.support.square_pages import SQUARE, episode
from worldmodel.extras.screen.data import Frames, ScreenTransition, transitions_of
from worldmodel.extras.screen.model import ScreenModel
from worldmodel.extras.screen.settings import ScreenSettings

SETTINGS = ScreenSettings(shrink=1, patch=4, channels=[8, 8], words=4, word_features=32, finest=4, crop=16)


def batches(
    folder: Path, crop: int = 16, unchanged: float | None = None, only: Sequence[bool] = (True, False)
) -> ScreenBatches:
    rng = random.Random(0)
    turns: list[ScreenTransition] = transitions_of([episode(f"t{k}/0", f"t{k}", folder, rng) for k in range(10)])
    turns = [turn for turn in turns if turn.changes in only]
    frames = Frames([name for turn in turns for name in (turn.before, turn.after)], [folder], 1)
    model = ScreenModel.create(SETTINGS, frames.size)
    settings = replace(SETTINGS, batch=200, whole_batch=5, whole_share=0.2, crop=crop)
    return ScreenBatches(turns, frames, model, settings=settings, steps=10, unchanged_share=unchanged, seed=3)


def test_a_window_is_of_the_same_place_of_screens_and_map(tmp_path: Path) -> None:
    batch = batches(tmp_path)(0)
    told, after = batch.conditions, batch.after
    assert told.before.shape == after.shape == (200, 3, 16, 16)
    assert told.maps.shape == (200, 2, 16, 16)
    assert batch.noise.x0.shape == after.shape
    dark, clicked = after.mean(1) < 0, told.maps[:, 0] == 1
    told_of = clicked.flatten(1).any(1)
    assert torch.equal(dark[told_of], clicked[told_of] | dark[told_of]), "what is clicked is dark after the click"
    assert 0.5 < float(told_of.float().mean()) < 1, "most windows have their action in them"
    whole = told_of & (clicked.flatten(1).sum(1) == SQUARE**2)
    assert whole.any()
    assert torch.equal(dark[whole], clicked[whole])
    starts = {tuple(torch.nonzero(c)[0].tolist()) for c in clicked[whole]}
    assert len(starts) > 10, "anywhere in the window"


def test_batches_are_those_of_their_step_and_seed(tmp_path: Path) -> None:
    made = batches(tmp_path)
    one, again, other = made(4), made(4), made(5)
    assert torch.equal(one.after, again.after)
    assert torch.equal(one.noise.x0, again.noise.x0)
    assert not torch.equal(one.after, other.after)
    assert batches(tmp_path, crop=0)(9).after.shape == (200, 3, 32, 32)


def test_the_last_steps_learn_from_whole_screens(tmp_path: Path) -> None:
    made = batches(tmp_path)
    assert [tuple(made(step).after.shape) for step in (0, 7, 8, 9)] == [(200, 3, 16, 16)] * 2 + [(5, 3, 32, 32)] * 2
    batch = made(8)
    assert batch.conditions.maps.shape == (5, 2, 32, 32)
    assert batch.noise.t.shape == (5,)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_turns_that_change_nothing_get_their_share(tmp_path: Path, share: float) -> None:
    batch = batches(tmp_path, crop=0, unchanged=share)(0)
    same = (batch.after == batch.conditions.before).flatten(1).all(1)
    assert float(same.float().mean()) == pytest.approx(share, abs=0.1 if share else 0)


def test_a_share_of_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unchanged_share=0\.5: no logged turn"):
        batches(tmp_path, unchanged=0.5, only=[True])


def test_a_time_limit_that_would_not_hold_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set fit\.minutes=0"):
        fit_screens(load_config(["worldmodel.kind=screen", "fit.minutes=1"], Config), tmp_path)


def test_a_window_must_fit_the_network() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        ScreenSettings(patch=8, channels=[8, 8], crop=24)
    with pytest.raises(ValueError, match="power of two"):
        ScreenSettings(steps=3)
