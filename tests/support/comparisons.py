"""Comparisons to test pages, tables and statistics with: pairs made up by a seeded generator, real in their form."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from imagination.evaluation.compare.pairs import Pair, pair_json, pair_up, statistics
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

ROOMS = ("attic", "hall", "kitchen", "cellar", "garden", "vault")
THINGS = ("lamp", "key", "coin", "rope", "cheese", "map")


def episode(
    id: str,
    turns: Sequence[Turn],
    source: Source = Source.DREAM,
    stop: StopReason | None = None,
    task: str = "tw-1",
    start: str = "-= Attic =-",
) -> Trajectory:
    """An episode of these turns; ``stop`` follows from them where it is not given."""
    ended = bool(turns) and turns[-1].terminated
    stop = stop or (StopReason.TERMINATED if ended else StopReason.TURN_LIMIT)
    return Trajectory(id, task, f"{task}/g", source, "policy", 0, start, tuple(turns), stop)


def room(chance: random.Random) -> str:
    """Some 200 characters, as a game says them."""
    name, thing, other = chance.choice(ROOMS), chance.choice(THINGS), chance.choice(THINGS)
    ways = " and ".join(chance.sample(["north", "south", "east", "west"], 2))
    return (
        f"-= {name.title()} =-\nYou find yourself in a {name}. It is what it is. You can see a {thing} on a table "
        f"number {chance.randrange(40)}, and under it a {other} that nobody wanted.\nThere are exits to the {ways}."
    )


def made_up_pair(number: int, turns: int = 10, first: int | None = None) -> Pair:
    """A pair that parts at turn ``first``, in the state; every tenth dream is solved there, for nothing."""
    chance = random.Random(number)
    dream: list[Turn] = []
    real: list[Turn] = []
    for k in range(turns):
        action, text, parted = f"take {chance.choice(THINGS)}", room(chance), first is not None and k >= first
        false = k == first and number % 10 == 0
        seen = text.replace("table", "shelf") if parted else text
        dream.append(Turn(action, seen, float(false), false, {"confidence": 0.9}))
        real.append(Turn(action, text, 0.0, False))
        if false:
            break
    task, split = f"game-{number % 12}", "heldout" if number % 3 == 0 else "train"
    source = "log" if number % 4 == 0 else "dream"
    id = f"{source}/{split}/{task}/{number}"
    start = f"Find the {THINGS[number % 6]}. {room(chance)}"
    return pair_up(
        id, source, split, episode(id, dream, task=task, start=start),
        episode(f"r/{id}", real, Source.REAL, task=task, start=start),
    )  # fmt: skip


def comparison(pairs: Sequence[Pair], **more: Any) -> dict[str, Any]:
    """A whole ``compare.json`` of these pairs."""
    kinds = sorted({(pair.source, pair.split) for pair in pairs})
    return {
        "format": "imagination-comparison", "version": 1, "run": "made-up", "seed": 0, "temperature": 1.0,
        "guard": 0.8, "max_turns": 12, "policy": "policy", "policy_version": "p", "world_model_version": "w",
        "hardware": "2 cores", "notes": [],
        "aligned": [
            {"source": s, "split": p, **statistics([x for x in pairs if (x.source, x.split) == (s, p)])}
            for s, p in kinds
        ],
        "free": [],
        "cost": {"real_steps": {"replay": 3}, "seconds": {"replay": 0.5}, "generated_tokens": {"replay": 0}},
        "pairs": [pair_json(pair) for pair in pairs], **more,
    }  # fmt: skip
