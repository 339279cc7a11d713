"""Screens dreamed of logged turns: each from the real screen before it, or episodes from their first screen alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from real_envs.seeding import derive_seed
from worldmodel.screen.frames import Frames, Transition
from worldmodel.screen.model import ScreenModel

BATCH = 8  # screens at once


def dream_turns(
    model: ScreenModel,
    turns: Sequence[Transition],
    before: Sequence[Tensor],
    steps: int,
    seed: int,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[Tensor]:
    """The screens after these turns, uint8 ``[3, height, width]`` each, given those before them."""
    found: list[Tensor] = []
    for first in range(0, len(turns), BATCH):
        rows = slice(first, first + BATCH)
        some = turns[rows]
        conditions = model.conditions(before[rows], some)
        seeds = [seed_of(turn, seed) for turn in some]
        device = next(model.parameters()).device
        found += list(model.dream(conditions.to(device), steps, seeds).cpu())
        on_done(len(found))
    return found


def seed_of(turn: Transition, seed: int) -> int:
    """The same noise for a turn wherever it is dreamed."""
    return derive_seed(f"dreamed screen/{turn.episode}", seed, turn.turn)


def dream_episodes(
    model: ScreenModel, episodes: Sequence[Sequence[Transition]], frames: Frames, steps: int, seed: int
) -> list[list[Tensor]]:
    """Open loop: the first real screen of each episode is given, and later ones are dreamed from dreamed ones."""
    dreamed: list[list[Tensor]] = [[] for _ in episodes]
    for number in range(max(map(len, episodes), default=0)):
        running = [k for k, episode in enumerate(episodes) if len(episode) > number]
        last = [dreamed[k][-1] if number else frames[episodes[k][0].before] for k in running]
        now = dream_turns(model, [episodes[k][number] for k in running], last, steps, seed)
        for k, screen in zip(running, now, strict=True):
            dreamed[k].append(screen)
    return dreamed


def by_episode(turns: Sequence[Transition]) -> Mapping[str, list[Transition]]:
    """Turns of each episode, as far as they follow each other without a gap."""
    found: dict[str, list[Transition]] = {}
    for turn in turns:
        mine = found.setdefault(turn.episode, [])
        if not mine or mine[-1].turn + 1 == turn.turn:
            mine.append(turn)
    return found


def as_pictures(screens: Sequence[Tensor]) -> Tensor:
    """Float32 ``[batch, 3, height, width]`` in [0, 1], as ``worldmodel.evaluation.screens`` reads them."""
    return torch.stack(list(screens)).float() / 255
