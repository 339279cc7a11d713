"""Rows for one policy update: groups of multi-turn episodes that share their start and diverge as a policy makes them.

Token ids are drawn at random, since speed does not depend on what they say. What does matter has the shape of real
rollouts: how long actions, observations and episodes are, and for how many turns the episodes of a group agree. The
world is deterministic, so two episodes agree until their first different action, and a policy has favourites: among the
actions it may take in a state, the k-th has probability ``(1 - spread) spread^k``.

How much the rows of a group agree decides what computing every prefix once can save, so it must not be flattering. In
real dreams of ``make demo`` (seed 0, 6 groups of 12), 50 % of the tokens were distinct prefixes with
the cloned policy, which repeated 1.1 of 4.1 turns, and 13 % with the trained one (4.3 of 4.7 turns). The default here
leaves about 65 % distinct: less agreement than at any time of that training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_ID = 5  # below are the special tokens


@dataclass(frozen=True)
class Shape:
    """What a batch looks like.

    Attributes:
        groups, size: how many groups of how many rows.
        turns: shortest and longest episode.
        action, observation: fewest and most tokens; an action's last one ends it.
        start: tokens of the first observation.
        spread: 0 repeats one episode; near 1, no two rows agree in more than their start.
    """

    groups: int = 4
    size: int = 12
    turns: tuple[int, int] = (8, 12)
    action: tuple[int, int] = (6, 10)
    observation: tuple[int, int] = (36, 60)
    start: int = 48
    spread: float = 0.3
    vocabulary: int = 2048


def make_rows(shape: Shape, seed: int = 0) -> list[dict[str, object]]:
    """Rows with ``ids``, ``made`` (1 on action tokens), ``prompt`` (length of the start), ``group`` and ``reward``."""
    rows: list[dict[str, object]] = []
    for group in range(shape.groups):
        for k in range(shape.size):
            chance = random.Random(f"{seed}/{group}/{k}")
            ids = list(_tokens(f"{seed}/{group}", (shape.start, shape.start), shape.vocabulary))
            made = [0] * len(ids)
            state = f"{seed}/{group}"
            turns = chance.randint(*shape.turns)
            for turn in range(turns):
                favourite = 0
                while chance.random() < shape.spread:
                    favourite += 1
                state = f"{state}/{favourite}"  # the whole history, so the world never comes back to a state
                action = list(_tokens(f"{state}/action", shape.action, shape.vocabulary))
                ids += action
                made += [1] * len(action)
                if turn < turns - 1:  # what follows the last action trains nothing, so neither side gets it
                    observation = list(_tokens(f"{state}/observation", shape.observation, shape.vocabulary))
                    ids += observation
                    made += [0] * len(observation)
            rows.append(
                {"ids": ids, "made": made, "prompt": shape.start, "group": group, "reward": round(chance.random(), 6)}
            )
    return rows


def _tokens(name: str, length: tuple[int, int], vocabulary: int) -> Iterator[int]:
    chance = random.Random(name)
    return (chance.randrange(FIRST_ID, vocabulary) for _ in range(chance.randint(*length)))
