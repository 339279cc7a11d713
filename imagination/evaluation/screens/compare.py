"""Episodes dreamed again with their own actions, turn by turn beside reality: where do they visibly part?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from imagination.evaluation.screens.dreams import as_pictures
from imagination.evaluation.screens.measure import differ
from worldmodel.evaluation.screens import iou, psnr, squared_error, visible
from worldmodel.screen.frames import Frames, Transition

PARTED = 0.005  # share of a screen's pixels that visibly differ, from which on a dream has parted from reality


def compared(
    episodes: Sequence[Sequence[Transition]],
    loops: Sequence[Sequence[Tensor]],
    ahead: Sequence[Sequence[Tensor]],
    frames: Frames,
    keep: Callable[[Tensor], str],
) -> list[dict[str, Any]]:
    """A dict an episode, with a dict a turn, ready for JSON.

    Args:
        loops: the screens after each turn, dreamed from the first real screen on.
        ahead: the same, each dreamed from the real screen before it.
        keep: writes a picture and gives its name.
    """
    return [
        _episode(episode, loop, one, frames, keep) for episode, loop, one in zip(episodes, loops, ahead, strict=True)
    ]


def _episode(
    episode: Sequence[Transition],
    loop: Sequence[Tensor],
    ahead: Sequence[Tensor],
    frames: Frames,
    keep: Callable[[Tensor], str],
) -> dict[str, Any]:
    old = as_pictures([frames[turn.before] for turn in episode])
    real = as_pictures([frames[turn.after] for turn in episode])
    dream, one = as_pictures(loop), as_pictures(ahead)
    error = squared_error(dream, real)
    off = visible(dream, real).flatten(1).float().mean(1)
    region, overlap = differ(old, real), iou(visible(old, one), visible(old, real))
    height, width = frames.full
    turns = [
        {
            "action": turn.action,
            "place": None
            if turn.place is None
            else [
                round(value / whole, 4) for value, whole in zip(turn.place, (width, height, width, height), strict=True)
            ],
            "reward": turn.reward,
            "terminated": turn.terminated,
            "real": turn.after,
            "shrunk": keep(frames[turn.after]),  # as the model sees it: what it can differ from
            "dream": keep(loop[k]),
            "ahead": keep(ahead[k]),
            "changes": region[k],
            "off": round(float(off[k]), 4),
            "parted": bool(off[k] > PARTED),
            "psnr": round(psnr(float(error[k])), 1),
            "iou": round(float(overlap[k]), 2) if region[k] else None,
        }
        for k, turn in enumerate(episode)
    ]
    return {
        "id": episode[0].episode,
        "task_id": episode[0].task_id,
        "goal": episode[0].goal,
        "start": episode[0].before,
        "parted": next((k for k, turn in enumerate(turns) if turn["parted"]), None),
        "turns": turns,
    }
