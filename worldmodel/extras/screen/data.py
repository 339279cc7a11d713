"""Logged turns with their screenshots as a model of pictures reads them: pixels, where the action went, and words."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from real_envs.errors import UserError
from real_envs.screens import BEFORE, Place, place_of, screen_of
from real_envs.trajectory import Trajectory

MAPS = 2  # channels of an action map
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class ScreenTransition:
    """A turn between two screenshots, whose files ``before`` and ``after`` name.

    Attributes:
        page, answer: the observations before and after.
    """

    episode: str
    turn: int
    task_id: str
    goal: str  # the first line of the episode's start
    action: str
    place: Place | None  # of the element that the action named, in pixels of the screenshot ``before``
    before: str
    after: str
    page: str
    answer: str
    reward: float | None
    terminated: bool

    @property
    def changes(self) -> bool:
        return self.before != self.after


def transitions_of(episodes: Iterable[Trajectory]) -> list[ScreenTransition]:
    """The turns that have a screenshot before and after them, in order."""
    transitions = []
    for episode in episodes:
        if not episode.turns:
            continue
        before, page = screen_of(episode.turns[0], BEFORE), episode.start
        for number, turn in enumerate(episode.turns):
            after = screen_of(turn)
            if before and after:
                transitions.append(
                    ScreenTransition(
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
    return transitions


def padded(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """``size`` rounded up to multiples, each way."""
    height, width = size
    return math.ceil(height / multiple) * multiple, math.ceil(width / multiple) * multiple


class Frames:
    """The screenshots of some turns in memory, shrunk: uint8 ``[3, height, width]`` by name.

    Args:
        shrink: pixels, each way, of which one is made, their mean.

    Raises:
        UserError: a file is missing or no picture, or they have several sizes.
    """

    def __init__(self, names: Iterable[str], folders: Sequence[Path], shrink: int) -> None:
        self.shrink = shrink
        self._pixels: dict[str, Tensor] = {}
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
            self._pixels[name] = _shrunk(pixels, shrink)
        height, width = self.full
        self.size = (math.ceil(height / shrink), math.ceil(width / shrink))

    def __getitem__(self, name: str) -> Tensor:
        return self._pixels[name]

    def __len__(self) -> int:
        return len(self._pixels)


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


def action_map(place: Place | None, size: tuple[int, int], shrink: int) -> Tensor:
    """Where the action went: float32 ``[2, height, width]`` in [0, 1], all 0 where that is not known.

    The first channel is 1 within the element; the second is a bell around its centre, where a click lands, with a
    standard deviation of 3 pixels.
    """
    height, width = size
    channels = torch.zeros(MAPS, height, width)
    if place is None:
        return channels
    y = torch.arange(height)[:, None] + 0.5
    x = torch.arange(width)[None, :] + 0.5
    left, top, w, h = (value / shrink for value in place)
    channels[0] = ((x >= left) & (x < left + w) & (y >= top) & (y < top + h)).float()
    channels[1] = torch.exp(-((x - left - w / 2) ** 2 + (y - top - h / 2) ** 2) / (2 * 3.0**2))
    return channels


def new_lines(page: str, answer: str) -> str:
    """The lines of the page's text after a turn that it did not have before."""
    old = set(page.splitlines())
    return "\n".join(line for line in answer.splitlines() if line not in old)


@lru_cache(maxsize=4096)  # a log says the same things again and again
def word_features(
    action: str, goal: str, count: int, width: int, page: str = "", page_count: int = 0
) -> tuple[Tensor, Tensor]:
    """The first words of action, task and page, each as its hashed features.

    Words are hashed, whole and in threes of letters (as in fastText; Bojanowski et al., arXiv 1607.04606), so that
    there is no vocabulary to fit or to store; the network's own first layer for words turns features into meanings.

    Args:
        count: words of the action, and of the task, at most.
        page: what the page's text newly says.
        page_count: words of that, at most.

    Returns:
        float32 ``[2 * count + page_count, width]``, rows of length 1, and bool ``[2 * count + page_count]``, true where
        there is a word. The action has at least one: an empty one is a word of its own.
    """
    rows = 2 * count + page_count
    features, present = torch.zeros(rows, width), torch.zeros(rows, dtype=torch.bool)
    parts = (("a", _words(action) or [""], count), ("g", _words(goal), count), ("p", _words(page), page_count))
    for first, (kind, words, most) in zip((0, count, 2 * count), parts, strict=True):
        for k, word in enumerate(words[:most]):
            for place in _places(kind, word, k, width):
                features[first + k, place] += 1.0
            present[first + k] = True
    return features / features.norm(dim=1, keepdim=True).clamp(min=1.0), present


def _words(text: str) -> Sequence[str]:
    return _WORD.findall(text.lower())


def _places(kind: str, word: str, position: int, width: int) -> tuple[int, ...]:
    marked = f"<{word}>"
    parts = [f"{kind}:{marked}", f"{kind}#{position}", *(marked[k : k + 3] for k in range(len(marked) - 2))]
    return tuple(int.from_bytes(hashlib.sha256(part.encode()).digest()[:4]) % width for part in parts)
