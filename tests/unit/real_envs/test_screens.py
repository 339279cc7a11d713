"""Pictures beside turns. If these fail, a page shows another moment than the one it stands beside, or none."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from real_envs.screens import AFTER, BEFORE, FOLDER, Place, copy_screens, keep, place_of, screen_of, screens_of
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

NAME = "0123456789abcdef0123456789abcdef.png"


def picture(shade: int) -> np.ndarray:
    return np.full((4, 6, 3), shade, dtype=np.uint8)


def episode(name: str, *infos: dict[str, float | str | bool]) -> Trajectory:
    turns = tuple(Turn("click('1')", "a page", 0.0, False, info) for info in infos)
    return Trajectory(name, "t", "t/x", Source.REAL, "x", 0, "start", turns, StopReason.TURN_LIMIT)


def test_equal_pictures_are_one_file_and_come_back_as_they_were(tmp_path: Path) -> None:
    from PIL import Image

    first, again, other = (keep(picture(shade), tmp_path) for shade in (7, 7, 8))
    assert first == again != other
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({first, other})
    assert (np.asarray(Image.open(io.BytesIO((tmp_path / first).read_bytes()))) == picture(7)).all()
    assert keep(picture(7).reshape(6, 4, 3), tmp_path) != first, "the same bytes in another shape are another picture"


@pytest.mark.parametrize("value", ["../../etc/passwd", "x.png", f"a/{NAME}", NAME.upper(), "", 3.0, True])
def test_only_names_are_names(value: float | str | bool) -> None:
    """A log is somebody else's: what it names is looked up in a folder, and put into a page."""
    assert screen_of(Turn("a", "b", 0.0, False, {AFTER: value})) is None
    assert screen_of(Turn("a", "b", 0.0, False, {AFTER: NAME})) == NAME


def test_a_store_keeps_what_its_turns_name(tmp_path: Path) -> None:
    names = [keep(picture(shade), tmp_path / "made") for shade in range(4)]
    store, place = TrajectoryStore.create(tmp_path / "log", {"train": ["t"]}), Place(1.5, 2.0, 3.0, 4.0)
    with store.writer(pictures=tmp_path / "made") as writer:
        writer.add(episode("one", {BEFORE: names[0], AFTER: names[1], **place.info}, {AFTER: names[1]}))
        writer.add(episode("two", {AFTER: names[2]}, {AFTER: NAME}, {}))  # NAME was never written
    kept = {path.name for path in (tmp_path / "log" / FOLDER).iterdir()}
    assert kept == set(names[:3])
    read = list(TrajectoryStore.open(tmp_path / "log").read())
    assert [place_of(turn) for turn in read[0].turns] == [place, None]
    assert list(screens_of(read)) == [names[0], names[1], names[1], names[2], NAME]
    for name in kept:
        assert (tmp_path / "log" / FOLDER / name).read_bytes() == (tmp_path / "made" / name).read_bytes()


@pytest.mark.parametrize(
    "wrong", [{}, {"action_x": "1"}, {"action_y": True}, {"action_width": -1.0}, {"action_height": float("inf")}]
)
def test_a_place_is_four_numbers_or_none(wrong: dict[str, float | str | bool]) -> None:
    """Logs of before have none, and those of others may hold anything."""
    place = Place(1.5, -2.0, 30.0, 0.0)
    turn = Turn("click('1')", "a page", 0.0, False, {**place.info, AFTER: NAME, **wrong})
    assert place_of(turn) == (None if wrong else place)
    assert place_of(Turn("click('1')", "a page", 0.0, False, {AFTER: NAME})) is None


def test_copying_twice_changes_nothing_and_works_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = keep(picture(1), tmp_path / "a")

    def no_links(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr("os.link", no_links)
    for _ in range(2):
        copy_screens([name, name], tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == [name]
