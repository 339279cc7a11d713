"""World models of many fidelities: which there are, and how errors are planted in the log that one reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn

T = TypeVar("T")
Place = tuple[int, int]  # episode, turn


@dataclass(frozen=True, slots=True)
class Variant:
    """One world model.

    Attributes:
        axis: what is made worse.
        settings: overrides of the fit.
        share: of the log that is kept (axis ``log``) or made wrong (``reward``, ``observation``, ``end``).
        free: also train without guard and tripwires.
    """

    name: str
    axis: str
    settings: tuple[str, ...] = ()
    share: float = 0.0
    free: bool = False


FULL = Variant("full", "full", free=True)
VARIANTS = (
    FULL,
    Variant("log-30", "log", share=0.3),
    Variant("log-10", "log", share=0.1, free=True),
    Variant("steps-300", "steps", ("fit.steps=300",)),
    Variant("steps-100", "steps", ("fit.steps=100",), free=True),
    Variant("size-64", "size", ("worldmodel.hidden=64", "worldmodel.mlp=192")),
    Variant("size-32", "size", ("worldmodel.hidden=32", "worldmodel.mlp=96"), free=True),
    Variant("reward-10", "reward", share=0.1),
    Variant("reward-30", "reward", share=0.3, free=True),
    Variant("observation-10", "observation", share=0.1),
    Variant("observation-30", "observation", share=0.3, free=True),
    Variant("end-10", "end", share=0.1),
    Variant("end-30", "end", share=0.3, free=True),
)
PLANTED = ("log", "reward", "observation", "end")


def planted(log: Sequence[Trajectory], axis: str, share: float, seed: int) -> list[Trajectory]:
    """A log made worse; the given one stays as it is. The same seed chooses the same, and a larger share adds to it.

    - ``log``: that share of the episodes, and nothing else.
    - ``reward``: that share of the rewarded turns earns nothing, and as many others earn what those did.
    - ``observation``: that share of the turns has the observation of another of them.
    - ``end``: that share of the turns has the wrong end flag; the episode goes on as it did.

    Args:
        log: real episodes.
        axis: one of ``PLANTED``.
        share: in [0, 1].

    Raises:
        ValueError: there is no such axis.
    """
    if axis not in PLANTED:
        raise ValueError(f"nothing is planted for {axis!r}; one of {', '.join(PLANTED)} is")
    chance = random.Random(derive_seed(f"fidelity/{axis}", seed))
    if axis == "log":
        kept = sorted(_drawn(range(len(log)), share, chance))
        return [log[place] for place in kept]
    turns = {(e, k): turn for e, episode in enumerate(log) for k, turn in enumerate(episode.turns)}
    if axis == "reward":
        changed = _rewards(turns, share, chance)
    elif axis == "end":
        changed = {p: replace(turns[p], terminated=not turns[p].terminated) for p in _drawn(list(turns), share, chance)}
    else:
        chosen = _drawn(list(turns), share, chance)
        donors = [*chosen[1:], *chosen[:1]]  # the next one's: nobody keeps its own
        changed = {
            p: replace(turns[p], observation=turns[donor].observation) for p, donor in zip(chosen, donors, strict=True)
        }
    return [
        replace(episode, turns=tuple(changed.get((e, k), turn) for k, turn in enumerate(episode.turns)))
        for e, episode in enumerate(log)
    ]


def _rewards(turns: dict[Place, Turn], share: float, chance: random.Random) -> dict[Place, Turn]:
    paid = [p for p, turn in turns.items() if turn.reward]
    losers = _drawn(paid, share, chance)
    unpaid = [p for p, turn in turns.items() if turn.reward == 0]
    chance.shuffle(unpaid)
    changed = {p: replace(turns[p], reward=0.0) for p in losers}
    # a log in which nearly every turn is paid has fewer that can gain one
    return changed | {p: replace(turns[p], reward=turns[q].reward) for p, q in zip(unpaid, losers, strict=False)}


def _drawn(places: Sequence[T], share: float, chance: random.Random) -> list[T]:
    """That share of them, rounded, in random order; all are shuffled, so that a smaller share is part of a larger."""
    order = list(places)
    chance.shuffle(order)
    return order[: round(share * len(order))]
