"""How good are dreamed screens? Numbers with n and interval, beside those of a model that says that nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from imagination.evaluation.screens.dreams import as_pictures
from worldmodel.evaluation.intervals import ANYWHERE, SHARE, Estimate, Interval, clusters, estimate, proportion, ratio
from worldmodel.evaluation.screens import iou, psnr, squared_error, squared_error_within, ssim, visible
from worldmodel.screen.frames import Transition

Statistic = Callable[[np.ndarray], float | None]
LEAST = 4  # pixels that visibly differ, from which on two screens do


def differ(a: Tensor, b: Tensor) -> list[bool]:
    """Whether screens differ to the eye; pictures as ``worldmodel.evaluation.screens`` reads them."""
    return [int(n) >= LEAST for n in visible(a, b).flatten(1).sum(1)]


def alikeness(
    turns: Sequence[Transition],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    dreamed: Sequence[Tensor],
    seed: int,
) -> dict[str, Any]:
    """Dreamed screens beside the real ones: uint8 ``[3, height, width]`` each.

    Signal-to-noise ratios are those of the mean error over all turns. ``copy`` is the same of the screen before the
    turn. Of turns that visibly change something: the error within the region that really changes, and the intersection
    over union of the regions that change in dream and reality. Of the others: the share that the dream leaves alone,
    too.
    """
    old, real, dream = as_pictures(before), as_pictures(after), as_pictures(dreamed)
    cluster = clusters([t.task_id for t in turns], [t.episode for t in turns])
    changes = differ(old, real)
    region, dreamed_region = visible(old, real), visible(old, dream)

    def mean(
        values: Tensor, which: Sequence[bool] | None = None, bounds: Interval = ANYWHERE, of: Statistic = ratio
    ) -> dict[str, Any]:
        kept = [k for k in range(len(turns)) if which is None or which[k]]
        rows = [(float(values[k]), 1.0) for k in kept]
        return estimate(rows, [cluster[k] for k in kept], of, seed, bounds=bounds).to_json()

    sides = (("dream", dream), ("copy", old))
    still = [k for k in range(len(turns)) if not changes[k]]
    left_alone = [not found for found in differ(old, dream)]
    return {
        "turns": len(turns),
        "changing_turns": sum(changes),
        "psnr": {side: mean(squared_error(shown, real), of=_pooled_psnr) for side, shown in sides},
        "ssim": {side: mean(ssim(shown, real)) for side, shown in sides},
        "changed_region_psnr": {
            side: mean(squared_error_within(shown, real, region), changes, of=_pooled_psnr) for side, shown in sides
        },
        "changed_region_iou": {"dream": mean(iou(dreamed_region, region), changes, SHARE)},
        "unchanged_left_alone": {
            "dream": proportion([left_alone[k] for k in still], [cluster[k] for k in still]).to_json()
        },
    }


def _pooled_psnr(total: np.ndarray) -> float | None:
    """Of the sum of squared errors and how many there are."""
    error = ratio(total)
    return None if error is None else psnr(error)


def pairs_of(turns: Sequence[Transition]) -> list[tuple[int, int]]:
    """Places of turns that begin at the same screen with different actions, each pair of actions once a screen."""
    first: dict[str, dict[str, int]] = {}
    for k, turn in enumerate(turns):
        first.setdefault(turn.before, {}).setdefault(turn.action, k)
    return [(a, b) for same in first.values() for a in same.values() for b in same.values() if a < b]


def sensitivity(
    turns: Sequence[Transition], after: Sequence[Tensor], dreamed: Sequence[Tensor]
) -> Mapping[str, Mapping[str, Any]]:
    """Does the action matter in the dream as it does in reality? From pairs of actions at the same screen.

    ``differ``: of pairs with different real outcomes, those whose dreams differ. ``own``: of these pairs, those in
    which each dream is nearer to its own outcome than to the other's (dreams that ignore the action never are both).
    ``same``: of pairs with the same real outcome, those whose dreams do not differ.
    """
    pairs = pairs_of(turns)
    if not pairs:
        nothing = Estimate(None, 0).to_json()
        return {"differ": nothing, "own": nothing, "same": nothing}
    left, right = ([pair[side] for pair in pairs] for side in (0, 1))
    real = [as_pictures([after[k] for k in side]) for side in (left, right)]
    dream = [as_pictures([dreamed[k] for k in side]) for side in (left, right)]
    apart, dreamed_apart = differ(*real), differ(*dream)

    def far(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().flatten(1).mean(1)

    own = (far(dream[0], real[0]) < far(dream[0], real[1])) & (far(dream[1], real[1]) < far(dream[1], real[0]))
    cluster = clusters([turns[k].task_id for k in left], [turns[k].before for k in left])

    def share(hits: Sequence[bool], among: Sequence[bool]) -> dict[str, Any]:
        kept = [k for k in range(len(pairs)) if among[k]]
        return proportion([bool(hits[k]) for k in kept], [cluster[k] for k in kept]).to_json()

    return {
        "differ": share(dreamed_apart, apart),
        "own": share(own.tolist(), apart),
        "same": share([not d for d in dreamed_apart], [not a for a in apart]),
    }
