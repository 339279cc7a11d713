"""The model of screens and what it reads. If these fail, it draws the wrong turn, or opens what it must not."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="pip install 'imagination[diffusion]'")

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from real_envs.errors import UserError
from real_envs.screens import AFTER, BEFORE, Place, keep
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.extras.screen.data import Frames, ScreenTransition, action_map, new_lines, transitions_of, word_features
from worldmodel.extras.screen.model import ScreenModel, make_scheduler, sample
from worldmodel.extras.screen.settings import ScreenSettings

SETTINGS = ScreenSettings(shrink=1, patch=4, channels=[8, 8], words=4, word_features=32, finest=4, crop=8)


@pytest.fixture(scope="module")
def model() -> ScreenModel:
    """Random, its last layer too, for screens of 12 x 20 pixels."""
    torch.manual_seed(0)
    made = ScreenModel.create(SETTINGS, (12, 20))
    torch.nn.init.normal_(made.unet.conv_out.weight, std=0.1)
    return made.eval()


def turn(action: str, goal: str, place: Place | None = None, page: str = "", answer: str = "") -> ScreenTransition:
    return ScreenTransition("e", 0, "t", goal, action, place, "a", "b", page, answer, 0.0, False)


def screens(count: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (3, 12, 20), generator=rng, dtype=torch.uint8) for _ in range(count)]


def test_where_nothing_is_drawn_anew_the_last_screen_stays() -> None:
    made, before = ScreenModel.create(SETTINGS, (12, 20)), screens(2)
    with torch.no_grad():
        made.unet.conv_out.bias[3 * SETTINGS.patch**2 :] = -100.0
    told = made.conditions(before, [turn("noop(0)", "Goal: x"), turn("click('1')", "", Place(1, 2, 3, 4))])
    assert made.shape.inside == (16, 24), "whole patches on both levels"
    assert torch.equal(made.dream(told, 4, [1, 2]), torch.stack(before)), "and padding, scaling and steps lose nothing"


def test_a_dream_depends_on_its_own_screen_action_words_and_seed_alone(model: ScreenModel) -> None:
    before = screens(2)

    def dream(rows: list[tuple[torch.Tensor, Place | None, str, str, int]]) -> torch.Tensor:
        turns = [turn(action, goal, place) for _, place, action, goal, _ in rows]
        return model.dream(model.conditions([row[0] for row in rows], turns), 2, [row[4] for row in rows]).float()

    one = (before[0], Place(4, 4, 4, 4), "click('1')", "Goal: red", 5)
    alone, beside = dream([one])[0], dream([(before[1], None, "", "Goal: a b c d e f", 9), one])[1]
    assert (alone - beside).abs().max() <= 1, "to a rounding"
    changed = {
        "screen": (before[1], *one[1:]),
        "place": (one[0], Place(12, 4, 4, 4), *one[2:]),
        "action": (*one[:2], "fill('1', 'x')", *one[3:]),
        "task": (*one[:3], "Goal: blue", one[4]),
        "seed": (*one[:4], 6),
    }
    for name, other in changed.items():
        assert (dream([other])[0] - alone).abs().max() > 0, name


def test_a_checkpoint_is_of_diffusers_and_draws_the_same(model: ScreenModel, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    weights = load_file(tmp_path / "m" / "unet" / "diffusion_pytorch_model.safetensors")
    assert weights.keys() == model.unet.state_dict().keys()
    classes = [json.loads((tmp_path / "m" / part).read_text())["_class_name"] for part in
               ("unet/config.json", "scheduler/scheduler_config.json")]  # fmt: skip
    assert classes == ["UNet2DConditionModel", "FlowMatchEulerDiscreteScheduler"]
    opened = ScreenModel.load(tmp_path / "m")
    told = model.conditions(screens(1), [turn("click('1')", "Goal: x")])
    assert torch.equal(opened.dream(told, 4, [7]), model.dream(told, 4, [7]))


def test_a_model_that_draws_without_masks_is_refused(tmp_path: Path) -> None:
    old = ScreenModel.create(SETTINGS, (12, 20))
    old.unet.conv_out = torch.nn.Conv2d(8, 3 * SETTINGS.patch**2, 3, padding=1)
    old.unet.register_to_config(out_channels=3 * SETTINGS.patch**2)
    old.save(tmp_path / "m")
    with pytest.raises(UserError, match="without masks"):
        ScreenModel.load(tmp_path / "m")


class Planted:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (self.path,))  # type: ignore[return-value]


def test_a_pickle_in_place_of_the_weights_is_not_opened(model: ScreenModel, tmp_path: Path) -> None:
    folder, trace = tmp_path / "m", tmp_path / "was-run"
    model.save(folder)
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Planted(trace)))
    with pytest.raises(UserError, match="no model of screens"):
        ScreenModel.load(folder)
    assert not trace.exists()
    with pytest.raises(UserError, match="fit one with"):
        ScreenModel.load(tmp_path / "nowhere")


def test_an_action_map_is_the_element_and_a_bell_around_its_centre() -> None:
    found = action_map(Place(6, 4, 8, 4), (8, 12), shrink=2)  # in the model: x 3 to 7, y 2 to 4
    for y in range(8):
        for x in range(12):
            assert float(found[0, y, x]) == float(3 <= x < 7 and 2 <= y < 4)
            far = (x + 0.5 - 5) ** 2 + (y + 0.5 - 3) ** 2
            assert float(found[1, y, x]) == pytest.approx(math.exp(-far / 18), rel=1e-5)
    assert not action_map(None, (8, 12), 2).any()
    assert not action_map(Place(500, 500, 8, 8), (8, 12), 2)[0].any(), "an element that is out of sight"


def test_words_are_told_apart_by_letters_kind_and_place() -> None:
    features, present = word_features("click('Save')", "Goal: save it", 3, 64)
    assert present.tolist() == [True, True, False, True, True, True]
    assert features.shape == (6, 64)
    assert torch.allclose(features.norm(dim=1), present.float())
    again, _ = word_features("CLICK save", "Goal: save it", 3, 64)
    assert torch.equal(features, again), "case and punctuation aside"
    assert not torch.equal(features[1], features[4]), "the action's word is not the task's"
    assert float(features[1] @ features[4]) > 0.2, "but they share their letters"
    nothing, there = word_features("", "", 3, 64)
    assert there.tolist() == [True, False, False, False, False, False]
    assert nothing[0].any()


def test_a_model_that_reads_pages_draws_from_what_is_new_there_and_no_other_does(model: ScreenModel) -> None:
    assert new_lines("a\nb\nb", "b\nc 1\na\nd") == "c 1\nd"
    features, present = word_features("go", "", 2, 64, "c 1\nd", 4)
    assert features.shape == (8, 64)
    assert present.tolist() == [True, False, False, False, True, True, True, False]
    assert torch.equal(features[:4], word_features("go", "", 2, 64)[0])
    torch.manual_seed(1)
    reads = ScreenModel.create(replace(SETTINGS, page_words=3), (12, 20))
    torch.nn.init.normal_(reads.unet.conv_out.weight, std=0.1)
    pages = [turn("go", "g", page="a", answer=f"a\n{colour}") for colour in ("red", "blue")]
    for one, same in ((model, True), (reads, False)):
        dreams = one.eval().dream(one.conditions(screens(1) * 2, pages), 2, [5, 5])
        assert torch.equal(dreams[0], dreams[1]) == same


def test_screens_are_shrunk_to_means_and_padded_with_their_edge(tmp_path: Path) -> None:
    pixels = np.zeros((3, 4, 3), dtype=np.uint8)
    pixels[0, 0], pixels[0, 1], pixels[1, 0], pixels[1, 1] = 10, 20, 30, 40
    pixels[2] = 200
    name = keep(pixels, tmp_path)
    frames = Frames([name], [tmp_path / "elsewhere", tmp_path], shrink=2)
    assert (frames.full, frames.size, len(frames)) == ((3, 4), (2, 2), 1)
    assert frames[name][0].tolist() == [[25, 0], [200, 200]]


def test_pictures_that_cannot_be_learned_from_are_told_in_a_line(tmp_path: Path) -> None:
    small, large = (keep(np.zeros((4, side, 3), dtype=np.uint8), tmp_path) for side in (6, 8))
    with pytest.raises(UserError, match=r"several sizes: .* 6x4|several sizes: .* 8x4"):
        Frames([small, large], [tmp_path], 1)
    with pytest.raises(UserError, match=r"0{32}\.png .*copy the folder"):
        Frames(["0" * 32 + ".png"], [tmp_path], 1)
    broken = tmp_path / ("1" * 32 + ".png")
    broken.write_bytes((tmp_path / small).read_bytes()[:40])
    with pytest.raises(UserError, match=f"{broken.name} cannot be read"):
        Frames([broken.name], [tmp_path], 1)
    Image.new("RGB", (6, 4)).save(broken)
    assert len(Frames([broken.name, small], [tmp_path], 1)) == 2


def test_only_turns_between_two_screens_are_learned_from() -> None:
    a, b, c = (digit * 32 + ".png" for digit in "abc")
    turns = (
        Turn("one", "x", 0.0, False, {BEFORE: a, AFTER: b, **Place(1, 2, 3, 4).info}),
        Turn("two", "y", 0.0, False, {}),  # its screenshot is missing
        Turn("three", "z", 1.0, False, {AFTER: c}),
        Turn("four", "z", None, True, {AFTER: c}),
    )
    log = [
        Trajectory("e", "t", "g", Source.REAL, "a", 0, "Goal: g\nthe page", turns, StopReason.TERMINATED),
        Trajectory(
            "old", "t", "g", Source.REAL, "a", 0, "Goal: g", (Turn("x", "y", 0.0, True),), StopReason.TERMINATED
        ),
        Trajectory("none", "t", "g", Source.REAL, "a", 0, "Goal: g", (), StopReason.ENV_CRASHED),
    ]
    first, last = transitions_of(log)
    assert (first.turn, first.before, first.after, first.place, first.goal) == (0, a, b, Place(1, 2, 3, 4), "Goal: g")
    assert (first.page, first.answer, first.changes) == ("Goal: g\nthe page", "x", True)
    assert (last.turn, last.before, last.after, last.place, last.changes) == (3, c, c, None, False)
    assert (last.page, last.reward, last.terminated) == ("z", None, True)


WIDE = (slice(None), None, None, None)


@pytest.mark.parametrize("steps", [1, 2, 4, 16])
def test_the_scheduler_takes_equal_steps_from_noise_to_picture(steps: int) -> None:
    seen: list[tuple[float, float]] = []

    def velocity(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
        seen.append((float(t[0]), float(d[0])))
        return torch.cos(x) - t[WIDE]

    start = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    scheduler = make_scheduler()
    found = sample(velocity, start, steps, scheduler)
    x = start.double()
    for k in range(steps):
        x = x + (torch.cos(x) - k / steps) / steps
    torch.testing.assert_close(found.double(), x, atol=1e-5, rtol=1e-5)
    assert seen == [(k / steps, 1 / steps) for k in range(steps)]
    again = sample(velocity, start, steps, scheduler)
    assert torch.equal(found, again), "a scheduler counts its steps, and must begin anew"
    scheduler.set_timesteps(sigmas=[1 - k / steps for k in range(steps)])
    assert scheduler.timesteps.tolist() == pytest.approx([1000 * (steps - k) / steps for k in range(steps)])


def test_the_velocity_of_a_known_gaussian_gives_its_mean_and_variance() -> None:
    """x1 ~ N(m, s²): the best guess of x1 - x0 from x_t = (1 - t) x0 + t x1, by the formula for joint Gaussians."""
    m, s = 0.7, 0.3

    def velocity(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
        t = t[WIDE]
        spread = (1 - t) ** 2 + t**2 * s**2
        return m + (t * s**2 - (1 - t)) / spread * (x - t * m)

    noise = torch.randn(4, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    found = sample(velocity, noise, 128, make_scheduler())
    assert float(found.mean()) == pytest.approx(m, abs=0.01)
    assert float(found.std()) == pytest.approx(s, abs=0.01)
    assert float(torch.corrcoef(torch.stack([found.flatten(), noise.flatten()]))[0, 1]) > 0.999, "a map, no new chance"
