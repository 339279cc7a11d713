"""What is said of dreamed screens. If these fail, a model that ignores the action looks as good as another."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from imagination.evaluation.screens import (
    Screens,
    alikeness,
    by_episode,
    compared,
    dream_pages,
    marked,
    pairs_of,
    probed,
    questions_of,
    sensitivity,
    square,
)
from real_envs.screens import Place
from tests.support.scripted import Answering, says
from tests.support.square_pages import CELLS, SQUARE, episode, page
from worldmodel.extras.screen.data import Frames, ScreenTransition, transitions_of
from worldmodel.world_model import PredictionInvalid


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[ScreenTransition], Frames]:
    folder, rng = tmp_path_factory.mktemp("screens"), random.Random(0)
    turns = transitions_of([episode(f"t{k}/0", f"t{k}", folder, rng) for k in range(12)])
    return turns, Frames([name for turn in turns for name in (turn.before, turn.after)], [folder], 1)


def real(log: tuple[list[ScreenTransition], Frames]) -> tuple[list[Tensor], list[Tensor]]:
    turns, frames = log
    return [frames[turn.before] for turn in turns], [frames[turn.after] for turn in turns]


def test_a_perfect_dream_a_copy_and_a_wrong_square(log: tuple[list[ScreenTransition], Frames]) -> None:
    turns, _ = log
    before, after = real(log)
    perfect = alikeness(turns, before, after, after, 0)
    changing = sum(a is not b and not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (perfect["turns"], perfect["changing_turns"]) == (48, changing)
    assert 0 < changing < 48
    assert perfect["psnr"]["dream"]["value"] == 60.0
    assert perfect["ssim"]["dream"]["value"] == pytest.approx(1.0)
    assert perfect["changed_region_iou"]["dream"] == {"value": 1.0, "n": changing, "ci95": [1.0, 1.0]}
    assert perfect["unchanged_left_alone"]["dream"]["value"] == 1.0

    copied = alikeness(turns, before, after, before, 0)
    assert copied["psnr"]["dream"] == copied["psnr"]["copy"] == perfect["psnr"]["copy"]
    assert copied["changed_region_iou"]["dream"]["value"] == 0.0
    errors = [float(((a.float() - b.float()) / 255).square().mean()) for a, b in zip(before, after, strict=True)]
    expected = -10 * torch.log10(torch.tensor(errors).mean())
    assert copied["psnr"]["copy"]["value"] == pytest.approx(float(expected), abs=1e-3), "of the mean error"

    painted = [screen.clone() for screen in after]
    for screen in painted:
        screen[:, -SQUARE:, -SQUARE:] = 128
    spoilt = alikeness(turns, before, after, painted, 0)
    assert spoilt["unchanged_left_alone"]["dream"]["value"] == 0.0
    assert spoilt["changed_region_iou"]["dream"]["value"] < 0.8


def test_pairs_of_actions_at_one_screen(log: tuple[list[ScreenTransition], Frames]) -> None:
    turns, frames = log
    _, after = real(log)
    pairs = pairs_of(turns)
    for a, b in pairs:
        assert turns[a].before == turns[b].before
        assert turns[a].action != turns[b].action
    assert len({(turns[a].before, *sorted((turns[a].action, turns[b].action))) for a, b in pairs}) == len(pairs)
    right = sensitivity(turns, after, after)
    apart = sum(turns[a].after != turns[b].after for a, b in pairs)
    assert right["differ"]["n"] == right["own"]["n"] == apart > 10
    assert right["differ"]["value"] == right["own"]["value"] == 1.0
    assert right["same"]["value"] in (1.0, None)
    deaf = sensitivity(turns, after, [frames[turns[0].after]] * len(turns))
    assert (deaf["differ"]["value"], deaf["own"]["value"]) == (0.0, 0.0)
    assert sensitivity(turns[:1], after[:1], after[:1])["own"] == {"value": None, "n": 0, "ci95": None}


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("[2] checkbox 'a'", False),
        ("[2] checkbox 'a' checked", True),
        ("[2] radio 'is checked'", False),
        ("[2] tab 'x' expanded", True),
        ("[2] option 'x' selected", True),
        ("[2] checkbox 'a' disabled", False),
        ('[2] checkbox "it\'s" checked', True),
        ("[2] button 'checked'", None),
        ("[12] checkbox 'a' checked", None),
    ],
)
def test_the_state_of_an_element_is_read_off_its_line(line: str, state: bool | None) -> None:
    assert marked(f"some text\n{line}\nmore", 2) is state


def test_the_probe_reads_real_screens_and_tells_a_dream_from_a_copy(log: tuple[list[ScreenTransition], Frames]) -> None:
    turns, _ = log
    before, after = real(log)
    half = len(turns) // 2
    taught, asked = Screens(turns[:half], before[:half], after[:half], 1), Screens(
        turns[half:], before[half:], after[half:], 1
    )  # fmt: skip
    questions = questions_of(asked.turns)
    flipped = sum(q.before != q.after for q in questions)
    assert flipped > 5
    found = probed(taught, asked, asked.after, 0)
    assert found is not None
    assert found["flips"]["real"] == found["flips"]["dream"], "the same screens"
    assert found["flips"]["dream"]["n"] == flipped
    assert found["flips"]["dream"]["value"] > 0.8
    assert found["flips"]["copy"]["value"] < 0.2
    assert probed(taught, Screens([], [], [], 1), [], 0) is None


def test_a_square_is_cut_around_the_element_also_at_the_edge() -> None:
    screen = torch.from_numpy(page((CELLS - 1, 0)).copy()).permute(2, 0, 1)
    cut = square(screen, Place(2 * (CELLS - 1) * SQUARE, 0, 2 * SQUARE, 2 * SQUARE), shrink=2)
    dark = (cut < 0).any(0)
    assert dark.shape == (24, 24)
    assert bool(dark[12, 12])
    assert int(dark.sum()) == (24 - 8) * 16, "the square from 8 on, and its edge repeated above and to the right"
    assert square(screen, Place(9000, -50, 1, 1), 1).shape == (3, 24, 24)


def test_where_a_dream_parts_from_reality(log: tuple[list[ScreenTransition], Frames]) -> None:
    turns, frames = log
    first, second = list(by_episode(turns).values())[:2]
    truth = [[frames[turn.after] for turn in e] for e in (first, second)]
    parting = [screen.clone() for screen in truth[1]]
    parting[2][:, :SQUARE, :] = 90
    kept: list[Tensor] = []

    def keep(screen: Tensor) -> str:
        kept.append(screen)
        return str(len(kept) - 1)

    same, other = compared([first, second], [truth[0], parting], truth, frames, keep)
    assert (same["parted"], other["parted"]) == (None, 2)
    assert [turn["parted"] for turn in other["turns"]] == [False, False, True, False]
    assert other["turns"][2]["off"] >= 0.24
    assert torch.equal(kept[int(other["turns"][2]["dream"])], parting[2])
    assert torch.equal(kept[int(other["turns"][2]["ahead"])], truth[1][2])
    placed = next(turn for turn, t in zip(same["turns"], first, strict=True) if t.place)
    assert placed["place"][2:] == [SQUARE / 32, SQUARE / 32], "shares of the screenshot"
    assert by_episode([turns[0], turns[2], turns[4]])["t0/0"] == [turns[0]], "a gap ends what follows"


def test_pages_are_dreamed_from_what_is_real_before_a_group_and_from_dreams_within(tmp_path: Path) -> None:
    for seed in range(100):  # until one clicks, clicks, waits and clicks
        logged = episode("e", "t", tmp_path, random.Random(seed))
        if [turn.action == "noop(0)" for turn in logged.turns] == [False, False, True, False]:
            break
    turns = transitions_of([logged])
    # says what it was asked, and nothing that can be read for some actions
    world = Answering(
        lambda seen, action: PredictionInvalid("") if action == "noop(0)" else says(f"{action} after {len(seen)}")
    )
    (loop,) = asyncio.run(dream_pages(world, {"e": logged}, [turns], 0))  # type: ignore[arg-type]
    said = [f"{turns[0].action} after 0", f"{turns[1].action} after 1", f"{turns[3].action} after 3"]
    assert [turn.answer for turn in loop] == [said[0], said[1], "", said[2]]
    assert [turn.page for turn in loop] == [logged.start, said[0], said[1], said[1]]
    assert world.asked[-1][:2] == (logged.start, (said[0], said[1], said[1]))
    ahead = asyncio.run(dream_pages(world, {"e": logged}, [[turn] for turn in turns], 0))  # type: ignore[arg-type]
    assert [turn.page for (turn,) in ahead] == [turn.page for turn in turns]
    assert (logged.start, tuple(turn.observation for turn in logged.turns[:3])) in [asked[:2] for asked in world.asked]
    assert len(set(world.released)) == 5
