"""Planted pages: a square stands wherever the last click was, and an action without a place changes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from real_envs.screens import AFTER, BEFORE, Place, keep
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

SIDE, SQUARE, CELLS = 32, 8, 4  # pixels of a page, of its square, and places for it, each way
COLOURS = {"blue": (20, 40, 160), "red": (200, 20, 20)}


def page(cell: tuple[int, int] | None, colour: str = "blue") -> np.ndarray:
    """White, with a square in one of 4 x 4 cells."""
    pixels = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    if cell is not None:
        x, y = (k * SQUARE for k in cell)
        pixels[y : y + SQUARE, x : x + SQUARE] = COLOURS[colour]
    return pixels


def text(cell: tuple[int, int] | None, colour: str = "") -> str:
    """The page as an observation: a line a cell, the dark one checked; and the colour, where it is one of several."""
    cells = [(x, y) for y in range(CELLS) for x in range(CELLS)]
    lines = [f"[{k + 1}] radio 'c'" + (" checked" if c == cell else "") for k, c in enumerate(cells)]
    return "\n".join([*lines, *([f"in {colour}"] if colour else [])])


def episode(
    name: str, task: str, screens: Path, rng: random.Random, turns: int = 4, coloured: bool = False
) -> Trajectory:
    """Some clicks; ``coloured`` ones come out in a colour that nothing tells but the page's text."""
    colour = "blue"
    cell: tuple[int, int] | None = None
    before, played = keep(page(cell), screens), list[Turn]()
    for number in range(turns):
        info: dict[str, float | str | bool] = {} if number else {BEFORE: before}
        if rng.random() < 0.8:
            cell = (rng.randrange(CELLS), rng.randrange(CELLS))
            colour = rng.choice(list(COLOURS)) if coloured else colour
            action = f"click('{cell[1] * CELLS + cell[0] + 1}')"
            info |= Place(cell[0] * SQUARE, cell[1] * SQUARE, SQUARE, SQUARE).info
        else:
            action = "noop(0)"
        info[AFTER] = keep(page(cell, colour), screens)
        played.append(Turn(action, text(cell, colour if coloured else ""), 0.0, False, info))
    return Trajectory(
        name, task, task, Source.REAL, "random", 0, f"Goal: any\n{text(None)}", tuple(played), StopReason.TURN_LIMIT
    )


def write_log(run: Path, train: int = 30, heldout: int = 6, coloured: bool = False) -> TrajectoryStore:
    """A run's log of such pages."""
    rng = random.Random(0)
    splits = {split: [f"{split}-{k}" for k in range(n)] for split, n in (("train", train), ("heldout", heldout))}
    store = TrajectoryStore.create(run / "log", splits, meta={"environment": "squares"})
    screens = run / "log" / "screens"
    with store.writer() as writer:
        for tasks in splits.values():
            for task in tasks:
                for k in range(2):
                    writer.add(episode(f"{task}/{k}", task, screens, rng, coloured=coloured))
    return store
