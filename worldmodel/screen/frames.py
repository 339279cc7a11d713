"""Logged turns with their screenshots, as a model of pictures reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from real_envs.errors import UserError
from real_envs.screens import BEFORE, Place, place_of, screen_of
from real_envs.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Transition:
    """A turn between two screenshots.

    Attributes:
        episode, turn: which one, from 0.
        task_id: of the episode.
        goal: the first line of its start.
        action: as the environment got it.
        place: of the element that the action named, in pixels of the screenshot ``before``.
        before, after: names of the screenshots' files.
        page, answer: the observations before and after.
        reward: ``None`` where nobody measured it.
        terminated: the world ended with it.
    """

    episode: str
    turn: int
    task_id: str
    goal: str
    action: str
    place: Place | None
    before: str
    after: str
    page: str
    answer: str
    reward: float | None
    terminated: bool

    @property
    def changes(self) -> bool:
        """Whether anything was to be seen."""
        return self.before != self.after


def transitions_of(episodes: Iterable[Trajectory]) -> list[Transition]:
    """The turns that have a screenshot before and after them, in order."""
    found = []
    for episode in episodes:
        if not episode.turns:
            continue
        before, page = screen_of(episode.turns[0], BEFORE), episode.start
        for number, turn in enumerate(episode.turns):
            after = screen_of(turn)
            if before and after:
                found.append(
                    Transition(
                        episode=episode.id,
                        turn=number,
                        task_id=episode.task_id,
                        goal=episode.start.partition("\n")[0],
                        action=turn.action,
                        place=place_of(turn),
                        before=before,
                        after=after,
                        page=page,
                        answer=turn.observation,
                        reward=turn.reward,
                        terminated=turn.terminated,
                    )
                )
            before, page = after, turn.observation
    return found


def padded(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """The least height and width that hold ``size`` and are multiples."""
    height, width = size
    return math.ceil(height / multiple) * multiple, math.ceil(width / multiple) * multiple


class Frames:
    """The screenshots of some turns in memory, shrunk: uint8 ``[3, height, width]`` by name.

    Args:
        names: of the files.
        folders: where they may be.
        shrink: pixels, each way, of which one is made, their mean.

    Raises:
        UserError: a file is missing or no picture, or they have several sizes.
    """

    def __init__(self, names: Iterable[str], folders: Sequence[Path], shrink: int) -> None:
        self.shrink = shrink
        self._found: dict[str, Tensor] = {}
        self.full = (0, 0)  # height and width of the screenshots
        first = ""
        for name in sorted(set(names)):
            pixels = _read(name, folders)
            if not first:
                first, self.full = name, pixels.shape[:2]
            elif pixels.shape[:2] != self.full:
                (h, w), (height, width) = self.full, pixels.shape[:2]
                raise UserError(
                    f"screenshots have several sizes: {first} is {w}x{h}, {name} is {width}x{height} pixels; log with "
                    "one size of the browser's window, or keep worlds of different sizes in runs of their own"
                )
            self._found[name] = _shrunk(pixels, shrink)
        height, width = self.full
        self.size = (math.ceil(height / shrink), math.ceil(width / shrink))

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name]

    def __len__(self) -> int:
        return len(self._found)


def _read(name: str, folders: Sequence[Path]) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        where = " or ".join(str(folder) for folder in folders)
        raise UserError(
            f"{name} is not in {where}, though the log names it; copy the folder of screenshots beside the log"
        )
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} cannot be read as a picture ({type(error).__name__}); restore it or log again"
        ) from None


def _shrunk(pixels: np.ndarray, by: int) -> Tensor:
    """Means of squares; what a side lacks to a whole square repeats its edge."""
    height, width = pixels.shape[:2]
    pixels = np.pad(pixels, ((0, -height % by), (0, -width % by), (0, 0)), mode="edge")
    squares = torch.from_numpy(pixels).float().unflatten(1, (-1, by)).unflatten(0, (-1, by))
    return squares.mean((1, 3)).round().to(torch.uint8).permute(2, 0, 1).contiguous()
