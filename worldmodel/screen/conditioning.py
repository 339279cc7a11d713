"""What the model is told besides the screen: where the action went, and the words of action, task and page.

Words are hashed, whole and in threes of letters (as in fastText; Bojanowski et al., arXiv 1607.04606), so that there
is no vocabulary to fit or to store; the network's own first layer for words turns features into meanings.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from real_envs.screens import Place

MAPS = 2  # channels of an action map
_WORD = re.compile(r"[^\W_]+")


def action_map(place: Place | None, size: tuple[int, int], shrink: int) -> Tensor:
    """Where the action went: float32 ``[2, height, width]`` in [0, 1], all 0 where that is not known.

    The first channel is 1 within the element; the second is a bell around its centre, where a click lands, with a
    standard deviation of 3 pixels.

    Args:
        place: in pixels of the screenshot.
        size: height and width of the map, in pixels of the model.
        shrink: pixels of the screenshot, each way, that are one of the model.
    """
    height, width = size
    found = torch.zeros(MAPS, height, width)
    if place is None:
        return found
    y = torch.arange(height)[:, None] + 0.5
    x = torch.arange(width)[None, :] + 0.5
    left, top, w, h = (value / shrink for value in place)
    found[0] = ((x >= left) & (x < left + w) & (y >= top) & (y < top + h)).float()
    found[1] = torch.exp(-((x - left - w / 2) ** 2 + (y - top - h / 2) ** 2) / (2 * 3.0**2))
    return found


def news(page: str, answer: str) -> str:
    """What the page's text says after a turn and did not say before: its new lines."""
    old = set(page.splitlines())
    return "\n".join(line for line in answer.splitlines() if line not in old)


@lru_cache(maxsize=4096)  # a log says the same things again and again
def word_features(
    action: str, goal: str, count: int, width: int, told: str = "", told_count: int = 0
) -> tuple[Tensor, Tensor]:
    """The first words of action, task and of what the page's text newly says, each as its hashed features.

    Args:
        count: words of the action, and of the task, at most.
        told_count: of what is told.

    Returns:
        float32 ``[2 * count + told_count, width]``, rows of length 1, and bool ``[2 * count + told_count]``, true where
        there is a word. The action has at least one: an empty one is a word of its own.
    """
    rows = 2 * count + told_count
    features, present = torch.zeros(rows, width), torch.zeros(rows, dtype=torch.bool)
    parts = (("a", _words(action) or [""], count), ("g", _words(goal), count), ("p", _words(told), told_count))
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
