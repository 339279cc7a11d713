"""Many clients at a time, each of OpenEnv's own package with a socket and an episode of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from openenv.core.generic_client import GenericEnvClient

from imagination.serving.sessions import DreamWorld, Refused, Sessions
from imagination.settings.dreams import ServeSettings


@dataclass(frozen=True, slots=True)
class Played:
    """One client's episode.

    Attributes:
        texts: all that it read, the beginning first.
        rewards: of its steps.
        end: ``done``, or what the server said instead of a step.
    """

    texts: tuple[str, ...]
    rewards: tuple[float, ...]
    end: str


def own_words(client: int) -> list[str]:
    """Actions that no other client takes, three to nine of them, the last of which wins."""
    return [f"client-{client} turn-{turn}" for turn in range(random.Random(client).randrange(2, 9))] + ["win"]


async def play_together(
    address: str, episodes: Sequence[list[str]], meanwhile: Callable[[], Awaitable[None]] | None = None
) -> list[Played]:
    """Client ``k`` plays the actions ``episodes[k]`` under seed ``k``, until they or the episode end.

    Args:
        meanwhile: done when all have begun and none has taken a step.
    """
    begun, go = asyncio.Barrier(len(episodes) + 1), asyncio.Event()

    async def play(seed: int, actions: list[str]) -> Played:
        async with GenericEnvClient(base_url=f"ws://{address}", connect_timeout_s=60) as env:
            result = await env.reset(seed=seed)
            texts: list[str] = [result.observation["text"]]
            rewards: list[float] = []
            await begun.wait()
            await go.wait()
            for action in actions:
                try:
                    result = await env.step({"message": action})
                except RuntimeError as error:  # what the package makes of an error of the server
                    return Played(tuple(texts), tuple(rewards), str(error))
                texts.append(result.observation["text"])
                rewards.append(result.reward)
                if result.done:
                    return Played(tuple(texts), tuple(rewards), "done")
            return Played(tuple(texts), tuple(rewards), "out of actions")

    async def start() -> None:
        await begun.wait()
        if meanwhile is not None:
            await meanwhile()
        go.set()

    async with asyncio.TaskGroup() as group:  # one client that fails ends all: the others would wait for it
        playing = [group.create_task(play(seed, actions)) for seed, actions in enumerate(episodes)]
        group.create_task(start())
    return [one.result() for one in playing]


async def play_alone(world: DreamWorld, seed: int, actions: list[str]) -> list[str]:
    """What one episode reads where there is no server and no other session."""
    session = await Sessions(world, ServeSettings()).open()
    texts = [(await session.reset(None, seed)).text]
    for action in actions:
        try:
            answer = await session.step(action)
        except Refused:
            break
        texts.append(answer.text)
        if answer.done:
            break
    return texts
