"""Pages whose text a world model dreams, for screens that are drawn from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from policy.lm.engine import ContextFull
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn
from worldmodel.screen.frames import Transition
from worldmodel.world_model import PredictionInvalid, WorldModel


async def dream_pages(
    world: WorldModel, episodes: Mapping[str, Trajectory], groups: Sequence[Sequence[Transition]], seed: int
) -> list[list[Transition]]:
    """The same turns with pages that the world model says come next. Where what it says cannot be read, the answer is
    empty, so that nothing on it is new, and the page stays.

    Args:
        episodes: that the turns are of, by id.
        groups: turns that follow each other. What comes before a group is real, and within it each page follows from
            dreamed ones; groups of one turn are thus dreamed from reality alone.
    """
    return list(await asyncio.gather(*(_dream(world, episodes[g[0].episode], g, seed) for g in groups)))


async def _dream(world: WorldModel, episode: Trajectory, group: Sequence[Transition], seed: int) -> list[Transition]:
    first = group[0]
    history, page = list(episode.turns[: first.turn]), first.page
    session, found = ("screens", first.episode, first.turn, len(group)), []
    for turn in group:
        answer, reward, ended = "", 0.0, False
        drawn = derive_seed(f"dreamed page/{turn.episode}", seed, turn.turn)
        with contextlib.suppress(PredictionInvalid, ContextFull):  # counted by ``pages_right`` of the audit
            told = await world.predict(episode.start, history, turn.action, drawn, session)
            answer, reward, ended = told.observation, told.reward, told.terminated
        found.append(replace(turn, page=page, answer=answer))
        page = answer or page
        history.append(Turn(turn.action, page, reward, ended))
    world.release(session)
    return found
