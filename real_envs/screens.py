"""Pictures beside turns: PNG files named after their content, and their names in ``Turn.info``.

``info["screenshot"]`` is what was seen after the action; the first turn of an episode also has
``info["screenshot_before"]``, what was seen at the reset. Environments write the files into ``screens/`` in the folder
of their tasks; a store keeps copies in its own ``screens/``. No model of text reads them.

Where an action named an element that was in sight, its turn also has the element's ``Place`` in the picture before the
action: ``info["action_x"]``, ``action_y``, ``action_width`` and ``action_height``. Older logs have none.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from real_envs.trajectory import Trajectory, Turn

FOLDER = "screens"
AFTER, BEFORE = "screenshot", "screenshot_before"
_PLACE = ("action_x", "action_y", "action_width", "action_height")
_NAME = re.compile(r"[0-9a-f]{32}\.png")


class Place(NamedTuple):
    """A rectangle in a picture, in its pixels; ``x`` and ``y`` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def info(self) -> dict[str, float]:
        return dict(zip(_PLACE, self, strict=True))


def place_of(turn: Turn) -> Place | None:
    """Where the element was that a turn's action named; ``None`` where that is not known."""
    place = [turn.info.get(key) for key in _PLACE]
    numbers = [float(v) for v in place if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if len(numbers) != len(_PLACE) or not all(map(math.isfinite, numbers)) or min(numbers[2:]) < 0:
        return None
    return Place(*numbers)


def keep(pixels: Any, folder: Path) -> str:
    """Writes a picture, uint8 height x width x 3, and gives the name of its file; equal pictures are one file."""
    from PIL import Image

    name = f"{hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()[:32]}.png"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{name}.{os.getpid()}"  # other workers may write the same one
        Image.fromarray(pixels).save(draft, format="PNG")
        draft.replace(path)
    return name


def screen_of(turn: Turn, key: str = AFTER) -> str | None:
    name = turn.info.get(key)
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def screens_of(episodes: Iterable[Trajectory]) -> Iterator[str]:
    for episode in episodes:
        for turn in episode.turns:
            yield from filter(None, (screen_of(turn, BEFORE), screen_of(turn, AFTER)))


def copy_screens(names: Iterable[str], source: Path, target: Path) -> None:
    """Those that are there and not yet here; a link where the file system can."""
    for name in set(names):
        if not (target / name).exists() and (source / name).exists():
            target.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                try:
                    os.link(source / name, target / name)
                except OSError:
                    shutil.copyfile(source / name, target / name)
